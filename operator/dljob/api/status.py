"""DLJobStatus: the operator's report about a job. ``kubectl explain`` prints the field descriptions."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel


class Phase(StrEnum):
    """A one-word summary of the conditions, for people and printer columns. Nothing depends on it."""

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

    Types in use: Accepted, PriorityClassFound, Planned, Admitted, VolumeReady, PodsReady, Running, Suspended,
    Preempted, Resizing, PlanContradicted, NodeFaulty, DeviceMismatch, ReportValid, DeadlineFeasible, StorageExceeded,
    Complete, Failed.
    """

    type: Annotated[str, Field(max_length=316)]
    status: ConditionStatus
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    message: Annotated[str, Field(max_length=32768)] = ""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    last_transition_time: datetime


class Predicted(ApiModel):
    """The performance model's prediction for one plan."""

    step_seconds: Annotated[float, Field(ge=0, description="Median time of one step.")]
    step_seconds_p90: Annotated[float, Field(ge=0, description="90th percentile of the step time.")]
    compute_seconds: Annotated[float, Field(ge=0, description="Part of the step: computing on the slowest rank.")] = 0
    communication_seconds: Annotated[float, Field(ge=0, description="Part of the step: exposed communication.")] = 0
    total_seconds: Annotated[float, Field(ge=0, description="Time of the whole training.")]
    samples_per_second: Annotated[float, Field(ge=0, description="Throughput of all ranks.")]
    energy_joules: Annotated[float | None, Field(ge=0, description="Energy of the whole training.")] = None
    cost: Annotated[float | None, Field(ge=0, description="Cost of the whole training, in US dollars.")] = None
    memory_bytes: Annotated[int, Field(ge=0, description="Memory of the largest rank.")] = 0
    bottleneck: Annotated[str, Field(description="The dominant part of the step time.")] = ""
    basis: Annotated[str, Field(description="Where the constants come from: catalogue or profile.")] = ""


class PlanGroup(ApiModel):
    """The nodes of the plan that have one device type."""

    name: Annotated[str, Field(description="Name of the group and suffix of its StatefulSet.")]
    device: Annotated[str, Field(description="Device type.")]
    nodes: Annotated[int, Field(ge=1)]
    ranks: Annotated[int, Field(ge=1, description="Ranks in the group.")]
    batch_per_rank: Annotated[
        tuple[int, ...],
        Field(
            description="Local batch size of each rank, in samples per step. The local batch sizes of all groups sum "
            "to the plan's global batch size."
        ),
    ]


class Candidate(ApiModel):
    """A plan that the planner considered."""

    summary: str
    chosen: bool = False
    nodes: Annotated[int | None, Field(ge=1, description="Number of nodes. Unset in plans of older releases.")] = None
    predicted: Predicted


class Rejected(ApiModel):
    """A kind of plan that was ruled out, and the reason."""

    summary: str
    reason: str


class BatchCandidate(ApiModel):
    """A global batch size that the planner considered, with its best plan."""

    global_batch_size: Annotated[int, Field(ge=1)]
    chosen: bool = False
    efficiency: Annotated[
        float,
        Field(gt=0, description="Progress per sample, divided by the progress per sample with spec.globalBatchSize."),
    ]
    steps: Annotated[
        int, Field(ge=1, description="Steps for the same progress as the training with spec.globalBatchSize.")
    ]
    step_seconds: Annotated[float | None, Field(ge=0, description="Median time of one step.")] = None
    total_seconds: Annotated[float | None, Field(ge=0, description="Median time of all these steps.")] = None
    energy_joules: Annotated[float | None, Field(ge=0, description="Energy of all these steps.")] = None
    cost: Annotated[float | None, Field(ge=0, description="Cost of all these steps, in US dollars.")] = None
    reason: Annotated[str | None, Field(description="Why no plan is possible with this batch size.")] = None


class BatchChoice(ApiModel):
    """The chosen global batch size of a job with spec.batchSizeRange."""

    global_batch_size: Annotated[
        int, Field(ge=1, description="Samples per step over all ranks. It does not change during the job.")
    ]
    steps: Annotated[int, Field(ge=1, description="Optimizer steps of the whole training.")]
    message: Annotated[str, Field(description="Why the planner chose this batch size.")]
    noise_scale: Annotated[
        float | None,
        Field(
            ge=0,
            description="Gradient noise scale in samples, from earlier runs. Unset if no run has measured the noise "
            "scale.",
        ),
    ] = None
    learning_rate_scaling: Annotated[
        str | None,
        Field(
            description="Rule that scales the learning rate to the batch size. Unset if the learning rate is not "
            "scaled."
        ),
    ] = None
    candidates: tuple[BatchCandidate, ...] = ()


class PlanStatus(ApiModel):
    """The plan in force."""

    number: Annotated[int, Field(ge=1, description="Number of the plan, counted from 1 for each job.")]
    digest: Annotated[str, Field(description="Digest of the plan for the trainer.")]
    summary: Annotated[str, Field(description="One line, such as '3 x cpu, ring, 40+40+40'.")]
    groups: tuple[PlanGroup, ...] = ()
    nodes: Annotated[int, Field(ge=1)]
    ranks: Annotated[int, Field(ge=1)]
    collective: str
    parallelism: Annotated[
        str | None, Field(description="Parallelism strategy: Data, Optimizer, Pipeline or Tensor.")
    ] = None
    micro_batches: Annotated[int | None, Field(ge=1, description="Number of micro-batches of strategy Pipeline.")] = (
        None
    )
    batch_choice: BatchChoice | None = None
    predicted: Predicted
    candidates: tuple[Candidate, ...] = ()
    trade_offs: Annotated[
        tuple[Candidate, ...],
        Field(
            description="Pareto front of the considered plans: those that no other plan beats in time, energy and cost "
            "at once, fastest first. Empty if it holds only the chosen plan."
        ),
    ] = ()
    rejected: tuple[Rejected, ...] = ()
    next_measurement: Annotated[
        str | None,
        Field(
            description="The run that would improve predictions for this job most. Unset once the predictions need no "
            "further run."
        ),
    ] = None
    placement: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="The zone, rack or spot nodes for which the plan was priced and on which its pods run. Unset "
            "if they may run on any node.",
        ),
    ] = None
    defaults: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Values of the job that come from the administrator's defaults, such as "
            "'scheduling.priorityClassName: batch'. Unset if there are none."
        ),
    ] = None
    missing_fields: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Unset fields of the spec that a prediction needs, and what each field would enable. All "
            "values in status.plan.predicted are then 0, which means unknown. Unset if no such field is missing."
        ),
    ] = None


class Measured(ApiModel):
    """Measurements of the run, and the error of the prediction."""

    step_seconds: Annotated[float, Field(ge=0, description="Mean step time over the most recent steps.")]
    samples_per_second: Annotated[float, Field(ge=0)]
    step_error: Annotated[
        float | None,
        Field(description="(predicted - measured) / measured step time. 0.1: the prediction was 10 % too slow."),
    ] = None
    noise_scale: Annotated[
        float | None,
        Field(
            ge=0, description="Gradient noise scale of this run so far, in samples. Unset if the job runs on one rank."
        ),
    ] = None


class Progress(ApiModel):
    step: Annotated[int, Field(ge=0)]
    steps: Annotated[
        int | None,
        Field(ge=1, description="Of the whole training; absent if a script reports steps without their number."),
    ] = None
    epoch: Annotated[int | None, Field(ge=0)] = None
    percent: Annotated[int | None, Field(ge=0, le=100, description="Unset if steps is unset.")] = None
    display: Annotated[
        str, Field(description="The value of percent with the sign %, or the step, for printer columns.")
    ] = ""
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1, description="Accuracy on held-out samples.")] = None
    metrics: Annotated[
        dict[str, float] | None,
        Field(max_length=16, description="Last values of the metrics that the script logged, by name."),
    ] = None
    steps_repeated: Annotated[
        int | None,
        Field(
            ge=0,
            description="Steps that ran twice so far, because a restart resumed from an earlier step. Unset if no "
            "step ran twice.",
        ),
    ] = None


class TargetStatus(ApiModel):
    """Values of the metric of spec.until, and when it is predicted to reach its target."""

    metric: str
    value: Annotated[float, Field(description="The last value.")]
    best: float
    remaining_seconds: Annotated[
        float | None,
        Field(ge=0, description="Predicted training time to the target. Unset: the values allow no forecast."),
    ] = None
    remaining_seconds_earliest: Annotated[float | None, Field(ge=0, description="Lower end of the interval.")] = None
    remaining_seconds_latest: Annotated[float | None, Field(ge=0, description="Upper end of the interval.")] = None


class LastCheckpoint(ApiModel):
    step: Annotated[int, Field(ge=0)]
    time: datetime
    path: str = ""
    write_seconds: Annotated[float | None, Field(ge=0, description="Seconds that the checkpoint took to write.")] = None


class GroupStatus(ApiModel):
    name: str
    replicas: Annotated[int, Field(ge=0, description="Desired pods.")]
    ready: Annotated[int, Field(ge=0, description="Ready pods.")]


class Startup(ApiModel):
    """Seconds from the job's creation to its first step, by part."""

    admission_seconds: Annotated[float | None, Field(description="Time until the plan was accepted.")] = None
    pods_seconds: Annotated[
        float | None, Field(description="Time from then until the agents of all pods had started.")
    ] = None
    rendezvous_seconds: Annotated[
        float | None, Field(description="Time from then until all ranks had connected to each other.")
    ] = None
    import_seconds: Annotated[float | None, Field(description="Time from then until all libraries were imported.")] = (
        None
    )
    first_step_seconds: Annotated[
        float | None, Field(description="Time from then until the model was built and the first step was complete.")
    ] = None
    total_seconds: Annotated[float | None, Field(description="Total time from creation to the first step.")] = None


class Result(ApiModel):
    """The result of a complete job."""

    steps: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(ge=0, description="Training time.")]
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1, description="Accuracy on held-out samples.")] = None
    checkpoint: Annotated[str | None, Field(description="Path of the last checkpoint on the volume.")] = None
    report: Annotated[
        str | None,
        Field(
            description="Path of the run report on the volume, a page with plots. A JSON file beside it has the data."
        ),
    ] = None


class QueueStatus(ApiModel):
    """Place of a waiting job in the queue, and the forecast of its start. It is updated when it changes notably."""

    position: Annotated[int, Field(ge=1, description="Place among all waiting jobs. 1: the first in line.")]
    jobs: Annotated[int, Field(ge=1, description="Number of waiting jobs.")]
    earliest_start: Annotated[
        datetime | None,
        Field(description="Predicted start if run times are short (10th percentile) and no new job arrives."),
    ] = None
    forecast_start: Annotated[
        datetime | None,
        Field(
            description="The most likely start if new jobs arrive as in the last hour. Unset if the start is unknown."
        ),
    ] = None
    latest_start: Annotated[
        datetime | None,
        Field(description="Predicted start if run times are long (90th percentile) and new jobs arrive."),
    ] = None
    latest_finish: Annotated[
        datetime | None, Field(description="Predicted end of the training with the 90th percentile of all run times.")
    ] = None


class ForecastSize(ApiModel):
    """A number of nodes for which the planner predicted the whole training."""

    nodes: Annotated[int, Field(ge=1)]
    total_seconds: Annotated[
        float, Field(ge=0, description="Median time of the whole training on this number of nodes.")
    ]


class RunForecast(ApiModel):
    """Forecast of a job that holds devices, for queues and tools that decide whether to stop or resize it."""

    time: Annotated[datetime, Field(description="When the forecast was made.")]
    remaining_seconds: Annotated[float, Field(ge=0, description="Median of the remaining training time.")]
    remaining_seconds_p90: Annotated[float, Field(ge=0, description="90th percentile of the remaining training time.")]
    unsaved_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Training time since the last checkpoint. This time is lost if the pods are killed. Pods that "
            "get their grace period write a checkpoint first.",
        ),
    ]
    restart_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Time from the creation of new pods to their first step. Every stop of the job costs this "
            "time.",
        ),
    ]
    sizes: Annotated[
        tuple[ForecastSize, ...],
        Field(
            max_length=8,
            description="The numbers of nodes with the shortest predicted training times, the fastest first.",
        ),
    ] = ()


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
    target: Annotated[TargetStatus | None, Field(description="Progress to the target of spec.until.")] = None
    eta: Annotated[datetime | None, Field(description="When training is expected to end.")] = None
    remaining: Annotated[
        str | None,
        Field(description="Estimated remaining training time, such as 2h5m (<2h20m): the median and the p90."),
    ] = None
    queue: Annotated[
        QueueStatus | None, Field(description="Place in the queue. Unset for a job that does not wait for devices.")
    ] = None
    forecast: Annotated[
        RunForecast | None,
        Field(
            description="Forecast of the remaining training and of the cost of a stop. Unset for a job that holds no "
            "devices."
        ),
    ] = None
    selector: Annotated[
        str, Field(description="Label selector of the job's pods, for the scale subresource.", max_length=128)
    ] = ""
    nodes: Annotated[int, Field(ge=0, description="Nodes of the plan.")] = 0
    ready: Annotated[str, Field(description="Ready pods of desired pods, such as 3/4.")] = "0/0"
    groups: tuple[GroupStatus, ...] = ()
    restarts: Annotated[int, Field(ge=0, description="Restarts of the ranks.")] = 0
    restarts_by_cause: Annotated[
        dict[str, int],
        Field(
            description="Number of faults by cause. Faults count both if all ranks restarted and if the unaffected "
            "ranks continued."
        ),
    ] = {}
    failures: Annotated[int, Field(ge=0, description="Failures that count towards runPolicy.backoffLimit.")] = 0
    failures_ignored: Annotated[
        int | None,
        Field(
            ge=0,
            description="Failures that were counted at first, and then ignored because of a rule with "
            "onNodeConditions or onPodConditions. Unset if there are no such failures.",
        ),
    ] = None
    start_timeouts: Annotated[
        int,
        Field(
            ge=0,
            description="Number of consecutive starts in which not all pods ran in time, so that the operator stopped "
            "all pods.",
        ),
    ] = 0
    preemptions: Annotated[
        int | None,
        Field(
            ge=0,
            description="How often the job released its devices for a job of a higher priority. Unset if it never did.",
        ),
    ] = None
    last_checkpoint: LastCheckpoint | None = None
    start_time: Annotated[datetime | None, Field(description="When the operator first accepted a plan.")] = None
    completion_time: datetime | None = None
    startup: Startup | None = None
    result: Result | None = None
