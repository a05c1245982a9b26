"""What the coordinator and the members of a job say to each other: JSON lines over mTLS.

The coordinator (the agent of the plan's first pod, as a rule) connects to every pod of the plan, its own too. A member
greets with ``Welcome`` and obeys the holder of the highest term; all about a run of the ranks carries the ``world``
it belongs to, so that news of an ended world cannot be taken for news of the present one.
"""

import asyncio
import contextlib
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from dlcontract import MAX_LOG_TAIL, Record, RunPhase
from dltrain.protocol.rank_messages import News

HEARTBEAT_S = 1.0
SILENCE_S = 5.0
"""A side that hears nothing for so long gives the other one up."""
MAX_LINE = 4 * 2**20
"""A plan of some thousand ranks fits."""


class Welcome(Record):
    """Member, first of all: who it is, the highest term it has seen (0: none) and whose (a coordinator's boot).

    ``led``: whether that coordinator is connected to it.
    """

    type: Literal["welcome"] = "welcome"
    pod: str
    term: int
    obeys: str
    led: bool = False


class Assign(Record):
    """Coordinator: the plan from now on; ``boot`` tells its incarnations apart. Answered by Assigned or Refused."""

    type: Literal["assign"] = "assign"
    coordinator: str
    boot: str
    term: Annotated[int, Field(ge=1)]
    digest: str
    plan: str


class Assigned(Record):
    type: Literal["assigned"] = "assigned"
    digest: str


class Refused(Record):
    type: Literal["refused"] = "refused"
    term: int
    why: str


class Prepare(Record):
    """Coordinator: a new world begins; end what is left of any other. Answered by Prepared.

    ``pods``: those of the plan that it is made of, where others are lost; empty: all. ``faults`` of the run before it,
    and the time that it had trained: by them ranks choose the interval of their checkpoints.
    """

    type: Literal["prepare"] = "prepare"
    world: str
    pods: tuple[str, ...] = ()
    faults: Annotated[int, Field(ge=0)] = 0
    trained_s: Annotated[float, Field(ge=0)] = 0.0


class Prepared(Record):
    type: Literal["prepared"] = "prepared"
    world: str


class StartDaemon(Record):
    """Coordinator: run Open MPI's daemon with these arguments."""

    type: Literal["start_daemon"] = "start_daemon"
    world: str
    arguments: tuple[str, ...]


class DaemonEnded(Record):
    type: Literal["daemon_ended"] = "daemon_ended"
    world: str
    exit_code: int
    tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)]


class StartRanks(Record):
    """Coordinator: start this pod's ranks directly, without MPI."""

    type: Literal["start_ranks"] = "start_ranks"
    world: str


class StopRanks(Record):
    """Coordinator: ranks checkpoint at the next step boundary and end."""

    type: Literal["stop_ranks"] = "stop_ranks"
    world: str
    grace_s: float
    progressed: bool = False
    """Whether any rank has told of a step since the launch: then each of them is needed for the checkpoint."""


class EndWorld(Record):
    """Coordinator: kill whatever runs of this world. Answered by Prepared's counterpart, WorldEnded."""

    type: Literal["end_world"] = "end_world"
    world: str


class WorldEnded(Record):
    type: Literal["world_ended"] = "world_ended"
    world: str


class PhaseNow(Record):
    """Coordinator: the job's phase, for readiness and metrics."""

    type: Literal["phase_now"] = "phase_now"
    phase: RunPhase


class RankUp(Record):
    type: Literal["rank_up"] = "rank_up"
    world: str
    rank: int
    pid: int


class RankNews(Record):
    type: Literal["rank_news"] = "rank_news"
    world: str
    news: News


class RankStopped(Record):
    """Its process has stood still for so long: stopped by a signal, whatever it was doing, so that it cannot say so."""

    type: Literal["rank_stopped"] = "rank_stopped"
    world: str
    rank: int
    stopped_s: float


class Explain(Record):
    """Coordinator: a rank hangs; let every rank of this pod write down where it is. Answered by RankLogs."""

    type: Literal["explain"] = "explain"
    world: str


class RankLog(Record):
    """The end of a running rank's log."""

    type: Literal["rank_log"] = "rank_log"
    world: str
    rank: int
    tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)]


class RankEnded(Record):
    """Member: a rank's process is gone; exactly one of exit code and signal is set."""

    type: Literal["rank_ended"] = "rank_ended"
    world: str
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)] = ""


class Leaving(Record):
    """Member: this pod was told to stop."""

    type: Literal["leaving"] = "leaving"


class Beat(Record):
    type: Literal["beat"] = "beat"


Line = Annotated[
    Welcome | Assign | Assigned | Refused | Prepare | Prepared | StartDaemon | DaemonEnded | StartRanks | StopRanks
    | EndWorld | WorldEnded | PhaseNow | RankUp | RankNews | RankStopped | Explain | RankLog | RankEnded
    | Leaving | Beat,
    Field(discriminator="type"),
]  # fmt: skip
_adapter: TypeAdapter[Line] = TypeAdapter(Line)


class Channel:
    """One connection between two agents. A context manager; ``receive`` gives None when it is over or silent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.why = "the connection ended"
        """Once ``receive`` gave None: how it ended."""
        self._beating = asyncio.create_task(self._beat())

    def send(self, line: Line) -> None:
        """Queue a line; nothing happens on a connection that is over (``receive`` tells)."""
        if not self._writer.is_closing():
            self._writer.write(line.model_dump_json().encode() + b"\n")

    async def receive(self) -> Line | None:
        """The next line that is not a heartbeat. Raises ValueError on one that is not of the protocol."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    text = await self._reader.readline()
            except TimeoutError:
                self.why = f"silent for {SILENCE_S:.0f} s"
                self._writer.transport.abort()  # nobody is there to close it with
                return None
            except OSError as error:
                self.why = str(error)
                return None
            if not text.endswith(b"\n"):
                return None
            line = _adapter.validate_json(text)
            if not isinstance(line, Beat):
                return line

    async def flush(self) -> None:
        """Wait until what was sent has left, at most ``SILENCE_S``."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await self._writer.drain()

    def close(self) -> None:
        self._beating.cancel()
        self._writer.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.send(Beat())
