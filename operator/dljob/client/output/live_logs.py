"""Read the output of the ranks of a running job from the logs of its pods.

``printed`` reads what there is. ``Following`` goes on until the job has ended: pods come and go when a job restarts,
grows, moves or is preempted, and connections to the API server break.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from dljob.api import Phase
from dljob.client.access import PATIENCE_S
from dljob.job.observed import JOB_LABEL, TRAINER_CONTAINER
from dljob.status import find, readable_status

POLL_S = 1.0
"""Seconds between two looks for new pods."""
LINGER_S = 10.0
"""Seconds for which the last lines of a job that has ended may still come."""
SILENCE_S = 300.0
"""Seconds without a line after which a log is opened again: the connection may be broken."""
MAX_WAITING = 1000
"""Maximum number of lines that are read and not printed yet. Faster pods wait."""
OVER = (Phase.COMPLETE, Phase.FAILED)
_GONE, _DENIED = 404, (401, 403)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the log of a pod, without its end."""

    pod: str
    text: str

    def shown(self, rank: int | None) -> str | None:
        """Return the line as it is printed; None: it is not from ``rank``. None for ``rank``: all lines are printed."""
        if rank is not None:
            return self.text.removeprefix(f"[rank {rank}] ") if self.text.startswith(f"[rank {rank}]") else None
        return f"[agent {self.pod}] {self.text[8:]}" if self.text.startswith("[agent] ") else self.text


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the trainer container of a pod. ``restarts``: number of earlier runs in the same pod."""

    pod: str
    uid: str
    restarts: int

    @property
    def place(self) -> tuple[str, int, str]:
        """The sort key of the pod: pod 10 of a group comes after pod 9."""
        group, _, number = self.pod.rpartition("-")
        return group, int(number) if number.isdecimal() else 0, self.pod


def runs_of(pods: Iterable[Mapping[str, Any]]) -> dict[Run, bool]:
    """Return {run: True if its container runs now} for the containers that have started, in the order of the pods."""
    found = {}
    for pod in pods:
        for each in (pod.get("status") or {}).get("containerStatuses") or ():
            state = each.get("state") or {}
            if each.get("name") == TRAINER_CONTAINER and ("running" in state or "terminated" in state):
                meta = pod["metadata"]
                found[Run(meta["name"], meta["uid"], int(each.get("restartCount") or 0))] = "running" in state
    return dict(sorted(found.items(), key=lambda item: item[0].place))


async def started(api: Any, namespace: str, job: str) -> dict[Run, bool]:
    """Return what ``runs_of`` says about the pods of a job. Raise ApiError."""
    from dljob.kube.kinds import POD

    return runs_of(await api.find(POD, namespace, labelSelector=f"{JOB_LABEL}={job}"))


async def printed(api: Any, namespace: str, runs: Iterable[Run], tail: int | None) -> AsyncIterator[Line]:
    """Yield the lines in the logs of pods, one pod after another. ``tail``: at most so many lines of each pod.

    Leave out pods that are gone. Raise ApiError.
    """
    for run in runs:
        async for text in _Log(api, namespace, run, tail).lines(follow=False):
            yield Line(run.pod, text)


class Following:
    """The lines of the logs of a job's pods, as they come, until the job has ended."""

    def __init__(
        self, api: Any, namespace: str, job: str, tail: int | None, said: Callable[[str], None] = lambda text: None
    ) -> None:
        """``tail``: lines of each log to begin with; None: all. ``said``: called with the phase when it changes."""
        self._api, self._namespace, self._job, self._tail, self._said = api, namespace, job, tail, said
        self._lines: asyncio.Queue[Line | None] = asyncio.Queue(MAX_WAITING)
        self._logs: dict[Run, _Log] = {}
        self._reading: dict[Run, asyncio.Task[None]] = {}
        self._phase = ""

    async def lines(self) -> AsyncGenerator[Line]:
        """Yield the lines. Raise ApiError if the API server refuses a request, or does not answer ``PATIENCE_S``."""
        watching = asyncio.create_task(self._watch())
        ending = asyncio.create_task(self._end_after(watching))
        try:
            while (line := await self._lines.get()) is not None:
                yield line
            await watching
        finally:
            tasks = [watching, ending, *self._reading.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_after(self, watching: "asyncio.Task[None]") -> None:
        """Put the end behind the last line. This task can be cancelled while nobody makes room for it."""
        await asyncio.wait({watching})
        await self._lines.put(None)

    async def _watch(self) -> None:
        """Read the logs of all pods until the job has ended and its last lines are read."""
        from dljob.kube import ApiError
        from dljob.kube.watch.reflector import TEMPORARY

        ended_s: float | None = None
        answered_s, tail = monotonic(), self._tail
        while ended_s is None or (self._reads() and monotonic() - ended_s < LINGER_S):
            try:
                over = await self._look(tail)
                answered_s, tail = monotonic(), None
                ended_s = ended_s or (monotonic() if over else None)
            except ApiError as error:
                if error.code not in TEMPORARY or monotonic() - answered_s > PATIENCE_S:
                    raise
            await asyncio.sleep(POLL_S)

    def _reads(self) -> bool:
        return any(not task.done() for task in self._reading.values())

    async def _look(self, tail: int | None) -> bool:
        """Read the logs of runs that have started. Return True if the job has ended or is gone."""
        from dljob.kube import ApiError
        from dljob.kube.kinds import DLJOB

        runs = await started(self._api, self._namespace, self._job)
        for run, is_running in runs.items():
            log = self._logs.setdefault(run, _Log(self._api, self._namespace, run, tail))
            task = self._reading.get(run)
            if task is not None and task.done() and (error := task.exception()) is not None:
                raise error
            if (task is None or task.done()) and (is_running or not log.complete):
                self._reading[run] = asyncio.create_task(self._read(log, ended=not is_running))
        try:
            body = await self._api.get(DLJOB, self._namespace, self._job)
        except ApiError as error:
            if not error.not_found:
                raise
            self._tell("the job was deleted")
            return True
        status = readable_status(body.get("status") or {})
        planned = find(status.conditions, "Planned")
        waits = planned is not None and planned.status.value == "False" and not runs
        self._tell(f"phase {status.phase.value}" + (f": {planned.message}" if planned is not None and waits else ""))
        return status.phase in OVER

    def _tell(self, text: str) -> None:
        if text != self._phase:
            self._phase = text
            self._said(text)

    async def _read(self, log: "_Log", *, ended: bool) -> None:
        """Read a log. ``ended``: True if its container had ended. Only then does the log end with the answer."""
        with suppress(BrokenLogError):  # The next look opens it again.
            async for text in log.lines(follow=True):
                await self._lines.put(Line(log.run.pod, text))
            log.complete = log.complete or ended


class BrokenLogError(Exception):
    """The connection broke, or the log cannot be read now."""


class _Log:
    """The log of one run of a container. ``complete``: True if it was read to its end, or is gone."""

    def __init__(self, api: Any, namespace: str, run: Run, tail: int | None) -> None:
        self.run = run
        self.complete = False
        self._api, self._namespace, self._tail = api, namespace, tail
        self._last: tuple[str, str, str] | None = None
        """The time of the last line, as (up to the second, fraction, zone)."""

    async def lines(self, *, follow: bool) -> AsyncIterator[str]:
        """Yield the lines after those yielded before. Raise ApiError if the server denies it, and BrokenLogError."""
        import aiohttp

        from dljob.kube import ApiError
        from dljob.kube.answers import lines
        from dljob.kube.kinds import POD
        from dljob.kube.transport import CALL_LIMIT_S

        params = {"container": TRAINER_CONTAINER, "timestamps": "true", "follow": str(follow).lower()}
        if self._last is not None:
            params["sinceTime"] = self._last[0] + self._last[2]  # The API has no fractions of seconds here.
        elif self._tail is not None:
            params["tailLines"] = str(self._tail)
        url = self._api.server + POD.path(self._namespace, self.run.pod, "log")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_LIMIT_S, sock_read=SILENCE_S)
        try:
            async with self._api.session.get(url, params=params, timeout=timeout) as response:
                if response.status == _GONE:
                    self.complete = True
                elif response.status in _DENIED:
                    message = f"the logs of pod {self.run.pod} are denied; expected the permission to get pods/log"
                    raise ApiError(response.status, "Forbidden", f"{message}. Ask an administrator for it")
                elif response.status != 200 and follow:
                    raise BrokenLogError  # Such as before the container starts.
                elif response.status != 200:
                    raise ApiError(response.status, "", (await response.text())[:500])
                else:
                    async for line in lines(response.content):
                        at, _, text = line.decode(errors="replace").partition(" ")
                        moment = _moment(at)
                        if self._last is None or moment > self._last:
                            self._last = moment
                            yield text
        except (aiohttp.ClientError, TimeoutError) as error:
            if follow:
                raise BrokenLogError from error
            raise ApiError(0, type(error).__name__, f"GET {url}: {error}") from error


def _moment(at: str) -> tuple[str, str, str]:
    """Return a time like ``2026-11-29T08:00:00.25Z`` as (up to the second, fraction, zone). A later one is larger."""
    found = re.fullmatch(r"([^.]*?)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", at)
    return (found[1], (found[2] or "").ljust(9, "0"), found[3]) if found is not None else (at, "", "")
