"""Messages between the ranks and the agent of one pod: JSON lines over a Unix socket.

The agent listens at ``$DLTRAIN_SOCKET`` and writes the plan to ``$DLTRAIN_PLAN``. A rank connects when its interpreter
starts, sends ``Hello``, and then sends progress updates. ``record.hang_detection`` limits the time for which a rank may
send nothing before it counts as hung.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from dlcontract import EXIT_BAD_INPUT as EXIT_BAD_INPUT
from dlcontract import (
    MAX_METRICS,
    CheckpointMark,
    Failure,
    Noise,
    Outcome,
    Plan,
    ProbePoint,
    RankMeasure,
    Record,
    Structure,
)
from dltrain.analysis.result import Analysis
from dltrain.protocol.rank_variables import MEMORY_ENV as MEMORY_ENV
from dltrain.protocol.rank_variables import PLAN_ENV as PLAN_ENV
from dltrain.protocol.rank_variables import SOCKET_ENV as SOCKET_ENV
from dltrain.protocol.rank_variables import WHERE as WHERE
from dltrain.protocol.upload_messages import NotUploaded, Uploaded

EXIT_OK = 0
EXIT_USER_ERROR = 1
"""The training code raised an exception."""
EXIT_NOT_FETCHED = 74
"""The dataset could not be fetched because of the network, the server or a full disk. The kubelet tries again."""
EXIT_PEER_LOST = 75
"""Another rank died. The agents restart the ranks."""
EXIT_DIVERGED = 76
"""The loss is NaN or infinite."""
EXIT_PARAMETERS_DIVERGED = 77
"""Ranks hold different parameters. They restart from the last checkpoint, whose parameters were still equal."""
EXIT_STOPPED = 143
"""The rank was asked to stop. Its last checkpoint is durable, unless the grace period was too short for one."""


class AttemptPlan(Plan):
    """The plan that an agent writes for the ranks of one launch.

    It is the operator's plan, with the numbers of faults and training seconds before this launch.
    """

    prior_faults: Annotated[int, Field(ge=0, description="Faults of the run before this attempt.")] = 0
    prior_trained_s: Annotated[
        float, Field(ge=0, description="Seconds of training (sum of step times) before this attempt.")
    ] = 0.0

    @classmethod
    def of(cls, plan: Plan, **history: float) -> Self:
        """Return ``plan`` as an AttemptPlan.

        ``history``: the values of the fields ``prior_faults`` and ``prior_trained_s``. If ``plan`` is an AttemptPlan
        already and ``history`` is empty, return ``plan`` unchanged.
        """
        if isinstance(plan, cls) and not history:
            return plan
        return cls.model_validate({name: getattr(plan, name) for name in type(plan).model_fields} | history)


class Hello(Record):
    type: Literal["hello"] = "hello"
    rank: Annotated[int, Field(ge=0)]
    pid: int
    device: Annotated[
        str, Field(description="Name of the rank's device, which is the name in the plan if it is the planned device.")
    ] = ""


class Mark(Record):
    """A rank has reached a milestone of its start, ``what``, at the Unix time ``unix_s``."""

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
    """The algorithm with which a run all-reduces gradient buffers of a range of sizes.

    ``nbytes`` is the smallest size of the range, in bytes. Entries are listed in order of size: each range ends where
    the range of the next entry begins. ``strategy``: name of the algorithm.
    """

    nbytes: Annotated[int, Field(ge=0)]
    strategy: str
    segment_nbytes: Annotated[
        int,
        Field(
            ge=0,
            description="Size in bytes of the messages into which the algorithm cuts a buffer. 0: the algorithm does "
            "not cut buffers, or chooses the size itself.",
        ),
    ] = 0
    bandwidth_Bps: Annotated[
        float, Field(ge=0, description="Measured bytes of the buffer per second. 0: not measured.")
    ] = 0.0


class Chosen(Record):
    """The all-reduce algorithms that were the fastest when the ranks measured several at the start of the run."""

    type: Literal["chosen"] = "chosen"
    rank: int
    sums: tuple[Summing, ...]


class Energy(Record):
    """The energy that a rank's device has used since the rank started.

    ``source``: the counter, either NVML of the rank's GPU, or RAPL of its node's CPUs (the pod's part).
    """

    joules: Annotated[float, Field(ge=0)]
    source: Literal["NVML", "RAPL"]


class Step(Record):
    """A rank's progress update after a step. A rank sends at most a few updates per second.

    ``step``: number of completed steps. ``steps``: number of steps of the whole training; 0 if unknown.

    The progress of the job is that of rank 0 or, if rank 0 is lost, of the lowest remaining rank.

    If ``reported`` is True, the rank runs a script that calls ``dltrain.report``, and the progress of the job is that
    of the lowest rank that reports. Such a rank sends no ``Hello``; its first update opens the connection. An agent of
    an older release does not know the field ``reported``, so it closes the connection at this first message.
    """

    type: Literal["step"] = "step"
    rank: int
    step: int
    steps: int
    epoch: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    step_s: Annotated[float, Field(description="Mean step time in seconds. 0: not known yet (only if reported).")]
    typical_s: Annotated[float | None, Field(ge=0, description="Median of the step time; step_s is the mean.")] = None
    samples_per_s: Annotated[float, Field(description="Throughput. 0: unknown (only if reported).")]
    world_size: int
    measure: Annotated[RankMeasure | None, Field(description="None: unknown (only if reported).")] = None
    gradient_nbytes: Annotated[
        int, Field(ge=0, description="Bytes of gradients that ranks reduce in each step. 0: unknown.")
    ] = 0
    staleness: Annotated[
        float | None,
        Field(
            description="Updates by other workers between this worker's reading of the parameters and its own update, "
            "as the mean over its last updates. None: the training is synchronous."
        ),
    ] = None
    ahead: Annotated[
        float | None,
        Field(description="Steps that this worker is ahead of the slowest worker. None: the training is synchronous."),
    ] = None
    noise: Noise | None = None
    loss_scale: Annotated[
        float | None,
        Field(description="Loss scale of the script's GradScaler. None: the script uses no GradScaler."),
    ] = None
    skipped_updates: Annotated[
        int | None,
        Field(
            ge=0,
            description="Updates that the script's GradScaler skipped in this run. None: the script uses no "
            "GradScaler.",
        ),
    ] = None
    energy: Annotated[
        Energy | None,
        Field(description="Energy in joules. None: no energy counter is readable, or another rank reads it."),
    ] = None
    gpu_memory_nbytes: Annotated[
        int | None, Field(description="Peak GPU memory of this rank's tensors in bytes. None: the rank uses a CPU.")
    ] = None
    reported: Annotated[bool, Field(description="True: the script measured nothing, and called dltrain.report.")] = (
        False
    )
    heeds_stop: Annotated[
        bool, Field(description="With reported: the script calls dltrain.stop_requested, so it needs no SIGTERM.")
    ] = False
    interval_s: Annotated[
        float | None, Field(ge=0, description="With reported: median seconds between two reports; None: unknown.")
    ] = None
    bound_ranks: Annotated[
        int | None,
        Field(
            ge=1,
            description="The only number of ranks with which the training can continue, because each rank reads its "
            "own data stream. None: any number.",
        ),
    ] = None


class Evaluated(Record):
    type: Literal["evaluated"] = "evaluated"
    rank: int
    step: int
    accuracy: Annotated[float, Field(ge=0, le=1)]
    loss: float | None = None


class Logged(Record):
    """Metrics that the script logged, by name. They are the newest values after ``step`` steps."""

    type: Literal["logged"] = "logged"
    rank: int
    step: int
    values: Annotated[dict[str, float], Field(max_length=MAX_METRICS)]


class Analyzed(Record):
    """The analysis of all ranks' predictions on held-out data after ``step`` steps. One of the ranks sends it."""

    type: Literal["analyzed"] = "analyzed"
    rank: int
    step: int
    analysis: Analysis


class Compared(Record):
    """The result of comparing the parameters of all ranks after ``step`` steps. ``agree``: True if they are equal."""

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
    cost_s: Annotated[
        float,
        Field(
            ge=0,
            description="Seconds of training lost to the checkpoint: the pause for its copy, and the CPU time of "
            "writing it.",
        ),
    ] = 0.0
    interval_s: Annotated[
        float | None, Field(description="Seconds from the start of a checkpoint to the start of the next one.")
    ] = None


class CheckpointSkipped(Record):
    """The ranks stop after ``step`` steps without a new checkpoint, because the grace period is too short for one."""

    type: Literal["checkpoint_skipped"] = "checkpoint_skipped"
    rank: int
    step: int
    needed_s: Annotated[float, Field(ge=0, description="Seconds until a new checkpoint would be durable, as measured.")]
    left_s: Annotated[float, Field(ge=0, description="Seconds until the first of the ranks is killed.")]


class Resharded(Record):
    """Local batch sizes change from this step on. ``shares``: the new local batch size of each rank, in samples."""

    type: Literal["resharded"] = "resharded"
    rank: int
    step: int
    shares: tuple[int, ...]
    reason: str


class Shrunk(Record):
    """The process group shrank at this step because ranks died. ``alive``: remaining ranks, numbered as at launch."""

    type: Literal["shrunk"] = "shrunk"
    rank: int
    step: int
    alive: Annotated[tuple[int, ...], Field(min_length=1)]
    shrink_s: Annotated[
        float, Field(ge=0, description="Seconds from the detection of the loss until the remaining ranks can continue.")
    ]


Activity = Literal["compilation", "data", "checkpoint"]


class Working(Record):
    """A background thread of a rank reports what the rank works on, while the rank sends no other message.

    ``activity``: the kind of work; None: such work has ended. The message does not prove that the work proceeds.
    ``record.hang_detection`` therefore has a time limit for each kind of work.
    """

    type: Literal["working"] = "working"
    rank: int
    activity: Activity | None = None


class Busy(Record):
    """A rank announces work such as an evaluation, during which it may send nothing for ``limit_s`` seconds.

    Without this message, ``record.hang_detection`` derives the limit of a silence from the steps seen so far.
    """

    type: Literal["busy"] = "busy"
    rank: int
    what: str
    limit_s: Annotated[float, Field(gt=0, le=86_400)]


class Observed(Record):
    """The structure of a script that nobody described, as the observer in its process found it (``observation``).

    The observer sends each message over a connection of its own, without ``Hello``, and never says more about the rank:
    a script that is only observed does not count as one that reports its steps.
    """

    type: Literal["observed"] = "observed"
    rank: int
    structure: Structure


class Failed(Record):
    type: Literal["failed"] = "failed"
    rank: int
    failure: Failure


class Finished(Record):
    type: Literal["finished"] = "finished"
    rank: int
    outcome: Outcome


class Stop(Record):
    """The agent asks a rank to checkpoint at the next step boundary and to exit with EXIT_STOPPED.

    ``grace_s``: seconds after which the agent kills the rank if it still runs. ``at_step``: number of steps after which
    a script that only calls ``dltrain.report`` must stop, instead of at the next boundary; None for other scripts.
    """

    type: Literal["stop"] = "stop"
    grace_s: float
    at_step: Annotated[
        int | None,
        Field(description="Step after which a script that only reports stops, because its ranks cannot agree on one."),
    ] = None

    def to_json(self) -> str:
        """Return the message as JSON without the fields that are None.

        Ranks of the previous release would refuse a message with fields that they do not know, such as ``at_step``.
        """
        return self.model_dump_json(exclude_none=True)


RankMessage = Annotated[
    Hello | Mark | Probed | Chosen | Step | Evaluated | Logged | Analyzed | Compared | Checkpointed | CheckpointSkipped
    | Resharded | Shrunk | Busy | Working | Observed | Failed | Finished | Uploaded | NotUploaded,
    Field(discriminator="type"),
]  # fmt: skip
rank_message_adapter: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)


def invalid_message(error: ValidationError) -> str:
    """Describe a message that ``rank_message_adapter`` has refused, and the remedy, in one line for the log."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    try:
        release = f" {version('dltrain')}"
    except PackageNotFoundError:  # dltrain runs from a folder of sources.
        release = ""
    return (
        f"found an invalid message ({where + ': ' if where else ''}{first['msg']:.300}); expected a message of the "
        f"agent's dltrain{release}. Install the same version of dltrain in the script's environment"
    )
