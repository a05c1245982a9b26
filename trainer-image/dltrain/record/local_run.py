"""The record of a run without an agent, such as on a laptop: its run report, and a progress bar on a terminal.

Only rank 0 has such a record. It contains only messages of rank 0, so all times are those of rank 0.
"""

import sys
import time
from pathlib import Path
from typing import TextIO

from dlcontract import Outcome, Plan, RunPhase
from dltrain.protocol.rank_messages import Failed, Finished, RankMessage, Step
from dltrain.record.run_report import files
from dltrain.record.run_report.history import History

BAR = 24
"""Number of characters of the progress bar."""


class LocalRun:
    """The record of a local run: write the run report to ``folder``, and draw a progress bar on ``stream``.

    Pass the messages of rank 0 to ``take``, and call ``end`` after the last one. If ``folder`` is None, write no
    report. If ``stream`` (by default standard error) is not a terminal, draw no bar.

    If the run resumes, ``resumed`` continues the report of the run before. A run that may resume, but ends before its
    first step, leaves that report as it is.
    """

    def __init__(self, plan: Plan, folder: Path | None, stream: TextIO | None = None) -> None:
        stream = sys.stderr if stream is None else stream
        self._plan, self._folder, self._stream = plan, folder, stream if stream.isatty() else None
        may_resume = plan.checkpoint.enabled
        self._before = files.read_from(folder, plan) if folder is not None and may_resume else None
        """The report of the run before. None: there is none, or this run continues or replaces it."""
        self._history = History(plan, time.time())
        self._history.begin_attempt(plan, plan, time.time())
        self._written_s = time.monotonic()
        self._drawn = self._final = False

    def resumed(self) -> None:
        """Continue the report of the run before, because this run continues its training from a checkpoint."""
        if (before := self._before) is None:
            return
        plan = self._plan
        settings = {
            "model": plan.model.name or " ".join(plan.model.command),
            "dataset": plan.dataset.name or plan.dataset.path or "",
            "global_batch": plan.global_batch,
            "seed": plan.seed,
        }
        self._history = History(plan, before.started_unix_s, before.model_copy(update=settings))
        self._history.halted(before.updated_unix_s)  # if the run before was killed, its report does not say so
        self._history.begin_attempt(plan, plan, time.time())
        self._before = None

    def end(self) -> None:
        """Write the report of a run that ends before its last step without an error, such as by an interrupt."""
        if not self._final:
            self._history.halted(time.time())
            self._write(RunPhase.STOPPED)

    def take(self, message: RankMessage, line: str) -> bool:
        """Record a message. Return True if the progress bar shows it, so that the caller must not print its ``line``.

        ``line``: the text of the message for the log, which may be empty.
        """
        self._history.record(message, 0, time.time())
        if isinstance(message, Step):
            self._before = None
        match message:
            case Finished():
                self._history.halted(time.time())
                self._write(RunPhase.SUCCEEDED, message.outcome)
            case Failed():
                self._history.fault(message.failure, time.time())
                self._write(RunPhase.FAILED)
            case _ if time.monotonic() - self._written_s >= files.INTERVAL_S:
                self._write(RunPhase.RUNNING)
        if isinstance(message, Step) and self._stream is not None and message.steps:
            self._stream.write("\r" + bar(message) + "\x1b[K")
            self._stream.flush()
            self._drawn = True
            return True
        if self._drawn and (line or isinstance(message, Failed)) and self._stream is not None:
            self._stream.write("\n")
            self._drawn = False
        return False

    def _write(self, phase: RunPhase, outcome: Outcome | None = None) -> None:
        self._written_s, self._final = time.monotonic(), phase is not RunPhase.RUNNING
        document = self._history.document(phase, 1, time.time(), outcome)
        if phase is RunPhase.SUCCEEDED:
            for finding in document.findings:
                print(f"dltrain: {finding.name}: {finding.message}", file=sys.stderr, flush=True)  # noqa: T201
        if self._folder is None or (self._before is not None and phase is not RunPhase.SUCCEEDED):
            return
        try:
            files.write(self._folder, files.rendered(document))
        except OSError as error:  # The training is worth more than its report.
            found = f"--report: found {self._folder}, which cannot be written ({error})"
            print(f"dltrain: {found}; expected a writable folder. Name another folder", file=sys.stderr)  # noqa: T201
            self._folder = None
            return
        if phase is not RunPhase.RUNNING:
            print(f"dltrain: run report {self._folder / files.HTML}", file=sys.stderr, flush=True)  # noqa: T201


def bar(message: Step) -> str:
    """Return the progress bar as text, with the number of steps, the loss, the step time and the remaining time."""
    part = min(1.0, message.step / message.steps)
    full = int(BAR * part)
    left_s = (message.steps - message.step) * message.step_s
    minutes, seconds = divmod(round(left_s), 60)
    loss = f"  loss {message.loss:.4g}" if message.loss is not None else ""
    return (
        f"{100 * part:3.0f} % [{'#' * full}{'.' * (BAR - full)}] step {message.step}/{message.steps}{loss}"
        f"  {1e3 * message.step_s:.1f} ms/step  {minutes}:{seconds:02d} left"
    )
