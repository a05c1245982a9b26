"""``dltrain.report`` and others: send a script's progress to the agent of its pod, or print it.

A thread sends the updates. A report therefore takes microseconds, and a lost or stalled agent never delays or ends the
training.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from dltrain.protocol.activity import activity
from dltrain.protocol.rank_variables import SOCKET_ENV, WHERE
from dltrain.reporting.reported_progress import ReportedProgress, Update, line

if TYPE_CHECKING:
    from dltrain.analysis.result import Analysis

INTERVAL_S = 0.25
"""Minimum seconds between two progress updates (messages to the agent). Reports in between wait for the next update."""
IDLE_S = 1.0
"""Interval in seconds at which the sending thread wakes up without a new update.

It then sends a report that came too early for an update or, if there is none, the work that the script does.
"""
END_S = 2.0
"""Maximum time in seconds that the end of the script waits for its last update."""
CALLS_BEFORE_REPORT = 1
"""Maximum number of calls of ``stop_requested`` before the first report. A loop may begin with such a call."""
MAX_QUEUED = 1000
"""Maximum number of progress updates that wait while the agent does not read them. The oldest are dropped."""


class Trainer(Protocol):
    """The methods of a trainer to which this package's functions pass their values if the script uses ``dltrain.init``.

    Such a trainer counts and reports steps by itself.
    """

    def log(self, *, loss: Any = None, accuracy: Any = None, **metrics: Any) -> None: ...

    def busy(self, what: str, limit_s: float) -> None: ...

    def collect(self, data: bytes) -> list[bytes]: ...

    def analyzed(self, analysis: Analysis) -> None: ...


class ScriptReports:
    """The reports of this process. Create the object at the script's first report, which starts the sending thread.

    ``environ``: the environment variables with the rank, the number of ranks and the agent's socket.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._rank = _rank(environ)
        world_size = _number(environ, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)
        samples = _number(environ, "DLJOB_GLOBAL_BATCH_SIZE", default=0) or None
        self._progress = ReportedProgress(self._rank, world_size, samples, self._warn)
        self._path = environ.get(SOCKET_ENV)
        self._lock = threading.RLock()  # A signal handler of the script may report while a tensor is read for a report.
        self._updated_s = float("-inf")
        self._queue: deque[Update] = deque(maxlen=MAX_QUEUED)
        self._wake = threading.Event()
        self._ending = self._lost = False
        self._pid = os.getpid()
        self._stop_at: int | None = None
        """The step after which the agent asks the script to stop; None: the agent has not asked it to stop."""
        self._thread: threading.Thread | None = None
        if self._path:
            self._thread = threading.Thread(
                target=self._send_all, args=(self._path,), daemon=True, name="dltrain.report"
            )
            self._thread.start()
        atexit.register(self._end)

    def add(
        self,
        step: int,
        steps: int | None,
        loss: Any,
        epoch: float | None,
        accuracy: Any,
        samples: int | None,
        metrics: Mapping[str, Any],
    ) -> None:
        """Add a report of the script. The arguments are those of ``dltrain.report``.

        Make a progress update of all collected reports at once if the last update is at least ``INTERVAL_S`` seconds
        ago.
        """
        if self._lost or os.getpid() != self._pid:  # A fork, such as a worker that loads data, is not the rank.
            return
        now_s = time.monotonic()
        with self._lock:
            self._progress.add(now_s, step, steps, loss, epoch, accuracy, samples, metrics)
            if now_s - self._updated_s < INTERVAL_S:
                return
            self._updated_s = now_s
            self._put(self._progress.updates(tensors=True))

    def busy(self, what: str, limit_s: float) -> None:
        """Announce to the agent that no report may come for up to ``limit_s`` seconds. ``what``: name of the work."""
        if os.getpid() != self._pid:
            return
        if (limit := self._progress.silence_s(limit_s)) is not None:
            self._put([{"type": "busy", "rank": self._rank, "what": str(what), "limit_s": limit}])

    def analyzed(self, analysis: Analysis, step: int | None) -> None:
        """Send an analysis of held-out predictions to the agent, or print its line. Only rank 0 does so.

        ``step``: number of completed steps; None: that of the last report.
        """
        if os.getpid() != self._pid or self._rank:
            return
        if not self._path:
            print(f"dltrain: {analysis.line()}", file=sys.stderr, flush=True)  # noqa: T201
            return
        with self._lock:
            known = max(0, self._progress.step)
            at = self._progress.count("evaluate: step", step, known) or 0
            self._put([*self._progress.updates(tensors=True), _analyzed(self._rank, at, analysis)])

    def stop_requested(self) -> bool:
        """Return True if the agent has asked this script to stop and the script has reached the requested step."""
        self._progress.heed_stop()
        return self._stop_at is not None and self._progress.step >= self._stop_at

    def _put(self, updates: list[Update]) -> None:
        if self._path:
            self._queue.extend(updates)
            self._wake.set()
        elif self._rank == 0 and updates and updates[0]["type"] == "step":
            print(line(updates), file=sys.stderr, flush=True)  # noqa: T201

    def _end(self) -> None:
        """Send or print the last report of the script, which may have come too early for an update."""
        if os.getpid() != self._pid:
            return
        with self._lock, contextlib.suppress(Exception):  # A tensor's device may have failed.
            self._put(self._progress.updates(tensors=True))
        self._ending = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join(END_S)

    def _send_all(self, path: str) -> None:
        """Send updates to the agent's socket at ``path`` until the script ends or the agent is lost."""
        try:
            if signal.getsignal(WHERE) == signal.SIG_DFL:
                faulthandler.register(WHERE)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(path)
                threading.Thread(target=self._listen, args=(connection,), daemon=True, name="dltrain.stop").start()
                self._send_to(connection)
        except (OSError, RuntimeError):  # The training continues without an agent.
            self._lost = True

    def _listen(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for text in lines:
                message = json.loads(text)
                if message.get("type") == "stop":
                    self._stop_at = message.get("at_step") or 0

    def _send_to(self, connection: socket.socket) -> None:
        before: str | None = None
        while True:
            self._wake.wait(IDLE_S)
            self._wake.clear()
            ending = self._ending
            if not self._queue:
                with self._lock:
                    self._queue.extend(self._progress.updates(tensors=False))
            if self._queue:
                before = None
                while self._queue:
                    self._send(connection, self._queue.popleft())
            elif not ending:
                now = activity()
                if now is not None or before is not None:
                    self._send(connection, {"type": "working", "rank": self._rank, "activity": now})
                before = now
            if ending:
                return

    def _send(self, connection: socket.socket, update: Update) -> None:
        connection.sendall(json.dumps(update).encode() + b"\n")

    def _warn(self, text: str) -> None:
        print(f"dltrain.report: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _rank(environ: Mapping[str, str]) -> int:
    return _number(environ, "RANK", "OMPI_COMM_WORLD_RANK", default=0)


def is_rank_0() -> bool:
    """Return True on rank 0 of the script, by the variables of its launcher."""
    return _rank(os.environ) == 0


def _number(environ: Mapping[str, str], *names: str, default: int) -> int:
    """Return the value of the first of the environment variables ``names`` that is a number; ``default`` if none is."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), default)


def _analyzed(rank: int, step: int, analysis: Analysis) -> Update:
    """Return the message ``protocol.rank_messages.Analyzed`` as a dictionary."""
    return {"type": "analyzed", "rank": rank, "step": step, "analysis": asdict(analysis)}


_reports: ScriptReports | None = None
_making = threading.RLock()
"""Held while ``_reports`` is made, so that several threads do not make two."""
_calls_before_report = 0
"""Number of calls of ``stop_requested`` before the first report."""
_trainer: Trainer | None = None


def trainer() -> Trainer | None:
    """Return the trainer of a script that has called ``dltrain.init``, or None."""
    return _trainer


def set_trainer(trainer: Trainer) -> None:
    """Pass later calls of ``report`` and ``busy`` to ``trainer``, because the script has called ``dltrain.init``."""
    global _trainer
    _trainer = trainer


def report(
    *,
    step: int,
    steps: int | None = None,
    loss: Any = None,
    epoch: float | None = None,
    accuracy: Any = None,
    samples: int | None = None,
    **metrics: Any,
) -> None:
    """Report the progress of a training script that does not call ``dltrain.init``, such as a script for torchrun.

    The job then shows progress, remaining time, loss, accuracy and metrics, writes a run report, and detects hangs:
    from its first report on, a rank that is silent for too long restarts all ranks. Call it after every step, on every
    rank or on some; on every rank if they call ``stop_requested``. The lowest rank that reports represents the job.
    Without an agent, such as on a laptop, rank 0 prints a line at most four times per second.

    ``step``: number of completed steps since the training began. After a restart, continue the count of the checkpoint
    from which the script resumes. ``steps``: number of steps of the whole training, if known. ``loss``: training loss.
    ``epoch``: number of the epoch. ``accuracy``: accuracy on held-out data, from 0 to 1. ``samples``: samples in a
    step, over all ranks; default: $DLJOB_GLOBAL_BATCH_SIZE. ``metrics``: any other numbers, at most 16 names.

    Values may be numbers, or arrays and tensors with one element. A call takes microseconds, except that a few times
    per second it converts tensors to numbers. A lost agent never raises an exception, and neither does an invalid
    value, about which a line in the log warns once.
    """
    global _reports
    if _trainer is not None:
        try:
            _trainer.log(loss=loss, accuracy=accuracy, **metrics)
        except ValueError as error:  # A MisuseError: the loss is no number.
            warnings.warn(f"dltrain.report: {error}. It is not reported", stacklevel=2)
            _trainer.log(accuracy=accuracy, **metrics)
        return
    if _reports is None:
        with _making:
            _reports = _reports or ScriptReports(os.environ)
    _reports.add(step, steps, loss, epoch, accuracy, samples, metrics)


def send_analysis(analysis: Analysis, step: int | None) -> None:
    """Report an analysis of held-out predictions for a script without a trainer.

    ``step``: number of completed steps; None: that of the last ``report``. The agent knows a script from its first
    ``report`` on. Before that and without a step, the analysis is only printed.
    """
    if step is not None and _reports is None:
        report(step=step)
    if _reports is not None:
        _reports.analyzed(analysis, step)
    elif _rank(os.environ) == 0:
        print(f"dltrain: {analysis.line()}", file=sys.stderr, flush=True)  # noqa: T201


def busy(what: str, seconds: float) -> None:
    """Announce work such as an upload, during which a script makes no report for up to ``seconds`` seconds.

    Otherwise a rank that is silent for too long counts as hung. Before the first report, silences do not count, and
    this function does nothing. ``what``: the name of the work.
    """
    if _trainer is not None:
        _trainer.busy(what, seconds)
    elif _reports is not None:
        _reports.busy(what, seconds)


def stop_requested() -> bool:
    """Return True if the job asks this script to save a checkpoint and end now, after the step of its last report.

    A job asks for that if it is good enough (``spec.until``), suspended, or about to lose a pod. Call this function
    after ``dltrain.report``, in every step and on every rank. It returns True after the same step on all ranks, so
    ranks need not agree by themselves: each one compares the step that it has reported. On other ranks than the first,
    a report of ``step`` alone is enough. A rank that never reports gets SIGTERM instead, and so does a script that
    never calls this function. In a script that calls ``dltrain.init``, ``t.steps`` ends by itself, and this function
    returns False.
    """
    if _trainer is not None:
        return False
    if _reports is None:
        _warn_before_report()
        return False
    return _reports.stop_requested()


def _warn_before_report() -> None:
    """Name a rank that asks whether to stop, but does not report. It has no number of steps to compare."""
    global _calls_before_report
    _calls_before_report += 1
    if _calls_before_report == CALLS_BEFORE_REPORT + 1 and os.environ.get(SOCKET_ENV):
        text = (
            f"found no dltrain.report on rank {_rank(os.environ)}; expected one after every step on every rank. Call "
            "dltrain.report(step=step) on this rank, too. Until then, it gets SIGTERM when the job asks ranks to stop"
        )
        print(f"dltrain.stop_requested: {text}", file=sys.stderr, flush=True)  # noqa: T201
