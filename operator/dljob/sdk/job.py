"""A job on the cluster."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from dljob.api import DLJobStatus, Phase, Progress
from dljob.client.errors import BadInputError
from dljob.client.model_copy import CopyOptions, copy_model
from dljob.client.output.live_logs import OVER, Following
from dljob.client.output.records import output_of, ranks_of, report_data_of, report_of
from dljob.client.output.usage import data_with_usage, text_with_usage, usage_of
from dljob.sdk import requests, targets
from dljob.sdk.errors import DLJobError, JobTimeoutError
from dljob.sdk.session import Session, translated
from dljob.sdk.targets import TARGETS, Target
from dljob.status import readable_status

T = TypeVar("T")


class Job:
    """A job on the cluster, from ``Client.submit``, ``Client.job`` or ``Client.jobs``.

    Each property reads the job from the API server, so its value is current. A Job stands for one object: if that is
    deleted, calls raise JobDeletedError, even if a new job has its name.
    """

    def __init__(self, session: Session, body: Mapping[str, Any]) -> None:
        """``body``: the job as an API object. Users call ``Client.job`` instead."""
        meta = body["metadata"]
        self._session = session
        self.name: str = meta["name"]
        self.namespace: str = meta["namespace"]
        self.uid: str = meta["uid"]

    def __repr__(self) -> str:
        return f"Job({self.namespace}/{self.name})"

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The job as an API object, with ``metadata``, ``spec`` and ``status``."""
        return self._session.call(lambda api: requests.read(api, self.namespace, self.name, self.uid))

    @property
    def status(self) -> DLJobStatus:
        """The status, such as ``status.plan``, ``status.measured`` and ``status.result``.

        Fields that a later release of the operator added are left out.
        """
        return _status(self.manifest)

    @property
    def phase(self) -> Phase:
        return self.status.phase

    @property
    def progress(self) -> Progress | None:
        """Step, percent, loss and metrics. None before the first step."""
        return self.status.progress

    def watch(self, timeout: float | None = None) -> Iterator[DLJobStatus]:
        """Yield the status now and after each change, until the job is complete or has failed.

        ``timeout``: seconds after which JobTimeoutError is raised; None: no limit. Raise JobDeletedError if the job is
        deleted meanwhile.
        """
        with closing(self._changes(timeout, "Complete")) as bodies:
            for body in bodies:
                status = _status(body)
                yield status
                if status.phase in OVER and targets.current(body, status):
                    return

    def wait(self, timeout: float | None = None, until: Target = "Complete") -> DLJobStatus:
        """Wait until the job has reached a state, and return its status.

        ``until``: ``Planned`` (the operator has chosen a plan), ``Running`` (or complete), ``Suspended`` or
        ``Complete``. ``timeout``: limit in seconds; None: no limit. Raise JobFailedError with the last output of the
        failed rank if the job fails, JobTimeoutError with what the job waits for after ``timeout``, and JobDeletedError
        if the job is deleted. Raise DLJobError if the job cannot reach the state.
        """
        if until not in TARGETS:
            raise ValueError(f"until: found {until!r}; expected one of {', '.join(TARGETS)}")
        with closing(self._changes(timeout, until)) as bodies:
            for body in bodies:
                status = _status(body)
                if not targets.current(body, status):
                    continue
                if targets.reached(status, until):
                    return status
                if status.phase is Phase.FAILED:
                    where = (self.namespace, self.name, self.uid, status)
                    raise self._session.call(lambda api: requests.failure(api, *where))  # noqa: B023 - called at once
                self._check_reachable(body, status, until)
        raise AssertionError("the changes of a job end only with an exception")

    def _check_reachable(self, body: Mapping[str, Any], status: DLJobStatus, until: Target) -> None:
        mode = ((body.get("spec") or {}).get("planning") or {}).get("mode")
        if mode == "PlanOnly" and until != "Planned":
            raise DLJobError(
                f"{self.name}: found spec.planning.mode: PlanOnly; expected another mode, because this job never runs. "
                'Use wait(until="Planned")'
            )
        if status.phase is Phase.COMPLETE:
            raise DLJobError(f"{self.name}: found a complete job; expected one that can still be {until}")

    def _changes(self, timeout: float | None, until: str) -> Generator[Mapping[str, Any], None, None]:
        """Yield the job now and after each change. Raise JobTimeoutError after ``timeout`` seconds."""
        body: Mapping[str, Any] | None = None
        where = (self.namespace, self.name, self.uid)
        with closing(self._session.stream(lambda api: requests.changes(api, *where), timeout)) as bodies:
            try:
                for body in bodies:
                    yield body
            except TimeoutError:
                why = targets.awaited(_status(body)) if body is not None else "the API server has not answered"
                raise JobTimeoutError(
                    f"{self.name}: found {why} after {timeout:g} s; expected {until}. The job continues; "
                    "wait longer, or look at job.status.conditions"
                ) from None

    def logs(self, rank: int | None = None) -> dict[int, str]:
        """Return {rank: last output} of a job whose ranks have ended, as ``dljob logs`` prints it.

        ``rank``: only this rank; None: all ranks. At most 32 KiB per rank are stored. Raise DLJobError if no output is
        stored, such as while the job runs, or if it is damaged.
        """
        records = self._records()
        ranks = ranks_of(records)
        wanted = ranks if rank is None else [each for each in ranks if each == rank]
        if not wanted:
            listed = ", ".join(map(str, ranks)) or "none"
            raise DLJobError(
                f"{self.name}: found output of ranks: {listed}; expected {'ranks' if rank is None else f'rank {rank}'} "
                "that have ended. While the job runs, use follow_logs"
            )
        return {each: _readable(output_of, records, each) for each in wanted}

    def follow_logs(self, rank: int | None = None, tail: int | None = None) -> Iterator[str]:
        """Yield the lines of all ranks as they come, until the job has ended, as ``dljob logs --follow`` prints them.

        ``rank``: only this rank, without ``[rank R]`` at the start of its lines; None: all ranks, and the agents of the
        pods. ``tail``: begin with so many lines of each pod; None: all lines. A job that has ended has no lines:
        ``logs`` returns the end of its output.
        """
        self._session.call(lambda api: requests.read(api, self.namespace, self.name, self.uid))
        following = self._session.stream(lambda api: Following(api, self.namespace, self.name, tail).lines())
        with closing(following) as lines:
            for line in lines:
                if (text := line.shown(rank)) is not None:
                    yield text

    def report(self) -> dict[str, Any]:
        """Return the data of the run report of a job that has ended, with what all its attempts have used.

        Raise DLJobError if there is none, or if it is damaged.
        """
        return data_with_usage(self._stored(_readable(report_data_of, self._records())), usage_of(self.manifest))

    def report_html(self) -> str:
        """Return the run report of a job that has ended as a page with plots, and with what its attempts have used.

        Raise DLJobError if there is none, or if it is damaged.
        """
        page = self._stored(_readable(report_of, self._records(), "html"))
        return text_with_usage(page, "html", usage_of(self.manifest))

    def _stored(self, report: T | None) -> T:
        if report is None:
            raise DLJobError(
                f"{self.name}: found no run report; expected a job that has ended. While the job runs, the report is "
                "on its checkpoint volume"
            )
        return report

    def _records(self) -> Mapping[str, Any]:
        return self._session.call(lambda api: requests.records(api, self.namespace, self.name, self.uid))

    def model(
        self, directory: str | Path, *, everything: bool = False, image: str | None = None, timeout: float = 300.0
    ) -> list[Path]:
        """Copy the trained model of a job that has ended to the new folder ``directory``, and return the files.

        A pod mounts the checkpoint volume meanwhile, as for ``dljob get-model``. ``everything``: copy all checkpoints,
        reports and logs. ``image``: image of the pod, with python3; None: that of the job. ``timeout``: time limit in
        seconds for the start of the pod.
        """
        folder, options = Path(directory), CopyOptions(everything, image, timeout)
        self._session.call(lambda api: requests.read(api, self.namespace, self.name, self.uid))
        names = self._session.call(lambda api: copy_model(api, self.namespace, self.name, folder, options))
        return [folder / name for name in names]

    def suspend(self) -> None:
        """Let the job write a checkpoint and release its devices. ``resume`` continues it.

        ``Client.submit`` of a manifest without ``suspend`` also continues it.
        """
        self._change({"suspend": True})

    def resume(self) -> None:
        """Continue a suspended job."""
        self._change({"suspend": False})

    def scale(self, nodes: int) -> None:
        """Set the maximum number of nodes (``spec.nodes.max``), until the job is submitted again.

        The planner may choose fewer.
        Raise InvalidJobError if the number is less than ``spec.nodes.min``.
        """
        self._change({"nodes": {"max": nodes}})

    def _change(self, spec: Mapping[str, Any]) -> None:
        self._session.call(lambda api: requests.change(api, self.namespace, self.name, self.uid, spec))

    def delete(self) -> None:
        """Delete the job and its pods. Do nothing if it no longer exists."""
        self._session.call(lambda api: requests.delete(api, self.namespace, self.name, self.uid))


def _readable(read: Callable[..., T], *arguments: Any) -> T:
    """Return ``read(*arguments)``. Raise DLJobError if that finds a damaged record."""
    try:
        return read(*arguments)
    except BadInputError as error:
        raise translated(error) from None


def _status(body: Mapping[str, Any]) -> DLJobStatus:
    return readable_status(body.get("status") or {})
