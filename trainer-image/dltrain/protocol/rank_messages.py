"""What ranks and their pod's agent say to each other: JSON lines over a Unix socket.

The agent listens at ``$DLTRAIN_SOCKET`` and has written the plan to ``$DLTRAIN_PLAN``. A rank connects as soon
as its interpreter runs, says ``Hello`` and then news as they come; silence beyond the step deadline means
that it hangs.
"""

import signal
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from dlcontract import EXIT_BAD_INPUT as EXIT_BAD_INPUT
from dlcontract import CheckpointMark, Failure, Noise, Outcome, ProbePoint, RankMeasure, Record

SOCKET_ENV = "DLTRAIN_SOCKET"
PLAN_ENV = "DLTRAIN_PLAN"
MEMORY_ENV = "DLTRAIN_MEMORY"
"""A folder of the pod, for training state that a relaunch starts from."""

WHERE = signal.SIGUSR2
"""Agent to a rank that hangs: write down where each thread is."""

EXIT_OK = 0
EXIT_USER_ERROR = 1
"""Exception in training code."""
EXIT_NOT_FETCHED = 74
"""The dataset could not be fetched for now: network, server or a full disk; the kubelet tries again."""
EXIT_PEER_LOST = 75
"""Another rank died; relaunch."""
EXIT_DIVERGED = 76
"""Loss is NaN or infinite."""
EXIT_PARAMETERS_DIVERGED = 77
"""Ranks hold different parameters; relaunch from the last checkpoint, whose parameters all of them held."""
EXIT_STOPPED = 143
"""Asked to stop; the last checkpoint is durable."""


class Hello(Record):
    type: Literal["hello"] = "hello"
    rank: Annotated[int, Field(ge=0)]
    pid: int
    device: Annotated[str, Field(description="The real device found, in the plan's words where it matches.")] = ""


class Mark(Record):
    """A point of the start was reached."""

    type: Literal["mark"] = "mark"
    rank: int
    what: Literal["imported", "rendezvous", "first_step"]
    unix_s: float


class Probed(Record):
    type: Literal["probed"] = "probed"
    rank: int
    points: tuple[ProbePoint, ...] = ()
    link_latency_s: float | None = None
    link_bandwidth_Bps: float | None = None


class Summing(Record):
    """How buffers of one size are summed: those of ``nbytes`` and more, up to the next one's."""

    nbytes: Annotated[int, Field(ge=0)]
    strategy: str
    segment_nbytes: Annotated[int, Field(ge=0, description="0: not cut.")] = 0
    bandwidth_Bps: Annotated[float, Field(ge=0, description="Bytes of the buffer per second.")] = 0.0


class Chosen(Record):
    """Strategies were measured at the start, and these are the fastest."""

    type: Literal["chosen"] = "chosen"
    rank: int
    sums: tuple[Summing, ...]


class Energy(Record):
    """What a rank's device has used since the rank began."""

    joules: Annotated[float, Field(ge=0)]
    source: Literal["NVML", "RAPL"]


class Step(Record):
    """After a step, at most a few a second: where this rank is. Rank 0's is the job's."""

    type: Literal["step"] = "step"
    rank: int
    step: int
    steps: int
    epoch: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    step_s: float
    typical_s: Annotated[float | None, Field(ge=0, description="Median, where step_s is the mean.")] = None
    samples_per_s: float
    world_size: int
    measure: RankMeasure
    gradient_nbytes: Annotated[int, Field(ge=0, description="Summed over ranks in each step; 0: not told.")] = 0
    staleness: Annotated[float | None, Field(description="Mean of the last updates'; None in lockstep.")] = None
    ahead: Annotated[float | None, Field(description="Steps done more than the slowest worker; None in lockstep.")] = (
        None
    )
    noise: Noise | None = None
    loss_scale: Annotated[float | None, Field(description="Of the script's GradScaler; None: it has none.")] = None
    skipped_updates: Annotated[int | None, Field(ge=0, description="By the GradScaler, in the run so far.")] = None
    energy: Annotated[Energy | None, Field(description="None: no counter can be read, or another rank reads it.")] = (
        None
    )
    gpu_memory_nbytes: Annotated[int | None, Field(description="The most that tensors took; None on a CPU.")] = None


class Evaluated(Record):
    type: Literal["evaluated"] = "evaluated"
    rank: int
    step: int
    accuracy: Annotated[float, Field(ge=0, le=1)]
    loss: float | None = None


class Compared(Record):
    """Parameters were compared over all ranks, after this step."""

    type: Literal["compared"] = "compared"
    rank: int
    step: int
    agree: bool


class Checkpointed(Record):
    type: Literal["checkpointed"] = "checkpointed"
    rank: int
    mark: CheckpointMark
    duration_s: float
    nbytes: int
    cost_s: Annotated[float, Field(ge=0, description="Of training: standing still, and the writer's CPU time.")] = 0.0
    interval_s: Annotated[float | None, Field(description="Until the next one, if the run lasts so long.")] = None


class Resharded(Record):
    """Shares were changed within the plan's bounds, from this step on."""

    type: Literal["resharded"] = "resharded"
    rank: int
    step: int
    shares: tuple[int, ...]
    reason: str


class Shrunk(Record):
    """Ranks died and the others went on without them: ``alive`` (numbers of the plan) are left, at this step."""

    type: Literal["shrunk"] = "shrunk"
    rank: int
    step: int
    alive: Annotated[tuple[int, ...], Field(min_length=1)]
    shrink_s: Annotated[float, Field(ge=0, description="From noticing the loss to being ready to go on.")]


class Busy(Record):
    """Before something that takes longer than a step (an evaluation, a large checkpoint): no news for so long is fine.

    Without it, silence of max(5 s, 10 median steps) after the first step means that the rank hangs.
    """

    type: Literal["busy"] = "busy"
    rank: int
    what: str
    limit_s: Annotated[float, Field(gt=0, le=86_400)]


class Failed(Record):
    type: Literal["failed"] = "failed"
    rank: int
    failure: Failure


class Finished(Record):
    type: Literal["finished"] = "finished"
    rank: int
    outcome: Outcome


class Stop(Record):
    """Agent to rank: checkpoint at the next step boundary and exit with EXIT_STOPPED."""

    type: Literal["stop"] = "stop"
    grace_s: float


News = Annotated[
    Hello
    | Mark
    | Probed
    | Chosen
    | Step
    | Evaluated
    | Compared
    | Checkpointed
    | Resharded
    | Shrunk
    | Busy
    | Failed
    | Finished,
    Field(discriminator="type"),
]
news_adapter: TypeAdapter[News] = TypeAdapter(News)
