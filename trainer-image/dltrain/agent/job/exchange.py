"""Read the plan and write the report, either in the job's two ConfigMaps or in two files."""

import asyncio
import base64
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from dlcontract import (
    FAILURES_KEY,
    PLAN_KEY,
    REPORT_KEY,
    FailureAllowance,
    Plan,
    Report,
    config_map_names,
    schema_of,
)
from dltrain.agent.job.kube_api import ApiError, KubeApi
from dltrain.record.job_logs import ATTEMPT_FILE, added, order

log = logging.getLogger(__name__)
_FILE_POLL_S = 0.2
_RETRY_S = (0.2, 5.0)
OUTPUTS_S = 5.0
"""Maximum time in seconds to store the last output of the ranks. A job waits for it at its end, and no longer."""


class Exchange(ABC):
    """The source of the operator's plans and the destination of the job's progress reports."""

    allowance = FailureAllowance()
    """The operator's decisions about the job's failures: how many to ignore, and how long to wait for a decision.

    ``plans`` updates this attribute while it waits for the next plan.
    """

    @abstractmethod
    def plans(self) -> AsyncIterator[Plan]:
        """Wait for the first plan. Yield it and every later plan. Log and skip invalid plans."""

    @abstractmethod
    async def previous_report(self) -> Report | None:
        """Return the last report that an agent wrote for a job of this name, or None if there is no readable one."""

    @abstractmethod
    async def write(self, report: Report) -> None:
        """Write the report in place of the previous one. Raise OSError, TimeoutError or ApiError on failure."""

    @abstractmethod
    async def write_outputs(self, files: Mapping[str, bytes], attempt: str) -> None:
        """Write the files with the ranks' last output, in place of earlier ones. Raise the same errors as ``write``.

        ``files``: name → content. ``attempt``: name of the attempt (launch of all ranks) with this output. Write
        nothing if output of a newer attempt is stored: then another coordinator has taken over.
        """

    @abstractmethod
    async def add_outputs(self, files: Mapping[str, bytes], attempt: str) -> None:
        """Write files with the last output of some ranks. Files of other ranks remain. Parameters are as above.

        Write nothing if output of a newer attempt is stored. The same rank number may then belong to another pod.
        """


class Files(Exchange):
    """Exchange plans and reports through files, for tests and laptops without Kubernetes."""

    def __init__(self, plan: Path, report: Path) -> None:
        self._plan, self._report = plan, report

    async def plans(self) -> AsyncIterator[Plan]:
        last = ""
        while True:
            text = self._plan.read_text() if self._plan.is_file() else ""
            failures = self._plan.with_name(FAILURES_KEY)
            self.allowance = parse_allowance(failures.read_text() if failures.is_file() else "")
            if text != last and (plan := parse_plan(text)) is not None:
                yield plan
            last = text
            await asyncio.sleep(_FILE_POLL_S)

    async def previous_report(self) -> Report | None:
        return parse_report(self._report.read_text()) if self._report.is_file() else None

    async def write(self, report: Report) -> None:
        temporary = self._report.with_suffix(".new")
        temporary.write_text(report.to_json())
        temporary.replace(self._report)

    async def write_outputs(self, files: Mapping[str, bytes], attempt: str) -> None:
        self._store(files, attempt, replace=True)

    async def add_outputs(self, files: Mapping[str, bytes], attempt: str) -> None:
        self._store(files, attempt, replace=False)

    def _store(self, files: Mapping[str, bytes], attempt: str, *, replace: bool) -> None:
        folder = self._report.with_suffix(".logs")
        folder.mkdir(exist_ok=True)
        stored = {path.name: path.read_bytes() for path in folder.iterdir()}
        if (changes := _changes(stored, files, attempt, replace=replace)) is None:
            return
        for name, data in changes.items():
            if data is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(data)


class ConfigMaps(Exchange):
    """Exchange plans and reports through the job's two ConfigMaps."""

    def __init__(self, api: KubeApi, job: str) -> None:
        self._api = api
        self._plan, self._report, self._logs = config_map_names(job)

    async def plans(self) -> AsyncIterator[Plan]:
        last, wait_s = "", _RETRY_S[0]
        while True:
            try:
                config_map = await self._api.get(self._plan)
                text = self._read(config_map)
                wait_s = _RETRY_S[0]
                if text != last and (plan := parse_plan(text)) is not None:
                    yield plan
                last = text
                async for event in self._api.watch(self._plan, config_map["metadata"]["resourceVersion"]):
                    if event.get("type") not in ("ADDED", "MODIFIED"):
                        break
                    text = self._read(event.get("object", {}))
                    if text != last and (plan := parse_plan(text)) is not None:
                        yield plan
                    last = text
            except (ApiError, OSError, TimeoutError, ValueError) as error:
                log.log(logging.INFO if isinstance(error, ApiError) and error.status == 404 else logging.WARNING,
                        "cannot read the plan %s (%s); retrying in %.1f s", self._plan, error, wait_s)  # fmt: skip
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_S[1])

    def _read(self, config_map: Mapping[str, Any]) -> str:
        """Return the text of the plan. Set ``allowance`` to the operator's decisions about failures."""
        data = config_map.get("data", {})
        self.allowance = parse_allowance(data.get(FAILURES_KEY, ""))
        return str(data.get(PLAN_KEY, ""))

    async def previous_report(self) -> Report | None:
        wait_s = _RETRY_S[0]
        while True:
            try:
                config_map = await self._api.get(self._report)
                return parse_report(config_map.get("data", {}).get(REPORT_KEY, ""))
            except ApiError as error:
                if error.status == 404:
                    return None
                log.warning("cannot read the report %s (%s); retrying in %.1f s", self._report, error, wait_s)
            except (OSError, TimeoutError) as error:
                log.warning("cannot read the report %s (%s); retrying in %.1f s", self._report, error, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _RETRY_S[1])

    async def write(self, report: Report) -> None:
        await self._api.patch_data(self._report, {REPORT_KEY: report.to_json()})

    async def write_outputs(self, files: Mapping[str, bytes], attempt: str) -> None:
        await self._store(files, attempt, replace=True)

    async def add_outputs(self, files: Mapping[str, bytes], attempt: str) -> None:
        await self._store(files, attempt, replace=False)

    async def _store(self, files: Mapping[str, bytes], attempt: str, *, replace: bool) -> None:
        while True:
            config_map = await self._api.get(self._logs)
            stored = {name: base64.b64decode(data) for name, data in (config_map.get("binaryData") or {}).items()}
            if (changes := _changes(stored, files, attempt, replace=replace)) is None:
                return
            try:
                await self._api.patch_files(self._logs, changes, config_map["metadata"]["resourceVersion"])
                return
            except ApiError as error:
                if error.status != 409:  # With 409, another agent has written meanwhile, perhaps a newer attempt.
                    raise


def _changes(
    stored: Mapping[str, bytes], files: Mapping[str, bytes], attempt: str, *, replace: bool
) -> dict[str, bytes | None] | None:
    """Return the changes that store the output ``files`` of ``attempt``: file name → content, or None to delete it.

    ``stored``: the files so far. ``replace``: delete those that are not in ``files``. Return None, after logging it, if
    output of a newer attempt is stored.
    """
    newest = stored.get(ATTEMPT_FILE, b"").decode(errors="replace")
    if order(attempt) < order(newest):
        log.info("did not store the output of attempt %s, because that of attempt %s is stored", attempt, newest)
        return None
    if not replace:
        return {**added(stored, files, attempt)}
    return {**dict.fromkeys(stored), **added({}, files, attempt)}


def parse_plan(text: str) -> Plan | None:
    """Parse a plan. Return None if the text is empty or, after logging an error, if it is not a valid plan.

    An invalid plan raises no exception, because the agent must continue with its current plan.
    """
    if not text:
        return None
    try:
        return Plan.parse(text)
    except ValueError as error:
        try:
            schema = schema_of(text)
        except ValueError:
            schema = None
        log.error(
            "ignored a plan: found schema %s (%s); expected a valid plan of schema 1. Use the trainer image of the "
            "operator's version",
            schema,
            error,
        )
        return None


def parse_allowance(text: str) -> FailureAllowance:
    """Parse the operator's decisions about failures. If the text is empty or invalid, no failure is ignored."""
    try:
        return FailureAllowance.parse(text) if text else FailureAllowance()
    except ValueError as error:
        log.error(
            "ignored the operator's decisions about failures: found an invalid %s (%s); expected a valid document. Use "
            "the trainer image of the operator's version", FAILURES_KEY, error,
        )  # fmt: skip
        return FailureAllowance()


def parse_report(text: str) -> Report | None:
    try:
        return Report.parse(text) if text else None
    except ValueError as error:
        log.warning(
            "ignored the job's previous report, which is invalid (%s). The job's counts of failures and restarts start "
            "from 0",
            error,
        )
        return None


class ReportWriter:
    """Write the job's progress report every ``PERIOD_S`` seconds, and at once after a call of ``urge``.

    The coordinator sets ``compose``, a function that returns the current report. While ``compose`` is None or the
    report has not changed, nothing is written.
    """

    PERIOD_S = 10.0

    def __init__(self, exchange: Exchange) -> None:
        self.compose: Callable[[], Report] | None = None
        self._exchange = exchange
        self._written: Report | None = None
        self._urgent = asyncio.Event()

    async def write_outputs(self, files: Mapping[str, bytes], attempt: str, within_s: float = OUTPUTS_S) -> None:
        """Write the ranks' last output within a limit of time. Log a failure, which must not fail the job.

        ``files``: name → content. ``attempt``: name of the attempt (launch of all ranks) with this output.
        ``within_s``: give up after this many seconds, and at the latest after ``OUTPUTS_S``.
        """
        await self._within_limit(self._exchange.write_outputs(files, attempt), within_s)

    async def add_outputs(self, files: Mapping[str, bytes], attempt: str, within_s: float = OUTPUTS_S) -> None:
        """Write the last output of some ranks, such as those of one pod. The stored output of other ranks remains.

        Write nothing if output of a newer attempt is stored.
        """
        await self._within_limit(self._exchange.add_outputs(files, attempt), within_s)

    async def _within_limit(self, writing: Coroutine[Any, Any, None], within_s: float) -> None:
        try:
            async with asyncio.timeout(min(within_s, OUTPUTS_S)):
                await writing
        except (ApiError, OSError, TimeoutError, ValueError) as error:  # ValueError: a proxy's answer is not JSON.
            why = str(error) or f"no answer within {min(within_s, OUTPUTS_S):.1f} s"
            log.warning("the last output of the ranks was not stored: %s. It remains in the logs of the pods", why)

    def urge(self) -> None:
        """Request that a report is written now, for example after a change of phase."""
        self._urgent.set()

    async def run(self) -> None:
        """Write reports forever. After a failed write, try again with the content that is current by then."""
        wait_s = _RETRY_S[0]
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.PERIOD_S):
                    await self._urgent.wait()
            self._urgent.clear()
            if await self._write():
                wait_s = _RETRY_S[0]
            else:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RETRY_S[1])
                self._urgent.set()

    async def last(self, within_s: float) -> None:
        """Try once more to write the report before the agent exits. Give up after ``within_s`` seconds.

        A failure is only logged.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._write()
        except TimeoutError:
            log.warning("the job's last report was not written within %.0f s; status may be outdated", within_s)

    async def _write(self) -> bool:
        if self.compose is None:
            return True
        report = self.compose()
        if self._written is not None and report == self._written.model_copy(update={"unix_s": report.unix_s}):
            return True
        try:
            await self._exchange.write(report)
        except (ApiError, OSError, TimeoutError) as error:
            log.warning("cannot write the job's report (%s); the job's status is outdated until a later write", error)
            return False
        self._written = report
        return True
