"""DLJobStatus: the operator's report about a job. ``kubectl explain`` prints the field descriptions."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel
from dljob.api.status.plan import PlanStatus
from dljob.api.status.progress import LastCheckpoint, Measured, Progress, Result, Startup, TargetStatus
from dljob.api.status.queue import QueueStatus, RunForecast
from dljob.api.status.suggestion import SuggestionStatus
from dljob.api.status.usage import Usage


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

    Types in use: Accepted, DataInspected, PriorityClassFound, WithinQuota, Planned, Admitted, VolumeReady, PodsReady,
    Running, Suspended, Preempted, Resizing, PlanContradicted, NodeFaulty, DeviceMismatch, WorldSizeRefused,
    ReportValid, ProgressReported, DeadlineFeasible, DeadlineAtRisk, StorageExceeded, MemoryExceeded,
    CheckpointsUploaded, PlanEdited, Complete, Failed.
    """

    type: Annotated[str, Field(max_length=316)]
    status: ConditionStatus
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    message: Annotated[str, Field(max_length=32768)] = ""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    last_transition_time: datetime


class GroupStatus(ApiModel):
    name: str
    replicas: Annotated[int, Field(ge=0, description="Desired pods.")]
    ready: Annotated[int, Field(ge=0, description="Ready pods.")]


class DLJobStatus(ApiModel):
    observed_generation: Annotated[int, Field(ge=0)] = 0
    phase: Phase = Phase.PENDING
    conditions: Annotated[
        tuple[Condition, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    suggestion: Annotated[
        SuggestionStatus | None,
        Field(description="The choice for the data of a job with spec.task. Unset until a pod has looked at the data."),
    ] = None
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
            "all pods. 0 again after a start, a change of the spec that needs another plan, or a suspension.",
        ),
    ] = 0
    preemptions: Annotated[
        int | None,
        Field(
            ge=0,
            description="How often the job released its devices for a job of a higher priority. Unset if it never did.",
        ),
    ] = None
    usage: Annotated[
        Usage | None,
        Field(
            description="Devices, energy, money and carbon that the job has used so far. Unset before its first pod "
            "runs."
        ),
    ] = None
    last_checkpoint: LastCheckpoint | None = None
    start_time: Annotated[datetime | None, Field(description="When the operator first accepted a plan.")] = None
    waited_seconds: Annotated[
        float | None,
        Field(
            ge=0,
            description="Seconds since startTime in which the job was not admitted, because it was suspended or "
            "preempted or waited for devices. They do not count towards spec.objective.deadline. A wait is added when "
            "it ends. Unset if the job has not waited since startTime.",
        ),
    ] = None
    plan_record: Annotated[
        str | None,
        Field(
            max_length=64,
            description="The operator's record of the plan in ConfigMap JOB-plan, for the operator's own use: a serial "
            "number and a digest of the plan. The operator uses another plan only if the operator signed it later.",
        ),
    ] = None
    completion_time: datetime | None = None
    startup: Startup | None = None
    result: Result | None = None
