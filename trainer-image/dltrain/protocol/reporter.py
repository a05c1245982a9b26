"""A rank's connection to its agent: progress updates go to the agent, and requests to stop come back.

Without an agent, such as on a laptop, rank 0 prints its updates to standard error.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from types import FrameType
from typing import Literal

from pydantic import ValidationError

from dltrain.protocol.activity import activity
from dltrain.protocol.rank_messages import (
    SOCKET_ENV,
    WHERE,
    Analyzed,
    Busy,
    Checkpointed,
    CheckpointSkipped,
    Chosen,
    Compared,
    Evaluated,
    Failed,
    Finished,
    Hello,
    Logged,
    Mark,
    Observed,
    Probed,
    RankMessage,
    Resharded,
    Shrunk,
    Step,
    Stop,
    Working,
)
from dltrain.protocol.upload_messages import NotUploaded, Uploaded

ACTIVITY_INTERVAL_S = 1.0
"""Interval in seconds at which a rank that sends nothing else says what it works on."""


class RankReporter:
    """A rank's connection to its agent, if there is one. The event ``stop`` is set when this rank is asked to stop."""

    def __init__(self, path: str | None) -> None:
        """Connect to the agent's socket at ``path``, if given. Raise OSError if no agent listens there."""
        self.stop = threading.Event()
        self.rank = 0
        self._killed_at_s = inf
        """Time (``time.monotonic()``) at which the agent kills this rank, once it has asked the rank to stop.

        It is infinity before that request.
        """
        self.observe: Callable[[RankMessage, str], bool] | None = None
        """A function that ``send`` calls if no agent is connected, with each message and its line for the log.

        It returns True if it has shown the line, so that ``send`` does not print it. None: ``send`` prints each line.
        """
        self.resumed: Callable[[], None] | None = None
        """A function that rank 0 calls if no agent is connected, when it has restored the state from a checkpoint."""
        self.closed: Callable[[], None] | None = None
        """A function that ``close`` calls if no agent is connected, when this rank ends."""
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._sent_s = time.monotonic()
        if path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(path)
            threading.Thread(target=self._listen, args=(self._socket,), daemon=True, name="agent").start()
            threading.Thread(target=self._report_activity, daemon=True, name="activity").start()

    @classmethod
    def open(cls) -> "RankReporter":
        """Return a reporter connected to the agent's socket in ``$DLTRAIN_SOCKET``, if set. Install signal handlers.

        SIGTERM sets ``stop``. The signal ``WHERE``, which agents send to a hung rank, writes the stack of each thread
        to the log.
        """
        reporter = cls(os.environ.get(SOCKET_ENV))
        if reporter._socket is not None and signal.getsignal(WHERE) == signal.SIG_DFL:
            faulthandler.register(WHERE)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, reporter._terminate)
        return reporter

    @property
    def connected(self) -> bool:
        """True if an agent is connected."""
        return self._socket is not None

    @property
    def grace_left_s(self) -> float:
        """Return the seconds until the agent kills this rank; infinity if the agent has not asked it to stop."""
        return max(0.0, self._killed_at_s - time.monotonic())

    def ask_to_stop(self, grace_s: float) -> None:
        """Set ``stop``. ``grace_s``: seconds from now until the agent kills this rank.

        After several calls, the earliest of the resulting times applies.
        """
        self._killed_at_s = min(self._killed_at_s, time.monotonic() + grace_s)
        self.stop.set()

    def send(self, message: RankMessage) -> None:
        """Send an update to the agent. If the connection is lost, continue without an agent and raise no error.

        Without an agent, call the function ``observe``, if it is set, with the update and its text for the log. Rank 0
        then prints the text to standard error, unless ``observe`` returned True because it has shown the text.
        """
        if self._socket is None:
            line = describe(message)
            shown = self.observe is not None and self.observe(message, line)
            if self.rank == 0 and line and not shown:
                print(line, file=sys.stderr, flush=True)  # noqa: T201
            return
        if not isinstance(message, Working):
            self._sent_s = time.monotonic()
        try:
            with self._lock:
                self._socket.sendall(message.model_dump_json().encode() + b"\n")
        except OSError:
            self.close()

    def mark(self, what: Literal["imported", "rendezvous", "first_step"]) -> None:
        self.send(Mark(rank=self.rank, what=what, unix_s=time.time()))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        elif self.closed is not None:
            self.closed()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.stop.set()

    def _report_activity(self) -> None:
        """Report, about every ``ACTIVITY_INTERVAL_S`` seconds, what a rank works on while it sends nothing else.

        Only long work (``protocol.activity``) is reported. When it ends, report that once. Return when the connection
        is closed.
        """
        before = None
        while self._socket is not None:
            time.sleep(ACTIVITY_INTERVAL_S)
            if time.monotonic() - self._sent_s < ACTIVITY_INTERVAL_S:
                before = None
                continue
            now = activity()
            if now is not None or before is not None:
                self.send(Working(rank=self.rank, activity=now))
            before = now

    def _listen(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    try:
                        stop = Stop.model_validate_json(line)
                    except ValidationError:
                        continue  # a newer agent's message
                    self.ask_to_stop(stop.grace_s)
        except (OSError, ValueError):
            return  # closed


def _let_forks_end() -> None:
    """Let SIGTERM end this fork of a rank, such as a process of a ``multiprocessing.Pool``, which is no rank."""
    if getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is RankReporter._terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_let_forks_end)


def describe(message: RankMessage) -> str:
    """Return a line for the log that describes ``message``, or an empty string if only the agent needs the message."""
    match message:
        case Step():
            loss = f" loss {message.loss:.4f}" if message.loss is not None else ""
            speed = f"{1e3 * message.step_s:.1f} ms/step, {message.samples_per_s:.0f} samples/s"
            steps = f"{message.step}/{message.steps}" if message.steps else f"{message.step}"
            return f"dltrain: step {steps} epoch {message.epoch}{loss}, {speed}"
        case Evaluated():
            return f"dltrain: step {message.step} accuracy {message.accuracy:.4f}"
        case Logged():
            return f"dltrain: step {message.step} " + ", ".join(f"{k} {v:.6g}" for k, v in message.values.items())
        case Analyzed():
            return f"dltrain: step {message.step} {message.analysis.line()}"
        case Checkpointed():
            next_one = f", the next one {message.interval_s:.0f} s later" if message.interval_s is not None else ""
            return f"dltrain: checkpoint {message.mark.path} in {message.duration_s:.2f} s{next_one}"
        case Resharded():
            return f"dltrain: shares {message.shares} from step {message.step}: {message.reason}"
        case Shrunk():
            shrink_ms = 1e3 * message.shrink_s
            return (
                f"dltrain: ranks were lost; ranks {message.alive} continue from step {message.step}, "
                f"{shrink_ms:.0f} ms after the loss was detected"
            )
        case Finished():
            accuracy = f", accuracy {message.outcome.accuracy:.4f}" if message.outcome.accuracy is not None else ""
            return f"dltrain: finished {message.outcome.steps} steps in {message.outcome.seconds:.1f} s{accuracy}"
        case Hello() | Mark() | Probed() | Chosen() | Busy() | Working() | Compared():
            return ""
        case Failed() | CheckpointSkipped() | Observed():
            return ""  # Ranks print failures and skipped checkpoints themselves, with or without an agent.
        case Uploaded() | NotUploaded():
            return ""  # The process that uploads sends and prints them.
