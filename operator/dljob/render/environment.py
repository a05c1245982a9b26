"""The environment variables of the containers of a job's pods."""

from dlcontract import (
    CLUSTER_DOMAIN_VARIABLE,
    CPUS_VARIABLE,
    DATASET_VARIABLE,
    JOB_VARIABLE,
    NAMESPACE_VARIABLE,
    POD_IP_VARIABLE,
    POD_VARIABLE,
    SERVICE_VARIABLE,
    UID_VARIABLE,
)
from dlcontract.pods import RUN_DIR_VARIABLE
from dljob.api import DLJobSpec
from dljob.api.spec.environment import EnvSource
from dljob.job.observed import JobSeen
from dljob.render.config import Manifest, RenderConfig
from dljob.render.names import Names
from dljob.render.volumes import scratch

OPERATORS_VARIABLES = (
    JOB_VARIABLE, NAMESPACE_VARIABLE, UID_VARIABLE, SERVICE_VARIABLE, CLUSTER_DOMAIN_VARIABLE, POD_VARIABLE,
    POD_IP_VARIABLE, CPUS_VARIABLE,
)  # fmt: skip
"""Names of the variables that every trainer container gets from the operator, whatever the job sets."""


def trainers_variables(job: JobSeen, spec: DLJobSpec, config: RenderConfig) -> list[Manifest]:
    """Return the environment variables of a trainer container.

    The operator's variables override the user's, which ``reconcile.spec.variables`` reports. HOME and TMPDIR are only
    defaults. With another TMPDIR, such as a folder of a shared volume, the agent's sockets stay in the pod.
    """
    ours: Manifest = {
        JOB_VARIABLE: {"value": job.name},
        NAMESPACE_VARIABLE: {"value": job.namespace},
        UID_VARIABLE: {"value": job.uid},
        SERVICE_VARIABLE: {"value": Names.of(job).service},
        CLUSTER_DOMAIN_VARIABLE: {"value": config.cluster_domain},
        POD_VARIABLE: {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
        POD_IP_VARIABLE: {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        # The CPU request in thousandths of a core. A rank derives its number of threads from this request, not
        # from the number of cores of the node.
        CPUS_VARIABLE: {"valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}},
    }
    given = {item["name"]: item for item in users_variables(spec)}
    ours |= {name: {"value": scratch.DIRECTORY} for name in ("HOME", "TMPDIR") if name not in given}
    if "TMPDIR" in given and RUN_DIR_VARIABLE not in given:
        ours[RUN_DIR_VARIABLE] = {"value": f"{scratch.DIRECTORY}/dljob"}
    if spec.dataset.path:
        ours[DATASET_VARIABLE] = {"value": spec.dataset.path}
    caches = {name: {"name": name, **value} for name, value in scratch.variables(spec).items()}
    variables = caches | given
    return list((variables | {name: {"name": name, **value} for name, value in ours.items()}).values())


def users_variables(spec: DLJobSpec) -> list[Manifest]:
    return [
        {"name": item.name, "value": item.value}
        if item.value_from is None
        else {"name": item.name, "valueFrom": _source(item.value_from)}
        for item in spec.trainer.env
    ]


def fetchers_variables(spec: DLJobSpec) -> list[Manifest]:
    """Return the environment of containers that fetch files: the user's, except HOME and TMPDIR.

    These containers lack the volumes of the ranks, in which the user's folders may be.
    """
    found = [item for item in users_variables(spec) if item["name"] not in ("HOME", "TMPDIR")]
    return [*found, {"name": "HOME", "value": scratch.DIRECTORY}]


def _source(source: EnvSource) -> Manifest:
    found = source.manifest()
    return {"fieldRef": {"apiVersion": "v1", **found["fieldRef"]}} if "fieldRef" in found else found
