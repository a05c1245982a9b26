"""The pod template of one group of pods. A template does not contain the plan, so a new plan does not change it."""

from collections.abc import Sequence
from math import ceil

from dlcontract import AGENT_PORT, METRICS_PORT, TLS_DIR
from dlcontract.pods import without_limits
from dljob.api import DLJobSpec
from dljob.cluster import quantity
from dljob.cluster.catalogue import GPU_RESOURCES, vendor
from dljob.cluster.gpu_limits import CLOCK_LIMIT_LABEL, POWER_LIMIT_LABEL
from dljob.job.observed import JOB_LABEL, TRAINER_CONTAINER, JobSeen
from dljob.job.plan.node_terms import NodeRequirement
from dljob.job.plan.pod_groups import PodGroup
from dljob.job.plan.stored import StoredPlan
from dljob.job.queue import Placement
from dljob.perf.resources.memory import shm_nbytes
from dljob.render import agent, environment
from dljob.render.config import Manifest, RenderConfig
from dljob.render.disruption import marked
from dljob.render.gang import with_pod_group
from dljob.render.names import Names, labels
from dljob.render.overrides import merged
from dljob.render.volumes import checkpoints, dataset, scratch, source

UID = 65532
"""User id of the processes in trainer pods. This user has no permissions on the node. The image works with any id."""
DEVICE_LABEL = "dljob.dev/device"
GPU_PRODUCT_LABELS = {"nvidia": "nvidia.com/gpu.product", "amd": "amd.com/gpu.product-name"}
"""Node labels with the GPU model, by vendor, as NVIDIA's GPU feature discovery and AMD's node labeller set them.

Nodes without these labels may have ``DEVICE_LABEL`` instead.
"""
PLAIN_CPU = "cpu"
"""Device type of CPU nodes that have no ``DEVICE_LABEL``."""
API_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
CONSUMED_REQUEST = "autoscaling.x-k8s.io/consume-provisioning-request"
PROVISIONING_CLASS = "autoscaling.x-k8s.io/provisioning-class-name"
"""Annotations of pods that use the nodes of a ProvisioningRequest: its name and its class."""
TOKEN_S = 3607
"""Lifetime of a service account token in seconds. The kubelet replaces the token earlier."""
MORE_THAN_ALL_NODES = 2**31 - 1


def pod_template(
    job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, group: PodGroup, config: RenderConfig
) -> Manifest:
    names, scheduling = Names.of(job), spec.scheduling
    metadata: Manifest = {"labels": labels(job, group.name), "annotations": {}}
    if scheduling.pod_group_label:
        metadata["labels"][scheduling.pod_group_label] = job.name
    pod: Manifest = {
        "serviceAccountName": names.account,
        "automountServiceAccountToken": False,  # Only the agent gets a token, not the dataset's container.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(accepted.plan.grace_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": _device_terms(group)}
            }
        },
        "topologySpreadConstraints": [_one_per_node(job)],
        "containers": [_container(job, spec, accepted, group, config)],
        "volumes": _volumes(job, spec, group),
    }
    variables = environment.fetchers_variables(spec)
    first = source.init_container(spec, config, variables, security())
    if agent.injected(spec):
        first.insert(0, agent.init_container(config, security()))
    if dataset.fetched_first(spec):
        # Another image than the trainer's may lack the program that fetches data.
        image = agent.trainer_image(config) if agent.injected(spec) else _image(spec, config)
        first.append(dataset.init_container(spec, image, variables, security()))
    if first:
        pod["initContainers"] = [sized_like(pod["containers"][0], each) for each in first]
    if scheduling.node_selector:
        pod["nodeSelector"] = dict(scheduling.node_selector)
    tolerations = [dict(item) for item in scheduling.tolerations]
    if tolerations := [*tolerations, *(item for item in _gpu_tolerations(group) if item not in tolerations)]:
        pod["tolerations"] = tolerations
    if scheduling.priority_class_name:
        pod["priorityClassName"] = scheduling.priority_class_name
    if scheduling.scheduler_name:
        pod["schedulerName"] = scheduling.scheduler_name
    if spec.trainer.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.trainer.image_pull_secrets]
    if accepted.defaults is not None and accepted.defaults.runtime_class_name:
        pod["runtimeClassName"] = accepted.defaults.runtime_class_name
    template: Manifest = with_pod_group({"metadata": marked(metadata, spec), "spec": pod}, job, spec, accepted)
    if accepted.provisioning_class is not None:
        template["metadata"]["annotations"] |= {
            CONSUMED_REQUEST: names.provisioning,
            PROVISIONING_CLASS: accepted.provisioning_class,
        }
    for override in spec.pod_template_overrides:
        change = {"metadata": override.metadata.manifest(), "spec": override.spec}
        template = merged(template, change)
    # The selectors of other objects match these labels, so an override must not change them.
    template["metadata"]["labels"] |= labels(job, group.name)
    if accepted.admission is not None:
        template = _placed(template, accepted.admission.placements.get(group.name))
    return avoiding(within(template, accepted.domain), accepted.avoid)


def _placed(template: Manifest, placement: Placement | None) -> Manifest:
    """Return the pod template with the labels, annotations, node selector and tolerations that Kueue adds.

    The template's own labels take precedence, because selectors of other objects use them. For annotations and the node
    selector, Kueue's values take precedence. ``placement`` None: return the template unchanged.
    """
    if placement is None:
        return template
    metadata, spec = dict(template["metadata"]), dict(template["spec"])
    metadata["labels"] = {**placement.labels, **metadata["labels"]}
    metadata["annotations"] = {**metadata.get("annotations", {}), **placement.annotations}
    if selector := {**(spec.get("nodeSelector") or {}), **placement.node_selector}:
        spec["nodeSelector"] = selector
    tolerations = list(spec.get("tolerations") or ())
    if tolerations := [*tolerations, *(item for item in placement.tolerations if item not in tolerations)]:
        spec["tolerations"] = tolerations
    return {**template, "metadata": metadata, "spec": spec}


def avoiding(template: Manifest, nodes: Sequence[str] | None) -> Manifest:
    """Return the pod template with a node affinity that excludes the nodes with these names.

    It is added to the affinity of the template, which the user may have overridden.
    """
    if not nodes:
        return template
    # A field selector on a node's name has exactly one value.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity: Manifest = template["spec"].get("affinity") or {}
    by_node: Manifest = affinity.get("nodeAffinity") or {}
    required: Manifest = by_node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    chosen: list[Manifest] = required.get("nodeSelectorTerms") or [{}]
    terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), *fields]} for term in chosen]
    by_node = {**by_node, "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = {**template["spec"], "affinity": {**affinity, "nodeAffinity": by_node}}
    return {**template, "spec": spec}


def within(template: Manifest, domain: Sequence[Sequence[NodeRequirement]] | None) -> Manifest:
    """Return the pod template with a node affinity for the nodes of ``domain``.

    ``domain``: terms of the part of the cluster for which the job was planned; None or empty: return the template
    unchanged. The node affinity is added to the affinity of the template, which the user may have overridden. The terms
    of an affinity are alternatives, so each term of the template is combined with each term of the domain.
    """
    if not domain:
        return template
    affinity: Manifest = template["spec"].get("affinity") or {}
    by_node: Manifest = affinity.get("nodeAffinity") or {}
    required: Manifest = by_node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    chosen: list[Manifest] = required.get("nodeSelectorTerms") or [{}]
    terms = [
        {
            **term,
            "matchExpressions": [*(term.get("matchExpressions") or ()), *(r.model_dump(mode="json") for r in part)],
        }
        for term in chosen
        for part in domain
    ]
    by_node = {**by_node, "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = {**template["spec"], "affinity": {**affinity, "nodeAffinity": by_node}}
    return {**template, "spec": spec}


def _one_per_node(job: JobSeen) -> Manifest:
    """Return the constraint that a node runs at most one pod of the job.

    With more domains asked for than there are nodes, the smallest number of pods on a node counts as 0, so that a node
    with one pod is full. A required pod anti-affinity would cost the scheduler more: it compares each new pod with all
    pods that have one (docs/design/0005-operator.md).
    """
    return {
        "maxSkew": 1,
        "minDomains": MORE_THAN_ALL_NODES,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {JOB_LABEL: job.name}},
    }


def _device_terms(group: PodGroup) -> list[Manifest]:
    product, limit_W, clock_MHz = without_limits(group.device)

    def is_in(label: str, value: str = product) -> Manifest:
        return {"key": label, "operator": "In", "values": [value]}

    def absent(label: str) -> Manifest:
        return {"key": label, "operator": "DoesNotExist"}

    if group.is_gpu:
        stated = ((POWER_LIMIT_LABEL, limit_W), (CLOCK_LIMIT_LABEL, clock_MHz))
        limits = [absent(label) if limit is None else is_in(label, str(limit)) for label, limit in stated]
        products = GPU_PRODUCT_LABELS[vendor(product)], DEVICE_LABEL
        return [{"matchExpressions": [is_in(label), *limits]} for label in products]
    labelled = {"matchExpressions": [is_in(DEVICE_LABEL)]}
    if group.device != PLAIN_CPU:
        return [labelled]
    return [labelled, {"matchExpressions": [absent(key) for key in (DEVICE_LABEL, *GPU_PRODUCT_LABELS.values())]}]


def _gpu_tolerations(group: PodGroup) -> list[Manifest]:
    """Return the toleration for the taint of GPU nodes, or an empty list for a group without GPUs.

    Nodes with GPUs often have a taint that prevents pods without GPUs from running there. The key of the taint is the
    name of the GPU resource. Only some clusters add the toleration to pods themselves (with the admission controller
    ExtendedResourceToleration).
    """
    if not group.is_gpu:
        return []
    return [{"key": GPU_RESOURCES[vendor(group.device)], "operator": "Exists", "effect": "NoSchedule"}]


def _container(job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, group: PodGroup, config: RenderConfig) -> Manifest:
    container: Manifest = {
        "name": TRAINER_CONTAINER,
        **_image(spec, config),
        "env": environment.trainers_variables(job, spec, config),
        "ports": [
            {"name": "agent", "containerPort": AGENT_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        "readinessProbe": _probe("/readyz", period_s=1, failures=3),
        "livenessProbe": _probe("/healthz", period_s=10, failures=6),
        "resources": _resources(spec, accepted, group),
        "securityContext": security(),
        "volumeMounts": _mounts(spec),
        # The kubelet copies the last log lines of a crashed agent to the pod's status. The operator copies them from
        # there to the job's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if spec.trainer.env_from:
        container["envFrom"] = [item.manifest() for item in spec.trainer.env_from]
    if (command := agent.command(spec)) is not None:
        container["command"] = command
    if (directory := source.working_directory(spec)) is not None:
        container["workingDir"] = directory
    return container


def _image(spec: DLJobSpec, config: RenderConfig) -> Manifest:
    trainer = spec.trainer
    return {
        "image": trainer.image or config.trainer_image,
        "imagePullPolicy": trainer.image_pull_policy.value if trainer.image_pull_policy else config.image_pull_policy,
    }


def security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _probe(path: str, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": METRICS_PORT, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(spec: DLJobSpec, accepted: StoredPlan, group: PodGroup) -> Manifest:
    """Return the resource requests and limits of a trainer container.

    Memory is always limited, so that a pod that uses more than predicted does not harm other pods of its node. CPU is
    limited only if the spec sets ``resources.cpuLimit``.
    """
    memory = spec.resources.memory or f"{ceil(group.memory_nbytes / 2**20)}Mi"
    requests: dict[str, str] = {"cpu": spec.resources.cpu or _cpu(group.cpu_m), "memory": memory}
    limits: dict[str, str] = {"memory": memory}
    if spec.resources.cpu_limit:
        limits["cpu"] = spec.resources.cpu_limit
    if group.is_gpu:
        resource = GPU_RESOURCES[vendor(group.device)]
        requests[resource] = limits[resource] = str(group.ranks_per_node)
    asked, most = scratch.storage(spec)
    return {"requests": requests | asked, "limits": limits | most}


def sized_like(trainer: Manifest, first: Manifest) -> Manifest:
    """Return the init container ``first`` with the CPUs of the trainer container, and with no less memory.

    A pod is charged the maximum of both. Quotas, LimitRanges and the QoS class of the pod then depend on
    ``spec.resources`` alone. An init container without a CPU limit would be refused where quotas demand one.
    """
    resources = {kind: dict(amounts) for kind, amounts in first["resources"].items()}
    for kind, amounts in resources.items():
        given = trainer["resources"][kind]
        if "cpu" in given:
            amounts["cpu"] = given["cpu"]
        if quantity(given["memory"]) > quantity(amounts["memory"]):
            amounts["memory"] = given["memory"]
    return first | {"resources": resources}


def _cpu(thousandths: int) -> str:
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


def _mounts(spec: DLJobSpec) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tls", "mountPath": TLS_DIR, "readOnly": True},
        {"name": "api", "mountPath": API_DIR, "readOnly": True},
    ]
    return mounts + checkpoints.mounts(spec) + agent.mount(spec) + source.mount(spec) + dataset.mount(spec)


def api_access() -> list[Manifest]:
    """Return the sources of the volume with which a container can access the API server.

    They are those that Kubernetes mounts by default: a token that the kubelet renews, the CA certificate and the
    namespace.
    """
    namespace = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    return [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]


def _volumes(job: JobSeen, spec: DLJobSpec, group: PodGroup) -> list[Manifest]:
    names = Names.of(job)
    shm_mib = shm_nbytes(group.ranks_per_node, group.is_gpu) // 2**20
    volumes: list[Manifest] = [
        scratch.volume(spec),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_mib}Mi"}},
        {"name": "tls", "secret": {"secretName": names.secret, "defaultMode": 0o440}},
        {"name": "api", "projected": {"defaultMode": 0o644, "sources": api_access()}},
    ]
    return volumes + checkpoints.volumes(spec, names) + agent.volume(spec) + source.volumes(spec) + dataset.volume(spec)
