"""A running rank: its process, its output and its latest messages."""

import asyncio
import contextlib
import os
from dataclasses import dataclass, field

from dlcontract import Rank, Record
from dltrain.host.output import Output
from dltrain.host.processes import Exit, Process
from dltrain.protocol.metric_values import merged
from dltrain.protocol.rank_messages import Logged, Mark, RankMessage, Step, Stop


@dataclass(eq=False)
class Running:
    """The process of one rank, with its output and its latest message of each type.

    The latest ``Logged`` has the last value of each metric, because a message need not have all of them.
    ``last_message_unix_s``: Unix time of the last message; 0 before the first one. ``writer``: the connection to the
    rank, or None while the rank is not connected. ``finished``: a task that ends when the agent has reported the end of
    the process; None before the task is created.
    """

    rank: Rank
    process: Process
    output: Output
    latest: dict[type[Record], RankMessage] = field(default_factory=dict)
    last_message_unix_s: float = 0.0
    writer: asyncio.StreamWriter | None = None
    finished: asyncio.Task[Exit] | None = None

    def add(self, message: RankMessage, unix_s: float) -> None:
        """Store a message of the rank that arrived at the Unix time ``unix_s``."""
        before = self.latest.get(Logged)
        if isinstance(message, Logged) and isinstance(before, Logged):
            message = message.model_copy(update={"values": merged(before.values, message.values)})
        self.latest[type(message)], self.last_message_unix_s = message, unix_s

    @property
    def trains(self) -> bool:
        """True if the rank has completed a step, so that it should write a checkpoint before it stops."""
        mark = self.latest.get(Mark)
        return Step in self.latest or (isinstance(mark, Mark) and mark.what == "first_step")

    @property
    def only_reports(self) -> bool:
        """True if the rank runs a script that calls ``dltrain.report``, but not ``dltrain.init``."""
        step = self.latest.get(Step)
        return isinstance(step, Step) and step.reported

    @property
    def needs_sigterm(self) -> bool:
        """True if the rank's script calls ``dltrain.report``, but never ``dltrain.stop_requested``.

        Only SIGTERM can stop such a script.
        """
        step = self.latest.get(Step)
        return isinstance(step, Step) and step.reported and not step.heeds_stop

    def ask_to_stop(self, writer: asyncio.StreamWriter, grace_s: float, at_step: int | None = None) -> None:
        """Ask the rank to checkpoint and exit within ``grace_s`` seconds.

        ``at_step``: number of steps after which a script that only calls ``dltrain.report`` must stop; None for other
        scripts.

        Write to the socket directly. If the rank has ended, an asyncio transport would fail to write and would also
        discard the rank's last messages, which the agent has not read yet.
        """
        stop = Stop(grace_s=grace_s, at_step=at_step)
        with contextlib.suppress(OSError):
            os.write(writer.get_extra_info("socket").fileno(), stop.to_json().encode() + b"\n")
