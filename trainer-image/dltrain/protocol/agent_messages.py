"""Messages between the coordinator and the members of a job: JSON lines over mutual TLS.

A member is the part of each pod's agent that obeys the coordinator and controls the ranks of its pod. The coordinator
is usually the agent of the plan's first pod, and connects to every pod of the plan, including its own. A term is a
number that rises whenever another coordinator takes over. A member sends ``Welcome`` first and obeys the coordinator
with the highest term. An attempt is one launch of all ranks. Messages about ranks carry the name of their ``attempt``,
so that receivers can ignore messages of an earlier attempt.
"""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from dlcontract import MAX_LOG_TAIL, MAX_OUTPUT, Record, RunPhase
from dltrain.protocol.rank_messages import RankMessage

HEARTBEAT_S = 1.0
SILENCE_S = 5.0
"""Seconds without a message after which a connection is lost, unless the peer's kernel acknowledges messages."""
STARVED_S = 30.0
"""Seconds without a message after which a connection is lost even if the peer's kernel acknowledges messages. In this
case, the peer's agent gets no processor time or is stopped."""
LATE_S = 2 * HEARTBEAT_S
"""A message that comes this many seconds after the previous one is late, because heartbeats are more frequent."""
_ACKNOWLEDGED_S = 2.5
MAX_LINE = 4 * 2**20
"""Maximum length of a line in bytes. It suffices for a plan with several thousand ranks."""


class Welcome(Record):
    """The first message of a member (the agent of one pod) to a coordinator (the agent that directs the job).

    ``term``: the highest term that the member has seen; 0 if it has seen none. A term is a number that rises whenever
    another coordinator takes over. ``obeys``: the ``boot`` id (see ``Assign``) of the coordinator with that term, which
    the member obeys, or an empty string. ``has_coordinator``: True if that coordinator is connected to the member.
    """

    type: Literal["welcome"] = "welcome"
    pod: str
    term: int
    obeys: str
    has_coordinator: bool = False


class Assign(Record):
    """The coordinator sends the plan as JSON to the agent of a pod. The agent answers Assigned or Refused.

    The agent refuses if it obeys another coordinator with the same or a higher term, or if ``plan`` belongs to another
    job or does not match ``digest``.

    ``coordinator``: the name of the coordinator's pod. ``boot``: a UUID that each coordinator creates when it starts.
    ``term``: a number that rises whenever another coordinator takes over. ``digest``: the hash of the plan.
    """

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
    """The coordinator starts an attempt. The pods' agents end the processes of earlier attempts and answer Prepared.

    An attempt is one launch of all ranks. ``pods``: the pods of the plan that take part; empty means all pods.
    ``faults`` and ``trained_s``: the number of faults and the seconds of training so far, from which ranks choose the
    checkpoint interval.
    """

    type: Literal["prepare"] = "prepare"
    attempt: str
    pods: tuple[str, ...] = ()
    faults: Annotated[int, Field(ge=0)] = 0
    trained_s: Annotated[float, Field(ge=0)] = 0.0


class Prepared(Record):
    type: Literal["prepared"] = "prepared"
    attempt: str


class StartDaemon(Record):
    """The coordinator asks a pod's agent to run the Open MPI daemon with the command-line arguments ``arguments``."""

    type: Literal["start_daemon"] = "start_daemon"
    host: Annotated[
        str, Field(description="Address of the coordinator's agent, which forwards the daemon's connections to mpirun.")
    ]
    attempt: str
    arguments: tuple[str, ...]


class DaemonEnded(Record):
    type: Literal["daemon_ended"] = "daemon_ended"
    attempt: str
    exit_code: int
    tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)]


class StartRanks(Record):
    """The coordinator asks a pod's agent to start the ranks of its pod directly, without MPI."""

    type: Literal["start_ranks"] = "start_ranks"
    attempt: str


class StopRanks(Record):
    """The coordinator asks all ranks to checkpoint at the next step boundary and to exit.

    ``grace_s``: seconds after which the agents kill ranks that still run.
    """

    type: Literal["stop_ranks"] = "stop_ranks"
    attempt: str
    grace_s: float
    progressed: bool = False
    """True if any rank has reported a step in this attempt. A checkpoint then needs every rank.

    If False, the agents kill ranks that have not reported a step, because there is nothing to save.
    """
    at_step: int | None = None
    """The step after which ranks must stop if their script only reports (``dltrain.report``).

    None for other ranks, because they agree on a step themselves.
    """


class EndAttempt(Record):
    """The coordinator asks a pod's agent to kill the processes of ``attempt``, which is one launch of all ranks.

    The agent answers AttemptEnded.
    """

    type: Literal["end_attempt"] = "end_attempt"
    attempt: str


class AttemptEnded(Record):
    type: Literal["attempt_ended"] = "attempt_ended"
    attempt: str


class PhaseNow(Record):
    """The coordinator sends the job's phase to the agents of all pods.

    From the phase, an agent decides if its pod is ready (readiness probe) and if it may replace a lost coordinator.
    """

    type: Literal["phase_now"] = "phase_now"
    phase: RunPhase


class RankUp(Record):
    type: Literal["rank_up"] = "rank_up"
    attempt: str
    rank: int
    pid: int


class RankUpdate(Record):
    type: Literal["rank_update"] = "rank_update"
    attempt: str
    message: RankMessage


class RankStopped(Record):
    """A signal such as SIGSTOP stopped a rank's process ``stopped_s`` seconds ago."""

    type: Literal["rank_stopped"] = "rank_stopped"
    attempt: str
    rank: int
    stopped_s: float


class RankStarved(Record):
    """Since its agent's last check, a rank waited ``waited_s`` seconds for processors that other processes used."""

    type: Literal["rank_starved"] = "rank_starved"
    attempt: str
    rank: int
    waited_s: float


class PodMemoryPeak(Record):
    """The most main memory in bytes that the pod has needed in this attempt, without page cache that can be dropped.

    ``ranks``: the most that each of its ranks has needed, by rank.
    """

    type: Literal["pod_memory_peak"] = "pod_memory_peak"
    attempt: str
    nbytes: int
    ranks: dict[int, int] = {}


class Explain(Record):
    """The coordinator asks for the stacks of all ranks, because one rank hangs.

    Each pod's agent answers with one RankLog for each of its running ranks.
    """

    type: Literal["explain"] = "explain"
    attempt: str


class RankLog(Record):
    """The last lines of a running rank's log, which contain its stacks. A pod's agent sends them to answer Explain."""

    type: Literal["rank_log"] = "rank_log"
    attempt: str
    rank: int
    tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)]


class RankEnded(Record):
    """A pod's agent reports that a rank's process ended. Exactly one of ``exit_code`` and ``signal`` is set.

    ``out_of_memory``: True if the kernel killed the rank because the pod's memory ran out. ``tail``: end of the log.
    """

    type: Literal["rank_ended"] = "rank_ended"
    attempt: str
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)] = ""
    output: Annotated[
        str, Field(max_length=MAX_OUTPUT, description="Last output of the rank, which includes the text in tail.")
    ] = ""


class StillEnding(Record):
    """A pod's agent reports that processes have not ended long after SIGKILL.

    ``processes``: their names, ids and states, for a message to the user.
    """

    type: Literal["still_ending"] = "still_ending"
    processes: Annotated[str, Field(max_length=1024)]


class Leaving(Record):
    """A pod's agent reports that its pod received SIGTERM, so its ranks will soon end."""

    type: Literal["leaving"] = "leaving"


class Beat(Record):
    type: Literal["beat"] = "beat"


Line = Annotated[
    Welcome | Assign | Assigned | Refused | Prepare | Prepared | StartDaemon | DaemonEnded | StartRanks | StopRanks
    | EndAttempt | AttemptEnded | PhaseNow | RankUp | RankUpdate | RankStopped | RankStarved | PodMemoryPeak | Explain
    | RankLog | RankEnded | StillEnding | Leaving | Beat,
    Field(discriminator="type"),
]  # fmt: skip
_adapter: TypeAdapter[Line] = TypeAdapter(Line)


class Channel:
    """One connection between two agents, which sends a heartbeat every ``HEARTBEAT_S`` seconds."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        late: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Start the heartbeats on a connection.

        ``late``: called when a message arrives more than ``LATE_S`` seconds after the previous one, with these seconds.
        """
        self._reader = reader
        self._writer = writer
        self._late = late
        self.heard_s = time.monotonic()
        """Time of the last message or heartbeat, in seconds of the monotonic clock."""
        self.why = "the connection ended"
        """The reason why the connection ended; valid once ``receive`` has returned None."""
        self.unreachable = False
        """True if the connection ended because the peer's kernel acknowledged nothing any more."""
        self._beating = asyncio.create_task(self._beat())

    def send(self, line: Line) -> None:
        """Queue the message ``line``. Do nothing if the connection has ended; ``receive`` reports the end."""
        if not self._writer.is_closing():
            self._writer.write(line.model_dump_json().encode() + b"\n")

    async def receive(self) -> Line | None:
        """Wait for the next message that is not a heartbeat, and return it.

        Return None if the connection has ended, or if nothing was received for ``SILENCE_S`` seconds (``STARVED_S`` if
        the peer's kernel still acknowledges messages). Raise ValueError if a received line is not a valid message.
        """
        unanswered = False
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S if unanswered else SILENCE_S - HEARTBEAT_S):
                    text = await self._reader.readline()
            except TimeoutError:
                silent_s = time.monotonic() - self.heard_s
                # Asked again after a heartbeat: if this process did not run itself, nothing old was to be answered.
                before, unanswered = unanswered, not self._acknowledged()
                if silent_s < STARVED_S and not (before and unanswered):
                    continue
                self.why = f"silent for {silent_s:.0f} s"
                self.unreachable = before and unanswered
                self._writer.transport.abort()  # The peer is silent, so a regular close could block.
                return None
            except OSError as error:
                self.why = str(error)
                return None
            if not text.endswith(b"\n"):
                return None
            unanswered, now_s = False, time.monotonic()
            gap_s, self.heard_s = now_s - self.heard_s, now_s
            if gap_s > LATE_S:
                self._late(gap_s)
            line = _adapter.validate_json(text)
            if not isinstance(line, Beat):
                return line

    async def flush(self) -> None:
        """Wait until all queued messages are sent, but at most ``SILENCE_S`` seconds."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await self._writer.drain()

    def close(self) -> None:
        self._beating.cancel()
        self._writer.close()

    def _acknowledged(self) -> bool:
        """Return True if the peer's kernel acknowledges sent data. On a lost node or network, it does not."""
        connection = self._writer.get_extra_info("socket")
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        except OSError:
            return False
        (unacknowledged,), (since_ms,) = struct.unpack_from("I", info, 24), struct.unpack_from("I", info, 56)
        return bool(unacknowledged == 0 or since_ms < 1000 * _ACKNOWLEDGED_S)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.send(Beat())
