"""The operator's settings, read once from environment variables.

| variable | default | meaning |
| --- | --- | --- |
| DLJOB_TRAINER_IMAGE | (required) | trainer image of jobs that set none |
| DLJOB_TRAINER_PULL_POLICY | IfNotPresent | its pull policy: Always, IfNotPresent or Never |
| DLJOB_LOOK_IMAGE | (none) | image of the pods that look at the data of jobs with spec.task: the operator's own |
| DLJOB_LOOK_PULL_POLICY | IfNotPresent | its pull policy: Always, IfNotPresent or Never |
| DLJOB_NAMESPACE | default | the operator's own namespace, for its Lease |
| DLJOB_LEASE_NAME | dljob-operator | name of the Lease; operators with the same Lease are replicas of one release |
| DLJOB_POD_NAME | host name and a random part | identity of the holder of the Lease |
| DLJOB_WATCH_NAMESPACES | (all) | namespaces whose jobs the operator manages, comma-separated |
| DLJOB_COUNT_ALL_PODS | false | with DLJOB_WATCH_NAMESPACES: plans also count the pods of all other namespaces |
| DLJOB_LEADER_ELECTION | true | work only while holding the Lease |
| DLJOB_CLUSTER_DOMAIN | cluster.local | DNS domain of the cluster |
| DLJOB_CONCURRENCY | 8 | jobs reconciled at the same time |
| DLJOB_PROGRESS_WRITES_PER_SECOND | 10 | most writes per second of what is only progress, over all jobs |
| DLJOB_METRICS_PORT | 9470 | port of /metrics, /healthz and /readyz |
| DLJOB_METRICS_SOURCES | [] | NetworkPolicy peers (JSON) that may read pods' metrics; empty: everyone |
| DLJOB_OVERRIDES | safe | what spec.podTemplateOverrides may contain: none, safe or all; see docs/security.md |
| DLJOB_JOB_DEFAULTS | {} | what jobs get unless their spec says otherwise (JSON, the chart value jobDefaults) |
| DLJOB_GANG_SCHEDULING | none | API of the PodGroups of jobs: none, kubernetes, coscheduling or volcano |
| DLJOB_NODE_ARCHITECTURES | (that of this machine) | architectures of nodes for jobs, comma-separated, such as amd64 |
| DLJOB_NODE_TEMPLATES | [] | nodes that an autoscaler can add (JSON, the chart value autoscaling.nodeTemplates) |
| DLJOB_SCALE_UP_SECONDS | 900 | start time-out of jobs that need nodes from DLJOB_NODE_TEMPLATES |
| DLJOB_PROVISIONING_CLASS | (none) | class of the ProvisioningRequests for new nodes; none: pending pods ask for them |
| DLJOB_PREEMPTION | Never | LowerPriority: waiting jobs may stop running ones of a lower priority; or Never |
| DLJOB_SHARE_PROFILES | false | plans of all namespaces use what the jobs of each namespace measure |
| DLJOB_PROBES | false | measure the hardware of device types that no measurement knows, in DLJOB_NAMESPACE |
| DLJOB_PROBE_GPUS | false | measure GPUs, too |
| DLJOB_PROBE_LINKS | true | with DLJOB_PROBES: measure the network between two nodes of each type, too |
| DLJOB_PROBE_PRIORITY_CLASS | (none) | PriorityClass of the pods that measure |
| DLJOB_NODE_FAULTS | 2 | faults after which new plans leave a node out; 0: never |
| DLJOB_NODE_FAULT_WINDOW_SECONDS | 3600 | time within which the DLJOB_NODE_FAULTS faults occur |
| DLJOB_NODE_LEFT_OUT_SECONDS | 3600 | for how long a node is left out; each repetition doubles it |
| DLJOB_NODE_LEFT_OUT_MAX_SECONDS | 86400 | longest time for which a node is left out |
| DLJOB_KUEUE | auto | auto or true: Kueue decides about jobs with the label of a queue; false: ignore the label |
| DLJOB_QUEUE_DEADLINES | true | waiting jobs with spec.scheduling.finishBy get devices before other jobs |
| DLJOB_QUEUE_WEIGHTS | {} | weights of namespaces in the order of the queue (JSON, the chart value queue.weights) |
| DLJOB_QUEUE_ASSIGNMENT | Together | Together: devices are assigned to all jobs together; or InOrder |
| DLJOB_RESYNC_SECONDS | 600 | interval for applying objects that are not watched, and for checking caches |
| DLJOB_WATCH_SILENCE_SECONDS | 90 | a watch is opened again after this time without an event or a bookmark |
| DLJOB_LOG_LEVEL | info | debug, info, warning or error |
| DLJOB_LOG_FORMAT | text | text or json |
"""

import json
import platform
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dljob.api.defaults import JobDefaults
from dljob.api.overrides import OverridePolicy
from dljob.cluster import Node
from dljob.cluster.platforms import ARCHITECTURES, VALUE, architecture
from dljob.cluster.templates import START_TIMEOUT_S, NodeTemplates, parse_templates
from dljob.faults import FaultPolicy
from dljob.faults.ledger import MAX_FAULTS
from dljob.job.defaults import parse_defaults
from dljob.kube.kinds import POD_GROUPS, PROVISIONING_REQUEST, Kind
from dljob.kube.leader import LEASE_NAME
from dljob.kube.watch.reflector import SILENCE_S
from dljob.render import RenderConfig
from dljob.render.gang import API_VERSIONS, GangScheduling
from dljob.scheduling import QueuePolicy

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Smallest and largest valid weight of a namespace in DLJOB_QUEUE_WEIGHTS."""
LOG_LEVELS = ("debug", "info", "warning", "error")
_CLASS_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True)
class Settings:
    trainer_image: str
    trainer_pull_policy: str
    look_image: str
    look_pull_policy: str
    namespace: str
    lease_name: str
    identity: str
    watch_namespaces: tuple[str, ...]
    count_all_pods: bool
    leader_election: bool
    cluster_domain: str
    concurrency: int
    progress_writes_per_s: float
    metrics_port: int
    metrics_sources: tuple[Mapping[str, Any], ...]
    overrides: OverridePolicy
    job_defaults: JobDefaults
    gang_scheduling: GangScheduling
    node_architectures: tuple[str, ...]
    node_templates: tuple[Node, ...]
    scale_up_s: float
    provisioning_class: str
    preempts: bool
    share_profiles: bool
    probes: bool
    probe_gpus: bool
    probe_links: bool
    probe_priority_class: str | None
    node_faults: int
    node_fault_window_s: float
    node_left_out_s: float
    node_left_out_max_s: float
    queues: bool
    queue_deadlines: bool
    queue_weights: Mapping[str, float]
    assigns_together: bool
    resync_s: float
    silence_s: float
    log_level: str
    log_format: str

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "Settings":
        """Return the settings from environment variables.

        Raise ValueError for an invalid variable, with its name, its value and what is expected.
        """
        image = env.get("DLJOB_TRAINER_IMAGE", "")
        if not image:
            raise ValueError(
                "DLJOB_TRAINER_IMAGE: found nothing; expected the container image that pods of jobs run. Set this "
                "variable"
            )
        left_out_s = _number(env, "DLJOB_NODE_LEFT_OUT_SECONDS", 3600, 60, 604_800)
        left_out_max_s = _number(env, "DLJOB_NODE_LEFT_OUT_MAX_SECONDS", 86400, 60, 604_800)
        if left_out_max_s < left_out_s:
            raise ValueError(
                f"DLJOB_NODE_LEFT_OUT_MAX_SECONDS: found {left_out_max_s:g}; expected at least "
                f"DLJOB_NODE_LEFT_OUT_SECONDS, {left_out_s:g}. Raise the former or lower the latter"
            )
        architectures = _architectures(env.get("DLJOB_NODE_ARCHITECTURES") or "")
        return cls(
            trainer_image=image,
            trainer_pull_policy=_one_of(env, "DLJOB_TRAINER_PULL_POLICY", "IfNotPresent", PULL_POLICIES),
            look_image=env.get("DLJOB_LOOK_IMAGE") or "",
            look_pull_policy=_one_of(env, "DLJOB_LOOK_PULL_POLICY", "IfNotPresent", PULL_POLICIES),
            namespace=env.get("DLJOB_NAMESPACE") or "default",
            lease_name=env.get("DLJOB_LEASE_NAME") or LEASE_NAME,
            identity=env.get("DLJOB_POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
            watch_namespaces=tuple(n.strip() for n in env.get("DLJOB_WATCH_NAMESPACES", "").split(",") if n.strip()),
            count_all_pods=_one_of(env, "DLJOB_COUNT_ALL_PODS", "false", (*_TRUE, *_FALSE)) in _TRUE,
            leader_election=_one_of(env, "DLJOB_LEADER_ELECTION", "true", (*_TRUE, *_FALSE)) in _TRUE,
            cluster_domain=env.get("DLJOB_CLUSTER_DOMAIN") or "cluster.local",
            concurrency=int(_number(env, "DLJOB_CONCURRENCY", 8, 1, 256)),
            progress_writes_per_s=_number(env, "DLJOB_PROGRESS_WRITES_PER_SECOND", 10, 0.1, 1000),
            metrics_port=int(_number(env, "DLJOB_METRICS_PORT", 9470, 1, 65535)),
            metrics_sources=_peers(env.get("DLJOB_METRICS_SOURCES") or "[]"),
            overrides=OverridePolicy(_one_of(env, "DLJOB_OVERRIDES", "safe", tuple(OverridePolicy))),
            job_defaults=_job_defaults(env.get("DLJOB_JOB_DEFAULTS") or "{}"),
            gang_scheduling=GangScheduling(_one_of(env, "DLJOB_GANG_SCHEDULING", "none", tuple(GangScheduling))),
            node_architectures=architectures,
            node_templates=_node_templates(env.get("DLJOB_NODE_TEMPLATES") or "[]", architectures),
            scale_up_s=_number(env, "DLJOB_SCALE_UP_SECONDS", START_TIMEOUT_S, 10, 86400),
            provisioning_class=_class_name(env.get("DLJOB_PROVISIONING_CLASS") or ""),
            preempts=_one_of(env, "DLJOB_PREEMPTION", "Never", ("Never", "LowerPriority")) == "LowerPriority",
            share_profiles=_one_of(env, "DLJOB_SHARE_PROFILES", "false", (*_TRUE, *_FALSE)) in _TRUE,
            probes=_one_of(env, "DLJOB_PROBES", "false", (*_TRUE, *_FALSE)) in _TRUE,
            probe_gpus=_one_of(env, "DLJOB_PROBE_GPUS", "false", (*_TRUE, *_FALSE)) in _TRUE,
            probe_links=_one_of(env, "DLJOB_PROBE_LINKS", "true", (*_TRUE, *_FALSE)) in _TRUE,
            probe_priority_class=env.get("DLJOB_PROBE_PRIORITY_CLASS") or None,
            node_faults=int(_number(env, "DLJOB_NODE_FAULTS", 2, 0, MAX_FAULTS)),
            node_fault_window_s=_number(env, "DLJOB_NODE_FAULT_WINDOW_SECONDS", 3600, 60, 86400),
            node_left_out_s=left_out_s,
            node_left_out_max_s=left_out_max_s,
            queues=_one_of(env, "DLJOB_KUEUE", "auto", ("auto", "true", "false")) != "false",
            queue_deadlines=_one_of(env, "DLJOB_QUEUE_DEADLINES", "true", (*_TRUE, *_FALSE)) in _TRUE,
            queue_weights=_weights(env.get("DLJOB_QUEUE_WEIGHTS") or "{}"),
            assigns_together=_one_of(env, "DLJOB_QUEUE_ASSIGNMENT", "Together", ("InOrder", "Together")) == "Together",
            resync_s=_number(env, "DLJOB_RESYNC_SECONDS", 600, 1, 86400),
            silence_s=_number(env, "DLJOB_WATCH_SILENCE_SECONDS", SILENCE_S, 1, 3600),
            log_level=_one_of(env, "DLJOB_LOG_LEVEL", "info", LOG_LEVELS),
            log_format=_one_of(env, "DLJOB_LOG_FORMAT", "text", ("text", "json")),
        )

    @property
    def fault_policy(self) -> FaultPolicy | None:
        """Return the rules that decide which nodes with repeated faults are left out of new plans, and for how long.

        Return None if plans never leave out a node (DLJOB_NODE_FAULTS is 0).
        """
        if self.node_faults == 0:
            return None
        return FaultPolicy(self.node_faults, self.node_fault_window_s, self.node_left_out_s, self.node_left_out_max_s)

    @property
    def queue_policy(self) -> QueuePolicy:
        """Return how waiting jobs get devices: by deadlines and weights of namespaces, and whether by preemption."""
        return QueuePolicy(self.queue_deadlines, self.queue_weights, self.preempts)

    @property
    def pod_groups(self) -> tuple[Kind, ...]:
        """Return the kinds of PodGroups that jobs may get; empty without gang scheduling (DLJOB_GANG_SCHEDULING: none).

        Jobs get the first of these kinds that the API server serves.
        """
        wanted = API_VERSIONS.get(self.gang_scheduling, ())
        return tuple(kind for kind in POD_GROUPS if kind.api_version in wanted)

    @property
    def provisioning(self) -> tuple[Kind, ...]:
        """Return a tuple with the kind ProvisioningRequest, or an empty tuple if jobs get none."""
        return (PROVISIONING_REQUEST,) if self.provisioning_class else ()

    def render(self, *, pod_group_api: str | None = None, provisions: bool = False) -> RenderConfig:
        """Return the settings for planning jobs and for rendering the manifests of their Kubernetes objects.

        ``pod_group_api``: API version of the PodGroups of new plans; None: jobs get no PodGroups. ``provisions``: True
        if the API server serves ProvisioningRequests.
        """
        return RenderConfig(
            trainer_image=self.trainer_image,
            image_pull_policy=self.trainer_pull_policy,
            look_image=self.look_image,
            look_pull_policy=self.look_pull_policy,
            cluster_domain=self.cluster_domain,
            metrics_peers=self.metrics_sources,
            overrides=self.overrides,
            job_defaults=self.job_defaults,
            pod_group_api=pod_group_api,
            node_templates=NodeTemplates(self.node_templates, self.scale_up_s),
            provisioning_class=self.provisioning_class if provisions else "",
        )


def _one_of(env: Mapping[str, str], name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = env.get(name) or default
    if value not in allowed:
        raise ValueError(f"{name}: found {value!r}; expected one of {', '.join(allowed)}")
    return value


def _number(env: Mapping[str, str], name: str, default: float, minimum: float, maximum: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not minimum <= value <= maximum:
        raise ValueError(f"{name}: found {text!r}; expected a number from {minimum:g} to {maximum:g}")
    return value


def _job_defaults(text: str) -> JobDefaults:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"DLJOB_JOB_DEFAULTS: found {text!r:.200} ({error}); expected JSON") from None
    return parse_defaults(document)


def _architectures(text: str) -> tuple[str, ...]:
    """Return the architectures of nodes for jobs, in the order of their names; by default that of this machine."""
    given = {name.strip() for name in text.split(",") if name.strip()} or {architecture(platform.machine())}
    for name in sorted(given - {*ARCHITECTURES, architecture(platform.machine())}):
        known = f"{architecture(name)} instead" if architecture(name) != name else ", ".join(ARCHITECTURES)
        raise ValueError(
            f"DLJOB_NODE_ARCHITECTURES: found {name!r:.50}; expected {known}. Correct the chart value {VALUE}"
        )
    return tuple(sorted(given))


def _node_templates(text: str, architectures: tuple[str, ...]) -> tuple[Node, ...]:
    try:
        return parse_templates(text, architectures)
    except ValueError as error:
        raise ValueError(f"DLJOB_NODE_TEMPLATES: {error}") from None


def _class_name(text: str) -> str:
    if text and not _CLASS_NAME.fullmatch(text):
        raise ValueError(
            f"DLJOB_PROVISIONING_CLASS: found {text!r:.300}; expected the name of a class, such as "
            "best-effort-atomic-scale-up.autoscaling.x-k8s.io. Correct the chart value "
            "autoscaling.provisioningRequests.className"
        )
    return text


def _weights(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"DLJOB_QUEUE_WEIGHTS: found {text!r:.200} ({error}); expected JSON") from None
    if not isinstance(found, dict):
        raise ValueError(  # noqa: TRY004
            f"DLJOB_QUEUE_WEIGHTS: found {text!r:.200}; expected an object with the weight of each namespace, such as "
            '{"team-a": 2}. Correct the chart value queue.weights'
        )
    for name, weight in found.items():
        valid = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (valid and MIN_WEIGHT <= weight <= MAX_WEIGHT):
            raise ValueError(
                f"DLJOB_QUEUE_WEIGHTS: found {weight!r:.50} for namespace {name!r:.70}; expected a number from "
                f"{MIN_WEIGHT:g} to {MAX_WEIGHT:g}. Correct the chart value queue.weights"
            )
    return {str(name): float(weight) for name, weight in found.items()}


def _peers(text: str) -> tuple[Mapping[str, Any], ...]:
    try:
        peers = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"DLJOB_METRICS_SOURCES: found {text!r} ({error}); expected JSON, a list of NetworkPolicy peers"
        ) from None
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and peer for peer in peers):
        raise ValueError(f"DLJOB_METRICS_SOURCES: found {text!r}; expected a list of NetworkPolicy peers")
    return tuple(peers)
