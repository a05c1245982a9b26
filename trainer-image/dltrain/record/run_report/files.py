"""Write the run report beside the checkpoints: ``report.json`` and ``report.html``.

The report is also written during the training, so that users can read it and a later coordinator can continue it. A
thread writes the report and errors are only logged, because a slow or missing volume must not delay the job.
"""

import asyncio
import gzip
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from dlcontract import Outcome, Plan, RunPhase
from dltrain.protocol.volume_layout import claimed_term, job_directory
from dltrain.record.job_logs import REPORT_LIMIT_NBYTES, stored_nbytes
from dltrain.record.ledger import Ledger
from dltrain.record.run_report.document import Document
from dltrain.record.run_report.history import History
from dltrain.record.run_report.page import page
from dltrain.record.run_report.summary import with_summary

log = logging.getLogger(__name__)

JSON, HTML = "report.json", "report.html"
INTERVAL_S = 30.0
LIMIT_S = 10.0
"""Maximum time in seconds that a job waits at its end until its report is written."""


def read(plan: Plan) -> Document | None:
    """Return the existing run report of this job, or None if there is no report of this job.

    The result is also None if the job has no checkpoint volume, if the report cannot be read, or if it belongs to an
    earlier job with the same name (another ``uid``).
    """
    return read_from(job_directory(plan), plan) if plan.checkpoint.on_volume else None


def read_from(folder: Path, plan: Plan) -> Document | None:
    """Return the run report in ``folder``, or None if there is none of the job of ``plan`` or it cannot be read."""
    path = folder / JSON
    try:
        document = Document.parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("cannot read the run report %s (%s); starting a new report", path, error)
        return None
    return document if (document.uid, document.job) == (plan.uid, plan.job) else None


def rendered(document: Document) -> dict[str, str]:
    """Return the report as the texts of ``report.json`` and ``report.html``."""
    return {JSON: document.to_json(), HTML: page(document)}


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files of a report to ``folder``, each atomically. Raise OSError on failure.

    ``texts``: file name → content.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        temporary = folder / f".{name}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / name)


def packed(texts: Mapping[str, str], limit_nbytes: int = REPORT_LIMIT_NBYTES) -> dict[str, bytes]:
    """Return the files of a report as compressed content for a ConfigMap: file name → content.

    ``texts``: result of ``rendered``. The names are ``report.json.gz`` and ``report.html.gz``, for gzip. If the files
    would take more than ``limit_nbytes`` bytes together, in base64, omit the files that do not fit.
    """
    files: dict[str, bytes] = {}
    left = limit_nbytes
    for name, text in texts.items():
        data = gzip.compress(text.encode(), mtime=0)
        if stored_nbytes(data) <= left:
            files[f"{name}.gz"] = data
            left -= stored_nbytes(data)
    return files


class RunReportWriter:
    """Write the run report of one job in a background thread, on the coordinator (the agent that directs the job)."""

    def __init__(self, ledger: Ledger, unix_s: float) -> None:
        """Read the job's earlier report, if there is one, to continue it. Write nothing yet.

        ``ledger``: the record of the job from which reports take the plan, the phase and the coordinator's term.
        ``unix_s``: present Unix time, at which a new report begins.
        """
        self.history = History(ledger.plan, unix_s, read(ledger.plan))
        self.history.continue_from(ledger.step, ledger.steps_repeated)
        self._ledger = ledger
        self._writing: asyncio.Future[None] | None = None
        self._written_unix_s = unix_s
        self._written_faults = self.history.faults
        self._failed = False
        self._last: dict[str, str] | None = None
        """The final report by file name, as the method ``write`` has rendered it; None: not rendered yet."""

    def tick(self, unix_s: float) -> None:
        """Start to write the report in the background, if ``INTERVAL_S`` has passed or a fault was recorded.

        Call it regularly with the present Unix time ``unix_s``. A fault is written at once, because this pod may be the
        next to fail.
        """
        due = unix_s - self._written_unix_s >= INTERVAL_S or self.history.faults != self._written_faults
        if not due or (self._writing is not None and not self._writing.done()):
            return
        self._begin(self.history.document(self._ledger.phase, self._ledger.term, unix_s))

    async def idle(self) -> None:
        """Wait until no write is in progress."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def write(self, phase: RunPhase, unix_s: float, outcome: Outcome | None = None) -> str | None:
        """Write the report after the ranks have stopped. Return the HTML page's path, or None if it is not written.

        ``unix_s``: present Unix time. ``outcome``: the result of the run; None if it has not finished.
        """
        self.history.halted(unix_s)
        plan = self._ledger.plan
        self._last = None
        if not plan.checkpoint.on_volume:
            return None
        try:
            async with asyncio.timeout(LIMIT_S):
                await self.idle()
                document = self.history.document(phase, self._ledger.term, unix_s, outcome)
                await asyncio.shield(self._begin(document, last=True))
        except TimeoutError:
            log.warning("run report: not written within %.0f s; the job ends without it. Check the volume", LIMIT_S)
            return None
        return None if self._failed else str(job_directory(plan) / HTML)

    async def packed(self, phase: RunPhase, unix_s: float, outcome: Outcome | None = None) -> dict[str, bytes]:
        """Return the report of a run that has ended as compressed files: file name → content.

        ``phase``: how the run ended. ``unix_s``: present Unix time. ``outcome``: the result; None if the run has not
        finished. If ``write`` has rendered the report already, these arguments have no effect.
        """
        if self._last is not None:
            return await asyncio.to_thread(packed, self._last)
        document = self.history.document(phase, self._ledger.term, unix_s, outcome)
        return await asyncio.to_thread(lambda: packed(rendered(document)))

    def summarized(self, outcome: Outcome, unix_s: float) -> Outcome:
        """Return the ``outcome`` of a run that has succeeded, with the short form of its analysis and findings.

        ``unix_s``: present Unix time.
        """
        return with_summary(outcome, self.history.document(RunPhase.SUCCEEDED, self._ledger.term, unix_s, outcome))

    def _begin(self, document: Document, *, last: bool = False) -> asyncio.Future[None]:
        self._written_unix_s, self._written_faults = document.updated_unix_s, self.history.faults
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, self._ledger.plan, document, last))
        return self._writing

    def _write(self, plan: Plan, document: Document, last: bool) -> None:
        if not plan.checkpoint.on_volume:
            return
        try:
            if claimed_term(plan) > document.term:
                return  # Another coordinator has taken over and writes the report.
            texts = rendered(document)
            self._last = texts if last else None
            write(job_directory(plan), texts)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("cannot write the run report in %s (%s); trying again later", job_directory(plan), error)
            self._failed = True
