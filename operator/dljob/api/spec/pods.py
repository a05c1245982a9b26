"""``spec.runPolicy``, ``spec.scheduling``, ``spec.resources`` and ``spec.podTemplateOverrides``: the pods of a job."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from dljob.api.base import ApiModel, Bytes, DnsSubdomain, Quantity


def map_list(key: str) -> dict[str, Any]:
    """A list whose items are told apart by ``key``: unique, and merged item by item on server-side apply."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


Toleration = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "key": {"type": "string", "maxLength": 317, "description": "Taint key; empty matches all keys."},
                "operator": {"type": "string", "enum": ["Exists", "Equal"], "description": "How key and value match."},
                "value": {"type": "string", "maxLength": 63, "description": "Taint value, for operator Equal."},
                "effect": {
                    "type": "string",
                    "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"],
                    "description": "Taint effect; unset matches all.",
                },
                "tolerationSeconds": {"type": "integer", "description": "How long, for effect NoExecute."},
            },
        }
    ),
]
"""A toleration as in a pod spec."""


class RunPolicy(ApiModel):
    backoff_limit: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="Failures of the training program before the job fails; evictions and lost nodes do not count.",
        ),
    ] = 3
    compare_parameters_steps: Annotated[
        int,
        Field(
            ge=0,
            le=10**9,
            description="Steps after which all ranks' parameters are compared, which must be equal to the bit; "
            "0: only before each checkpoint.",
        ),
    ] = 100
    active_deadline_seconds: Annotated[
        int | None, Field(ge=1, description="The job fails when it has been active (not suspended) for so long.")
    ] = None
    ttl_seconds_after_finished: Annotated[
        int | None,
        Field(ge=0, description="A finished job is deleted after so many seconds; default: never."),
    ] = None
    termination_grace_period_seconds: Annotated[
        int, Field(ge=1, le=3600, description="Seconds a pod has for its last checkpoint when it must go.")
    ] = 60
    node_lost_seconds: Annotated[
        int, Field(ge=10, le=3600, description="A pod on a node that has been lost for so many seconds is replaced.")
    ] = 60


class Scheduling(ApiModel):
    node_selector: Annotated[
        dict[str, str], Field(description="Labels that every node must have, such as zone: eu-1.")
    ] = {}
    tolerations: Annotated[
        tuple[Toleration, ...],
        Field(max_length=64, description="Taints the pods tolerate, as in a pod spec."),
    ] = ()
    priority_class_name: Annotated[DnsSubdomain | None, Field(description="Priority class of the pods.")] = None
    scheduler_name: Annotated[DnsSubdomain | None, Field(description="Scheduler of the pods.")] = None
    pod_group_label: Annotated[
        str | None,
        Field(
            max_length=317,
            description="Label key that gets the job's name on every pod, for gang schedulers.",
        ),
    ] = None


class Resources(ApiModel):
    """Resources of one trainer pod; what is unset is sized from the plan."""

    cpu: Annotated[
        Quantity | None,
        Field(
            description="CPUs requested, such as 2 or 500m; default: one a rank, at most half of what a node has free."
        ),
    ] = None
    cpu_limit: Annotated[Quantity | None, Field(description="CPU limit, such as 2 or 500m; default: none.")] = None
    memory: Annotated[
        Bytes | None,
        Field(description="Memory requested, and limit, such as 4Gi; default: what the plan predicts."),
    ] = None


class Metadata(ApiModel):
    labels: Annotated[dict[str, str], Field(description="Labels to add to the pods.")] = {}
    annotations: Annotated[dict[str, str], Field(description="Annotations to add to the pods.")] = {}


class PodTemplateOverride(ApiModel):
    """A change to the pod template, owned by one manager (a person, a queue, a policy tool)."""

    manager: Annotated[str, Field(min_length=1, max_length=253, description="Who wants this change.")]
    metadata: Annotated[Metadata, Field(description="Labels and annotations to add.")] = Metadata()
    spec: Annotated[
        dict[str, Any],
        Field(
            description="Part of a pod spec, such as volumes: maps are merged, lists whose items have a name are "
            "merged by name, other values replace ours. The trainer's container is called trainer."
        ),
    ] = {}
