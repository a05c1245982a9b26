"""Keeps a run's report beside its checkpoints: ``report.json`` and ``report.html``.

Written while the job trains too, so that it can be looked at, and so that the coordinator after this one goes on with
it. A volume that is slow or gone must not hold up the job: writing is in a thread, and failure is only logged.
"""

import asyncio
import logging
import os
from pathlib import Path

from dlcontract import Outcome, Plan, RunPhase
from dltrain.protocol.volume_layout import claimed_term, job_directory
from dltrain.record.ledger import Ledger
from dltrain.record.run_report.document import Document
from dltrain.record.run_report.history import History
from dltrain.record.run_report.page import page

log = logging.getLogger(__name__)

JSON, HTML = "report.json", "report.html"
INTERVAL_S = 30.0
LIMIT_S = 10.0
"""How long the end of a job waits for its report."""


def read(plan: Plan) -> Document | None:
    """The report so far of this job, if there is one that can be read."""
    if not plan.checkpoint.enabled:
        return None
    path = job_directory(plan) / JSON
    try:
        document = Document.parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("report %s cannot be read and begins anew: %s", path, error)
        return None
    return document if document.uid == plan.uid else None


def write(folder: Path, document: Document) -> None:
    """Both files, each whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((JSON, document.to_json()), (HTML, page(document))):
        temporary = folder / f".{name}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / name)


class RunReportWriter:
    """The report of the job that is coordinated."""

    def __init__(self, ledger: Ledger, unix_s: float) -> None:
        """``ledger``: what knows the plan, the phase and the term."""
        self.history = History(ledger.plan, unix_s, read(ledger.plan))
        self._ledger = ledger
        self._writing: asyncio.Future[None] | None = None
        self._written_unix_s = unix_s
        self._told_faults = self.history.faults
        self._complained = False

    def tick(self, unix_s: float) -> None:
        """Write in the background: every ``INTERVAL_S``, and a fault at once, since the next may be this pod's."""
        due = unix_s - self._written_unix_s >= INTERVAL_S or self.history.faults != self._told_faults
        if not due or (self._writing is not None and not self._writing.done()):
            return
        self._begin(self.history.document(self._ledger.phase, self._ledger.term, unix_s))

    async def idle(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def write(self, phase: RunPhase, unix_s: float, outcome: Outcome | None = None) -> str | None:
        """Ranks have stopped: write now. The page's path; None where it could not be written, or not in time."""
        self.history.halted(unix_s)
        plan = self._ledger.plan
        if not plan.checkpoint.enabled:
            return None
        try:
            async with asyncio.timeout(LIMIT_S):
                await self.idle()
                await asyncio.shield(self._begin(self.history.document(phase, self._ledger.term, unix_s, outcome)))
        except TimeoutError:
            log.warning("report not written within %.0f s", LIMIT_S)
            return None
        return None if self._complained else str(job_directory(plan) / HTML)

    def _begin(self, document: Document) -> asyncio.Future[None]:
        self._written_unix_s, self._told_faults = document.updated_unix_s, self.history.faults
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, self._ledger.plan, document))
        return self._writing

    def _write(self, plan: Plan, document: Document) -> None:
        if not plan.checkpoint.enabled:
            return
        try:
            if claimed_term(plan) > document.term:
                return  # another coordinator has taken over, and writes
            write(job_directory(plan), document)
            self._complained = False
        except OSError as error:
            if not self._complained:
                log.warning("report in %s not written: %s", job_directory(plan), error)
            self._complained = True
