"""``spec.runPolicy``, ``spec.scheduling``, ``spec.resources`` and ``spec.podTemplateOverrides``: the pods of a job."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from dlcontract import reasons
from dljob.api.base import ApiModel, Bytes, ConditionType, DnsSubdomain, Duration, Moment, Quantity, Rule


def map_list(key: str) -> dict[str, Any]:
    """Return the schema extensions that make a list a map for server-side apply: no two items have an equal ``key``.

    ``key``: name of the field that identifies an item. Different clients can then each own some items of the list.
    """
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def each_once(key: str) -> AfterValidator:
    """Return a validator of a ``map_list``: it raises ValueError if two items have an equal ``key``.

    The API server refuses such a list by the schema. The validator lets ``dljob plan`` refuse it, too.
    """

    def check(items: tuple[Any, ...]) -> tuple[Any, ...]:
        seen = set[str]()
        for item in items:
            if (name := getattr(item, key)) in seen:
                raise ValueError(f"found two items with {key} {name!r}; expected each {key} once. Merge the items")
            seen.add(name)
        return items

    return AfterValidator(check)


Labels = dict[str, Annotated[str, Field(max_length=63)]]


class _TolerationFields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    key: Annotated[str, Field(max_length=317)] = ""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: Annotated[str, Field(max_length=63)] = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"
    tolerationSeconds: int = 0


class _Checked:
    """Validates a dictionary as ``_TolerationFields``, as the API server does by the schema."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            lambda checked: checked.model_dump(exclude_unset=True),
            handler.generate_schema(_TolerationFields),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )


Toleration = Annotated[
    dict[str, Any],
    _Checked,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "key": {"type": "string", "maxLength": 317, "description": "Taint key. Empty: all keys."},
                "operator": {"type": "string", "enum": ["Exists", "Equal"], "description": "How key and value match."},
                "value": {"type": "string", "maxLength": 63, "description": "Taint value, for operator Equal."},
                "effect": {
                    "type": "string",
                    "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"],
                    "description": "Taint effect. Unset: all effects.",
                },
                "tolerationSeconds": {"type": "integer", "description": "Seconds, for effect NoExecute."},
            },
        }
    ),
]
"""A toleration as in a pod spec."""


FailureReason = StrEnum("FailureReason", {name: name for name in reasons.OF_RESTARTS})  # type: ignore[misc]


class FailureAction(StrEnum):
    FAIL_JOB = "FailJob"
    IGNORE = "Ignore"
    COUNT = "Count"


class ExitCodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"


class ExitCodes(ApiModel):
    operator: Annotated[
        ExitCodeOperator,
        Field(description="In: the exit code is one of the values. NotIn: the exit code is none of the values."),
    ] = ExitCodeOperator.IN
    values: Annotated[
        tuple[Annotated[int, Field(ge=1, le=255)], ...],
        Field(
            min_length=1,
            max_length=255,
            description="Exit codes. If signal N kills a process, its exit code is 128 + N.",
        ),
    ]


STARTUP_CONDITIONS = ("PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
"""Conditions that every pod has, so that failure rules must not name them.

They show how far the start of a pod is, and change whenever ranks fail.
"""


class WantedStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionPattern(ApiModel):
    """A condition of a node or pod, as in a Job's ``podFailurePolicy``."""

    type: Annotated[ConditionType, Field(description="Type, such as DisruptionTarget or MemoryPressure.")]
    status: Annotated[WantedStatus | None, Field(description="Status of the condition. Default: True.")] = None


class FailureRule(ApiModel):
    rules = (
        Rule(
            "onExitCodes",
            "[has(self.onExitCodes), has(self.onReasons) && size(self.onReasons) > 0, has(self.onPodConditions), "
            "has(self.onNodeConditions)].filter(x, x).size() == 1",
            "expected exactly one of onExitCodes, onReasons, onPodConditions and onNodeConditions: set one of them and "
            "remove the others",
            lambda r: (
                [r.on_exit_codes is not None, bool(r.on_reasons), r.on_pod_conditions is not None,
                 r.on_node_conditions is not None].count(True) == 1
            ),
        ),
        Rule(
            "onPodConditions",
            "!has(self.onPodConditions) || self.onPodConditions.all(c, !(c.type in "
            f"[{', '.join(repr(name) for name in STARTUP_CONDITIONS)}]))",
            f"expected none of the types {', '.join(STARTUP_CONDITIONS)}, which every pod has: name a condition that "
            "shows a problem, such as DisruptionTarget",
            lambda r: all(item.type not in STARTUP_CONDITIONS for item in r.on_pod_conditions or ()),
        ),
    )  # fmt: skip

    action: Annotated[
        FailureAction,
        Field(
            description="FailJob: the job fails at once. Ignore: the ranks restart and the failure does not count "
            "towards backoffLimit. Count: the failure counts towards backoffLimit, as without a rule."
        ),
    ]
    on_exit_codes: Annotated[
        ExitCodes | None, Field(description="The rule applies to failures of ranks with these exit codes.")
    ] = None
    on_reasons: Annotated[
        tuple[FailureReason, ...],
        Field(
            max_length=32,
            description="The rule applies to failures with these reasons. The keys of status.restartsByCause are "
            "reasons.",
        ),
    ] = ()
    on_pod_conditions: Annotated[
        tuple[ConditionPattern, ...] | None,
        Field(
            min_length=1,
            max_length=20,
            description="The rule applies to counted failures of a rank if its pod has one of these conditions at the "
            "time of the failure or up to 120 s later.",
        ),
    ] = None
    on_node_conditions: Annotated[
        tuple[ConditionPattern, ...] | None,
        Field(
            min_length=1,
            max_length=20,
            description="The rule applies to counted failures of a rank if its node has one of these conditions at "
            "the time of the failure or up to 120 s later. Examples: MemoryPressure; Ready with the status Unknown.",
        ),
    ] = None


class RunPolicy(ApiModel):
    backoff_limit: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="Number of failures of the training script after which the ranks restart. The next failure "
            "fails the job. Lost nodes and evictions do not count, except evictions of pods that used more storage "
            "than their limit or request. Ends of ranks and pods at their memory limit count.",
        ),
    ] = 3
    failure_rules: Annotated[
        tuple[FailureRule, ...],
        Field(
            max_length=20,
            description="Rules that decide what a failure leads to. The first rule that matches decides. Rules do not "
            "apply to evictions, preemption, drained and lost nodes, which never count, nor to invalid input, which "
            "always fails the job. Rules about conditions apply to failures that no other rule matches.",
        ),
    ] = ()
    compare_parameters_steps: Annotated[
        int,
        Field(
            ge=0,
            le=10**9,
            description="Number of steps between checks that the parameters of all ranks are equal bit for bit. 0: "
            "check only before each checkpoint.",
        ),
    ] = 100
    active_deadline_seconds: Annotated[
        int | None, Field(ge=1, description="The job fails after it was active (not suspended) for this time.")
    ] = None
    ttl_seconds_after_finished: Annotated[
        int | None,
        Field(ge=0, description="Seconds from the end of a job until it is deleted. Default: never."),
    ] = None
    termination_grace_period_seconds: Annotated[
        int,
        Field(
            ge=1,
            le=3600,
            description="Seconds that a stopping pod has to write its last checkpoint. If the value is 60 and a "
            "checkpoint takes longer, pods get more time, at most 600 s. Other values are used as they are.",
        ),
    ] = 60
    node_lost_seconds: Annotated[
        int, Field(ge=10, le=3600, description="Seconds after which the pods of a lost node are replaced.")
    ] = 60


class Disruption(StrEnum):
    ALLOW = "Allow"
    AVOID = "Avoid"


class SpotUse(StrEnum):
    ALLOW = "Allow"
    AVOID = "Avoid"


class Scheduling(ApiModel):
    node_selector: Annotated[
        Labels, Field(max_length=64, description="Labels that every node must have, such as zone: eu-1.")
    ] = {}
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(max_length=64, description="Taints that the pods tolerate, as in a pod spec."),
    ] = ()
    disruption: Annotated[
        Disruption | None,
        Field(
            description="Allow (default): node drains and autoscalers may evict the pods; the job writes a checkpoint "
            "and continues on other nodes. Avoid: a PodDisruptionBudget and marks for autoscalers prevent evictions, "
            "and the operator neither stops the job for a job of a higher priority, nor restarts it on other devices "
            "for its own gain or that of others."
        ),
    ] = None
    spot: Annotated[
        SpotUse | None,
        Field(
            description="Allow (default): the planner may use spot nodes, if their price and interruptions suit the "
            "job's objective. Avoid: no pod runs on a spot node."
        ),
    ] = None
    start_timeout: Annotated[
        Duration | None,
        Field(
            description="If not all pods run within this time, such as 10m, the operator stops all pods, so that "
            "other jobs can use their nodes. The job is planned again later. Time in which all pods have nodes and "
            "pull images or fetch data does not count. In a queue of Kueue, this is instead the time for which the job "
            "keeps an admission of fewer pods with which no plan is possible yet. Default: 5m; for a plan that needs "
            "new nodes, the chart value autoscaling.startTimeoutSeconds."
        ),
    ] = None
    finish_by: Annotated[
        Moment | None,
        Field(
            description="Time by which the training should end, such as 2026-12-01T18:00:00Z. Among waiting jobs of "
            "the same priority, jobs with the least slack get devices first, except jobs that can no longer meet "
            "their deadline. The job continues after this time. The condition DeadlineFeasible shows whether the "
            "deadline can be met."
        ),
    ] = None
    priority_class_name: Annotated[DnsSubdomain | None, Field(description="Priority class of the pods.")] = None
    scheduler_name: Annotated[DnsSubdomain | None, Field(description="Scheduler of the pods.")] = None
    pod_group_label: Annotated[
        str | None,
        Field(
            max_length=317,
            description="Key of a pod label whose value is the job's name. Gang schedulers group pods by this label.",
        ),
    ] = None


class Resources(ApiModel):
    """Resources of one trainer pod. Unset fields are sized from the plan."""

    cpu: Annotated[
        Quantity | None,
        Field(
            description="CPU request, such as 2 or 500m. Default: what the plan uses. On CPU nodes, the planner "
            "chooses the ranks per node and the cores per rank, and on GPU nodes the CPUs that load data for each GPU. "
            "A pod requests at least one CPU, or half of the CPUs of a node with fewer than two CPUs. The job waits "
            "until the requested CPUs are free."
        ),
    ] = None
    cpu_limit: Annotated[Quantity | None, Field(description="CPU limit, such as 2 or 500m. Default: no limit.")] = None
    memory: Annotated[
        Bytes | None,
        Field(description="Memory request and limit, such as 4Gi. Default: the memory that the planner predicts."),
    ] = None


class Metadata(ApiModel):
    labels: Annotated[Labels, Field(max_length=64, description="Labels to add to the pods.")] = {}
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=32768)]],
        Field(max_length=64, description="Annotations to add to the pods."),
    ] = {}


class PodTemplateOverride(ApiModel):
    """A change to the pod template, owned by one manager (a person, a queue, a policy tool)."""

    manager: Annotated[str, Field(min_length=1, max_length=253, description="Owner of this change.")]
    metadata: Annotated[Metadata, Field(description="Labels and annotations to add.")] = Metadata()
    spec: Annotated[
        dict[str, Any],
        Field(
            description="Part of a pod spec, such as volumes. Maps are merged, lists of named items are merged by "
            "name, and other values replace the operator's. The trainer container is called trainer."
        ),
    ] = {}
