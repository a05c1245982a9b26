"""DLJobStatus: what the operator says about a job. Field descriptions are what ``kubectl explain`` prints."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel


class Phase(StrEnum):
    """One word for people and printer columns; derived from the conditions, never an input."""

    PENDING = "Pending"
    PLANNED = "Planned"
    STARTING = "Starting"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """metav1.Condition.

    Types in use: Accepted, Planned, VolumeReady, PodsReady, Running, Suspended, DeviceMismatch, Complete,
    Failed.
    """

    type: Annotated[str, Field(max_length=316)]
    status: ConditionStatus
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    message: Annotated[str, Field(max_length=32768)] = ""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    last_transition_time: datetime


class Predicted(ApiModel):
    """The model's prediction for one plan."""

    step_seconds: Annotated[float, Field(ge=0, description="Median time of one step.")]
    step_seconds_p90: Annotated[float, Field(ge=0, description="90th percentile of the prediction.")]
    compute_seconds: Annotated[float, Field(ge=0, description="Of it, computing on the slowest rank.")] = 0
    communication_seconds: Annotated[float, Field(ge=0, description="Of it, exposed communication.")] = 0
    total_seconds: Annotated[float, Field(ge=0, description="Time of the whole training.")]
    samples_per_second: Annotated[float, Field(ge=0, description="Throughput.")]
    energy_joules: Annotated[float | None, Field(ge=0, description="Energy of the whole training.")] = None
    cost: Annotated[float | None, Field(ge=0, description="Cost of the whole training, in US dollars.")] = None
    memory_bytes: Annotated[int, Field(ge=0, description="Memory of the largest rank.")] = 0
    bottleneck: Annotated[str, Field(description="What most of a step goes to.")] = ""
    basis: Annotated[str, Field(description="Where the constants come from: catalogue, probe or profile.")] = ""


class PlanGroup(ApiModel):
    """Nodes of one device in the plan."""

    name: Annotated[str, Field(description="Name of the group and suffix of its StatefulSet.")]
    device: Annotated[str, Field(description="Device type.")]
    nodes: Annotated[int, Field(ge=1)]
    ranks: Annotated[int, Field(ge=1, description="Ranks in the group.")]
    batch_per_rank: Annotated[
        tuple[int, ...],
        Field(description="Samples per step of each rank; they sum to the plan's globalBatchSize over groups."),
    ]


class Candidate(ApiModel):
    """A plan that was considered."""

    summary: str
    chosen: bool = False
    predicted: Predicted


class Rejected(ApiModel):
    """A kind of plan that was ruled out, and why."""

    summary: str
    reason: str


class BatchCandidate(ApiModel):
    """A global batch that was considered, with the best plan for it."""

    global_batch_size: Annotated[int, Field(ge=1)]
    chosen: bool = False
    efficiency: Annotated[float, Field(gt=0, description="Progress of a sample over that in spec.globalBatchSize.")]
    steps: Annotated[int, Field(ge=1, description="That get as far as the spec's.")]
    step_seconds: Annotated[float | None, Field(ge=0, description="Median time of one step.")] = None
    total_seconds: Annotated[float | None, Field(ge=0, description="Median time to the same progress.")] = None
    energy_joules: Annotated[float | None, Field(ge=0, description="Energy to the same progress.")] = None
    cost: Annotated[float | None, Field(ge=0, description="Cost of the same progress, in US dollars.")] = None
    reason: Annotated[str | None, Field(description="Why there is no plan with it.")] = None


class BatchChoice(ApiModel):
    """The global batch of a job with spec.batchSizeRange."""

    global_batch_size: Annotated[int, Field(ge=1, description="Samples per step, over all ranks; kept by the job.")]
    steps: Annotated[int, Field(ge=1, description="Optimizer steps of the whole training.")]
    message: Annotated[str, Field(description="Why this one.")]
    noise_scale: Annotated[
        float | None, Field(ge=0, description="Gradient noise scale in samples, as measured before; none: it was not.")
    ] = None
    learning_rate_scaling: Annotated[
        str | None, Field(description="Rule by which the learning rate is adapted to the batch; none: it is not.")
    ] = None
    candidates: tuple[BatchCandidate, ...] = ()


class PlanStatus(ApiModel):
    """The accepted plan."""

    number: Annotated[int, Field(ge=1, description="Counts the job's plans.")]
    digest: Annotated[str, Field(description="Digest of the plan as the trainer reads it.")]
    summary: Annotated[str, Field(description="One line, such as '3 x cpu, ring, 40+40+40'.")]
    groups: tuple[PlanGroup, ...] = ()
    nodes: Annotated[int, Field(ge=1)]
    ranks: Annotated[int, Field(ge=1)]
    collective: str
    parallelism: Annotated[
        str | None, Field(description="What ranks share out besides the batch: Data, Optimizer, Pipeline or Tensor.")
    ] = None
    micro_batches: Annotated[int | None, Field(ge=1, description="Parts of the batch, in a Pipeline.")] = None
    batch_choice: BatchChoice | None = None
    predicted: Predicted
    candidates: tuple[Candidate, ...] = ()
    trade_offs: Annotated[
        tuple[Candidate, ...],
        Field(
            description="Of what was looked at, the plans that no other beats in time, energy and cost alike (Pareto "
            "front), fastest first; none where that is the chosen one alone."
        ),
    ] = ()
    rejected: tuple[Rejected, ...] = ()
    next_measurement: Annotated[
        str | None,
        Field(description="The run that would teach most about this job's places; none once enough is known."),
    ] = None


class Measured(ApiModel):
    """What the run shows, beside what was predicted."""

    step_seconds: Annotated[float, Field(ge=0, description="Mean time of one step, over the last ones.")]
    samples_per_second: Annotated[float, Field(ge=0)]
    step_error: Annotated[
        float | None,
        Field(description="(predicted - measured) / measured step time; 0.1 means predicted 10 % too slow."),
    ] = None
    noise_scale: Annotated[
        float | None,
        Field(ge=0, description="Gradient noise scale of this run so far, in samples; none on one rank."),
    ] = None


class Progress(ApiModel):
    step: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=1)]
    epoch: Annotated[int | None, Field(ge=0)] = None
    percent: Annotated[int, Field(ge=0, le=100)]
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1, description="On held-out samples.")] = None


class LastCheckpoint(ApiModel):
    step: Annotated[int, Field(ge=0)]
    time: datetime
    path: str = ""


class GroupStatus(ApiModel):
    name: str
    replicas: Annotated[int, Field(ge=0, description="Pods wanted.")]
    ready: Annotated[int, Field(ge=0, description="Pods ready.")]


class Startup(ApiModel):
    """Seconds from the job's creation to the first step, by part."""

    admission_seconds: Annotated[float | None, Field(description="Until the plan was accepted.")] = None
    pods_seconds: Annotated[float | None, Field(description="Until every pod's agent was up.")] = None
    rendezvous_seconds: Annotated[float | None, Field(description="Until the ranks had found each other.")] = None
    import_seconds: Annotated[float | None, Field(description="Importing libraries beyond the rendezvous.")] = None
    first_step_seconds: Annotated[float | None, Field(description="Building the model and the first step.")] = None
    total_seconds: Annotated[float | None, Field(description="All of it.")] = None


class Result(ApiModel):
    """What a finished job leaves."""

    steps: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(ge=0, description="Training time.")]
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1, description="On held-out samples.")] = None
    checkpoint: Annotated[str | None, Field(description="Path of the last checkpoint on the volume.")] = None
    report: Annotated[
        str | None,
        Field(description="Path of the run's report on the volume, a page with plots; the same as JSON is beside it."),
    ] = None


class DLJobStatus(ApiModel):
    observed_generation: Annotated[int, Field(ge=0)] = 0
    phase: Phase = Phase.PENDING
    conditions: Annotated[
        tuple[Condition, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    plan: PlanStatus | None = None
    measured: Measured | None = None
    progress: Progress | None = None
    eta: Annotated[datetime | None, Field(description="When training is expected to end.")] = None
    remaining: Annotated[str | None, Field(description="Time that training still needs, for people.")] = None
    nodes: Annotated[int, Field(ge=0, description="Nodes of the plan.")] = 0
    ready: Annotated[str, Field(description="Pods ready of pods wanted.")] = "0/0"
    groups: tuple[GroupStatus, ...] = ()
    restarts: Annotated[int, Field(ge=0, description="Relaunches of the ranks.")] = 0
    restarts_by_cause: Annotated[dict[str, int], Field(description="Relaunches by cause.")] = {}
    failures: Annotated[int, Field(ge=0, description="Failures that count against runPolicy.backoffLimit.")] = 0
    last_checkpoint: LastCheckpoint | None = None
    start_time: Annotated[datetime | None, Field(description="When the operator first accepted a plan.")] = None
    completion_time: datetime | None = None
    startup: Startup | None = None
    result: Result | None = None
