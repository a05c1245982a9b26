"""The content of ``report.json``: one run from its first attempt to its end, across restarts, pods and plans.

The size is bounded for runs of any length: a point averages over more and more steps, and lists of events are thinned.
Documentation: ``docs/reference/run-report.md``.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, get_args

from pydantic import ConfigDict, Field

from dlcontract import Failure, Outcome, Rank, Record, RunPhase
from dltrain.analysis.result import Analysis
from dltrain.protocol.rank_messages import Summing

SCHEMA = 1
CAPACITY = 512
"""Maximum number of points in the report's curve of steps, and of entries in each of its lists."""


class Entry(Protocol):
    """What happened after ``step`` steps, at the Unix time ``unix_s``."""

    @property
    def step(self) -> int: ...

    @property
    def unix_s(self) -> float: ...


E = TypeVar("E", bound=Entry)


class Point(Record):
    """A point of the report's curves. It covers ``steps`` consecutive steps, the last of which is ``step``.

    The values listed in ``MEANS``, such as the loss and the times, are means over these steps. All other values are
    those of the last step.
    """

    step: int
    steps: Annotated[int, Field(ge=1)]
    unix_s: float
    """Unix time of the last of these steps."""
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    step_s: float
    predicted_s: Annotated[float | None, Field(description="Step time predicted by the current plan.")] = None
    samples_per_s: float
    compute_s: Annotated[
        float | None,
        Field(
            description="Seconds of a step for forward pass, backward pass and update. Like comm_s, wait_s and data_s, "
            "it is a mean over ranks. None: not measured."
        ),
    ] = None
    comm_s: float | None = None
    wait_s: float | None = None
    data_s: float | None = None
    world_size: int
    noise_samples: Annotated[float | None, Field(description="Gradient noise scale of the run so far.")] = None


class Evaluation(Record):
    step: int
    unix_s: float
    accuracy: float
    loss: float | None = None


class LoggedValues(Record):
    """Metrics that the script logged at a step, by name."""

    step: int
    unix_s: float
    values: dict[str, float]


FindingName = Literal[
    "InvalidPredictions",
    "ConstantLoss",
    "NotLearning",
    "LearningRateTooHigh",
    "NoBetterThanBaseline",
    "WorseThanOtherModel",
    "Overfitting",
    "NotConverged",
    "MissedClass",
    "NoisyLoss",
    "Overconfident",
    "Underconfident",
]
"""Names of the findings about a run, the most important one first."""


class Finding(Record):
    """Something that the curves or the predictions of a run show. ``message``: in words, with a remedy."""

    ORDER: ClassVar[tuple[str, ...]] = get_args(FindingName)
    name: FindingName
    message: str


class HeldOutAnalysis(Record):
    """The last analysis of predictions on held-out data, made after ``step`` steps."""

    step: int
    unix_s: float
    analysis: Analysis


class PlanEntry(Record):
    """A plan of the job, and the Unix time and step at which ranks were first launched with it.

    ``digest``: a hash of the plan. ``ranks``: number of its ranks. Times are in seconds.
    """

    number: int
    digest: str
    unix_s: float
    step: int
    ranks: int
    collective: str
    predicted_step_s: float | None = None
    predicted_total_s: float | None = None


class Split(Record):
    """The local batch sizes of all ranks from ``step`` on. They were reported at the Unix time ``unix_s``.

    ``shares``: samples per step, by ``<pod name>/<local rank>``. ``reason``: the reason for the change.
    """

    step: int
    unix_s: float
    shares: dict[str, int]
    reason: str


class AttemptRecord(Record):
    """A change of the number of ranks that train. ``size``: the new number, from ``unix_s`` and ``step`` on.

    ``unix_s``: Unix time of the change. The number is 0 while the job is stopped or restarts.
    """

    step: int
    unix_s: float
    size: int


class Fault(Record):
    step: int
    unix_s: float
    failure: Failure
    resumed_unix_s: Annotated[
        float | None, Field(description="Unix time of the first progress update after the fault.")
    ] = None


class Checkpoint(Record):
    step: Annotated[
        int, Field(description="Of an upload whose step is unknown: the step of the run when it was committed.")
    ]
    unix_s: float
    duration_s: Annotated[
        float, Field(description="Seconds that writing or uploading the checkpoint took, in the background.")
    ]
    nbytes: int


class RankTotal(Record):
    """The total times of one rank in seconds, over all launches of the ranks.

    ``place`` identifies the rank: ``<pod name>/<local rank>``. Each progress update of the rank adds the number of new
    steps, multiplied by the mean times of its last steps.
    """

    place: str
    device: str = ""
    steps: int = 0
    compute_s: float = 0.0
    comm_s: float = 0.0
    wait_s: float = 0.0
    data_s: float = 0.0
    energy_J: Annotated[
        float | None,
        Field(
            description="Energy of the rank's device in joules. None: no energy counter is readable, or another rank "
            "reads the counter."
        ),
    ] = None


class Totals(Record):
    """Totals over the whole run. They are exact, even if the report's lists omit some events to save space."""

    training_s: Annotated[float, Field(description="Seconds spent in steps.")] = 0.0
    down_s: Annotated[float, Field(description="Seconds from faults to the next step, summed over all faults.")] = 0.0
    steps_repeated: Annotated[int, Field(description="Steps that ranks repeated after a restart.")] = 0
    faults: dict[str, int] = {}
    checkpoints: int = 0
    checkpoint_s: float = 0.0
    checkpoint_nbytes: int = 0
    checkpoints_skipped: Annotated[
        int, Field(description="Stops without a checkpoint, because the grace period was too short.")
    ] = 0
    splits: int = 0
    skipped_updates: Annotated[
        int | None,
        Field(description="Updates that the script's GradScaler skipped. None: the script uses no GradScaler."),
    ] = None
    energy_J: Annotated[
        float | None, Field(description="Energy of all ranks in joules. None: no energy counter is readable.")
    ] = None
    energy_sources: tuple[str, ...] = ()


class Usage(Record):
    """What all attempts of the job have used, as the operator counts it in ``status.usage``.

    Energy and carbon include hosts and the overhead of the data centre.
    """

    until_unix_s: float
    device_seconds: Annotated[float, Field(description="GPUs and CPUs, times the seconds for which pods had them.")]
    energy_J: float
    energy_source: Annotated[str, Field(description="Measured, Modelled or Mixed.")]
    cost_usd: float
    carbon_g: Annotated[float | None, Field(description="Grams of CO2 equivalent. None: not counted.")] = None


class Document(Record):
    """The content of the run report ``report.json``: the settings, the present state and the history of one job."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    job: str
    namespace: str
    uid: str
    model: str
    dataset: str
    global_batch: int
    seed: int
    term: int
    phase: RunPhase
    started_unix_s: float
    updated_unix_s: float
    step: int = 0
    steps: int = 0
    epoch: int | None = None
    outcome: Outcome | None = None
    totals: Totals = Totals()
    least_steps: Annotated[
        int, Field(ge=1, description="Consecutive points are merged while the result covers at most this many steps.")
    ] = 1
    points: tuple[Point, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    metrics: tuple[LoggedValues, ...] = ()
    analysis: Annotated[
        HeldOutAnalysis | None,
        Field(description="Analysis of predictions. None: the run has not called dltrain.evaluate."),
    ] = None
    findings: Annotated[
        tuple[Finding, ...], Field(description="Problems that the curves and the analysis show. Empty: no problem.")
    ] = ()
    plans: tuple[PlanEntry, ...] = ()
    splits: tuple[Split, ...] = ()
    sums: Annotated[tuple[Summing, ...], Field(description="All-reduce algorithms chosen at the start.")] = ()
    attempts: tuple[AttemptRecord, ...] = ()
    faults: tuple[Fault, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    ranks: tuple[RankTotal, ...] = ()
    usage: Annotated[
        Usage | None,
        Field(description="None in the files of the pods, which do not know it. ``dljob report`` adds it."),
    ] = None

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Parse the content of ``report.json``. Raise ValueError with the name of an invalid field."""
        return cls.model_validate_json(text)

    @property
    def samples_per_s(self) -> float | None:
        """The mean throughput over all steps, by the time in steps. None: no step took time."""
        spent_s = sum(p.step_s * p.steps for p in self.points)
        return sum(p.samples_per_s * p.step_s * p.steps for p in self.points) / spent_s if spent_s else None

    @property
    def prediction_error(self) -> float | None:
        """The relative error (predicted - measured) / measured of the step time, over all steps with a prediction.

        A positive value means that steps were faster than predicted. None: no step has a prediction.
        """
        points = [(p.predicted_s, p.step_s, p.steps) for p in self.points if p.predicted_s]
        measured = sum(step_s * steps for _, step_s, steps in points)
        return sum((predicted - step_s) * steps for predicted, step_s, steps in points) / measured if measured else None


MEANS = (
    "loss", "learning_rate", "gradient_norm", "step_s", "predicted_s", "samples_per_s", "compute_s", "comm_s", "wait_s",
    "data_s",
)  # fmt: skip


def merged(first: Point, second: Point) -> Point:
    """Return one point with the means over the steps of two consecutive points. ``second`` is the later point."""
    steps = first.steps + second.steps
    means: dict[str, Any] = {}
    for name in MEANS:
        a, b = getattr(first, name), getattr(second, name)
        means[name] = (a * first.steps + b * second.steps) / steps if a is not None and b is not None else (
            b if b is not None else a
        )  # fmt: skip
    return second.model_copy(update=means | {"steps": steps})


def place(rank: Rank) -> str:
    """Return ``<pod name>/<local rank>``, which stays the same when ranks are renumbered because one was lost."""
    return f"{rank.pod}/{rank.local_rank}"


def thinned(entries: Sequence[E], capacity: int = CAPACITY) -> list[E]:
    """Return at most ``capacity`` (at least 2) of the ``entries``, always with the first and the last entry.

    If there are more, omit half of them, one after another: always that whose neighbours are the fewest steps apart, of
    several the one whose neighbours are the least time apart. Entries that are added and thinned again and again thus
    stay spread over the whole run. If every second one were omitted, hardly any early entry would stay.
    """
    kept = list(entries)
    if len(kept) <= capacity:
        return kept
    while len(kept) > capacity // 2 + 1:
        del kept[min(range(1, len(kept) - 1), key=lambda i: _apart(kept[i - 1], kept[i + 1]))]
    return kept


def _apart(first: Entry, second: Entry) -> tuple[int, float]:
    return abs(second.step - first.step), abs(second.unix_s - first.unix_s)
