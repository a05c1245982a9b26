"""A rank that runs: its process, its output, and what it said last."""

import asyncio
import contextlib
import os
from dataclasses import dataclass, field

from dlcontract import Rank, Record
from dltrain.host.output import Output
from dltrain.host.processes import Exit, Process
from dltrain.protocol.rank_messages import Mark, News, Step, Stop


@dataclass(eq=False)
class Running:
    """One rank's process and what it said last, by type of news."""

    rank: Rank
    process: Process
    output: Output
    latest: dict[type[Record], News] = field(default_factory=dict)
    heard_unix_s: float = 0.0
    writer: asyncio.StreamWriter | None = None
    finished: asyncio.Task[Exit] | None = None

    @property
    def trains(self) -> bool:
        """Whether there may be something worth a checkpoint."""
        mark = self.latest.get(Mark)
        return Step in self.latest or (isinstance(mark, Mark) and mark.what == "first_step")

    def ask_to_stop(self, writer: asyncio.StreamWriter, grace_s: float) -> None:
        """Past the transport: one that fails to write drops what it has not read, the last words of a rank gone by."""
        with contextlib.suppress(OSError):
            os.write(writer.get_extra_info("socket").fileno(), Stop(grace_s=grace_s).model_dump_json().encode() + b"\n")
