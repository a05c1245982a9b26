"""Reduce objects of the API server to the fields on which the operator's decisions depend. The module does no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dlcontract import PLAN_KEY, REPORT_KEY, config_map_names
from dljob.api.base import GROUP
from dljob.api.compact import CompactJson, CompactStatus, compact, shared, shared_sections
from dljob.api.overrides import ALL_OVERRIDES, OVERRIDES_ANNOTATION
from dljob.api.spec import STARTUP_CONDITIONS
from dljob.job.observed import (
    APPLIED_ANNOTATION,
    DATASET_CONTAINER,
    GROUP_LABEL,
    JOB_LABEL,
    LOOK_LABEL,
    SIGNATURE_ANNOTATION,
    SOURCE_CONTAINER,
    SPEC_ANNOTATION,
    SUPPORT_ANNOTATION,
    TRAINER_CONTAINER,
    Conditions,
    Fetching,
    JobSeen,
    LookSeen,
    PodSeen,
    ProvisioningSeen,
    SetSeen,
    Stuck,
    Unscheduled,
)
from dljob.job.plan.authentic import MAX_SIGNATURE, signed_part
from dljob.job.queue import PRIORITY_LABEL, QUEUE_LABEL, Assignment, PodSetSeen, WorkloadSeen
from dljob.job.task.suggestion import SUGGESTION_KEY
from dljob.kube.objects.bounds import PROBLEM, report_problem, spec_problem
from dljob.kube.objects.pods import looks
from dljob.kube.objects.pods.evictions import eviction, memory_killed_at
from dljob.kube.objects.pods.rejections import created, rejection
from dljob.kueue import DIGEST_ANNOTATION
from dljob.render import Names
from dljob.render.gang import DEFAULT_SCHEDULER
from dljob.scheduling import pod_charge

Body = Mapping[str, Any]
_FETCHING = frozenset({DATASET_CONTAINER, SOURCE_CONTAINER})
"""Names of the init containers that fetch something."""
_KNOWN_TAINTS = {f"node.kubernetes.io/{name}" for name in ("not-ready", "unreachable", "unschedulable")}
"""Taints that are ignored, because ``NodeSeen.ready`` and ``schedulable`` say the same."""
IGNORE_FAULTS_ANNOTATION = "dljob.dev/ignore-faults"
"""Annotation of a node. With the value ``true``, the node's faults do not count, and earlier ones are forgotten."""
_LEAVING_TAINTS = {
    "ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption",
    "node.cloudprovider.kubernetes.io/shutdown", "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn", "aws-node-termination-handler/rebalance-recommendation",
    "aws-node-termination-handler/asg-lifecycle-termination", "aws-node-termination-handler/scheduled-maintenance",
}  # fmt: skip
"""Taints of nodes that an autoscaler removes, that the cloud takes back, or that somebody has shut down.

Azure's taint is not among them, because nodes that it repairs have the same one. Azure cordons the nodes that it takes
back."""


@dataclass(frozen=True)
class NodeSeen:
    name: str
    ready: bool
    since: datetime
    """Time of the last change of ``ready``."""
    schedulable: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str, str], ...] = ()
    allocatable: Mapping[str, str] = field(default_factory=dict)
    bandwidth: str | None = None
    conditions: Conditions = ()
    ignore_faults: bool = False
    kernel: str = ""

    @property
    def leaving(self) -> bool:
        """Return True if somebody has cordoned, shut down or begun to remove the node, such as its cloud."""
        return not self.schedulable or any(key in _LEAVING_TAINTS for key, _, _ in self.taints)


class CompactReport(CompactJson):
    """The text of a report."""

    __slots__ = ()


@dataclass(frozen=True)
class MapSeen:
    """A ConfigMap with the label of a job. ``plan``: its data, if it is the job's plan. ``report``: the report's text.

    ``suggestion``: the text of the suggestion for ``spec.task``. All are None for other ConfigMaps. ``applied``,
    ``support``, ``signature``: values of ``APPLIED_ANNOTATION``, ``SUPPORT_ANNOTATION`` and ``SIGNATURE_ANNOTATION``;
    empty without the annotation.
    """

    name: str
    plan: Mapping[str, str] | None
    report: str | CompactReport | None
    report_problem: str | None = None
    suggestion: str | None = None
    suggestion_problem: str | None = None
    applied: str = ""
    support: str = ""
    signature: str = ""

    @property
    def report_text(self) -> str | None:
        return self.report.value if isinstance(self.report, CompactReport) else self.report


def controller_of(body: Body) -> Body | None:
    """Return the owner reference of the controlling owner; None if no controller owns the object."""
    return next((item for item in body["metadata"].get("ownerReferences") or () if item.get("controller")), None)


def owner_uid(body: Body) -> str | None:
    owner = controller_of(body)
    return None if owner is None else str(compact(owner["uid"]))


def owning_job(body: Body) -> str | None:
    """Return the name of the DLJob that controls the object; None if no DLJob does."""
    owner = controller_of(body)
    if owner is None or owner.get("kind") != "DLJob" or not str(owner.get("apiVersion", "")).startswith(f"{GROUP}/"):
        return None
    return str(compact(owner.get("name")))


def older(new: int | None, old: int | None) -> bool:
    """Return True if the resourceVersion ``new`` is certainly lower than ``old``."""
    return new is not None and old is not None and new < old


def version_number(text: object) -> int | None:
    """Return a resourceVersion as a number; None if it is not a decimal number, so that versions cannot be compared."""
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def _controlling_set(body: Body) -> tuple[str, str]:
    """Return the name and the uid of the StatefulSet that controls the object; two empty strings if none does."""
    owner = controller_of(body)
    if owner is None or owner.get("kind") != "StatefulSet":
        return "", ""
    return compact(owner["name"]), compact(owner["uid"])


def time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def job(body: Body) -> JobSeen:
    meta, spec = body["metadata"], body.get("spec") or {}
    problem = body.get(PROBLEM) or spec_problem(spec)
    return JobSeen(
        name=meta["name"],
        namespace=compact(meta["namespace"]),
        uid=compact(meta["uid"]),
        generation=meta.get("generation", 1),
        created=time(meta["creationTimestamp"]),
        spec={} if problem else shared_sections(spec),
        status=CompactStatus(body.get("status") or {}),
        deleting="deletionTimestamp" in meta,
        may_override=(meta.get("annotations") or {}).get(OVERRIDES_ANNOTATION) == ALL_OVERRIDES,
        spec_problem=problem,
        queue=(meta.get("labels") or {}).get(QUEUE_LABEL, ""),
        queue_priority=(meta.get("labels") or {}).get(PRIORITY_LABEL, ""),
    )


def workload(body: Body) -> WorkloadSeen:
    meta, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    admission = status.get("admission") or {}
    return WorkloadSeen(
        name=meta["name"],
        uid=meta["uid"],
        version=str(meta.get("resourceVersion", "")),
        generation=meta.get("generation", 1),
        queue=spec.get("queueName", ""),
        digest=(meta.get("annotations") or {}).get(DIGEST_ANNOTATION, ""),
        active=spec.get("active") is not False,
        deleting="deletionTimestamp" in meta,
        conditions=tuple(status.get("conditions") or ()),
        pod_sets={item["name"]: PodSetSeen(item["count"], item.get("minCount")) for item in spec["podSets"]},
        cluster_queue=admission.get("clusterQueue"),
        assignments={item["name"]: _assignment(item) for item in admission.get("podSetAssignments") or ()},
        checks=tuple(status.get("admissionChecks") or ()),
    )


def _assignment(body: Body) -> Assignment:
    flavors = tuple(sorted(set((body.get("flavors") or {}).values())))
    return Assignment(body.get("count"), flavors, bool(body.get("topologyAssignment")))


def pod(body: Body) -> PodSeen | LookSeen:
    if LOOK_LABEL in (body["metadata"].get("labels") or {}):
        return looks.pod(body)
    meta, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    containers = status.get("containerStatuses") or ()
    init = status.get("initContainerStatuses") or ()
    set_name, set_uid = _controlling_set(body)
    return PodSeen(
        name=meta["name"],
        uid=meta["uid"],
        group=compact((meta.get("labels") or {}).get(GROUP_LABEL, "")),
        node=compact(spec.get("nodeName")),
        ready=conditions.get("Ready", {}).get("status") == "True",
        restarts=sum(item.get("restartCount", 0) for item in containers),
        stuck=next((found for item in (*init, *containers) if (found := _stuck(item))), None),
        unschedulable=scheduled.get("message") or scheduled.get("reason")
        if scheduled.get("status") == "False"
        else None,
        deleting="deletionTimestamp" in meta,
        fenced="deletionTimestamp" in meta and meta.get("deletionGracePeriodSeconds") == 0,
        set=set_name,
        set_uid=set_uid,
        running_since=shared(next((since for item in containers if (since := _running_since(item))), None)),
        memory_killed_at=next(filter(None, map(memory_killed_at, containers)), ""),
        fetching=next((state for item in init if (state := _fetching(item))), None),
        fetched_s=next((seconds for item in init if (seconds := _fetched_s(item)) is not None), None),
        conditions=_conditions(conditions, without=frozenset(STARTUP_CONDITIONS)),
        eviction=eviction(body),
        rejection=rejection(body),
        unscheduled=None if scheduled else _unscheduled(body),
        charge=None if status.get("phase") in ("Succeeded", "Failed") else shared(pod_charge(spec)),
    )


def _unscheduled(body: Body) -> Unscheduled | None:
    """Return which scheduler has to place a pod without the condition PodScheduled; None if the pod needs none."""
    spec = body["spec"]
    if spec.get("nodeName") or (body.get("status") or {}).get("phase") not in (None, "Pending"):
        return None
    return Unscheduled(created(body), spec.get("schedulerName") or DEFAULT_SCHEDULER)


def _conditions(given: Mapping[str, Body], without: frozenset[str] = frozenset()) -> Conditions:
    return shared(tuple(sorted((name, str(i.get("status", ""))) for name, i in given.items() if name not in without)))


def _running_since(container: Body) -> datetime | None:
    """Return when the container of the agent and the ranks started; None if it does not run, or for others."""
    running = (container.get("state") or {}).get("running")
    if container.get("name") != TRAINER_CONTAINER or not running or not running.get("startedAt"):
        return None
    return datetime.fromisoformat(running["startedAt"])


def _fetching(container: Body) -> Fetching | None:
    """Return the state of an init container that fetches data or files, and that is running or has failed.

    Return None if it has succeeded or has not started, and for other init containers. ``PodSeen.stuck`` says why a
    container cannot start.
    """
    name = container.get("name", "")
    if name not in _FETCHING:
        return None
    state = container.get("state") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if ended and ended.get("exitCode"):
        lines = (ended.get("message") or ended.get("reason") or "").strip().splitlines()
        return Fetching(ended["exitCode"], lines[-1][-1000:] if lines else "", name)
    return Fetching(container=name) if "running" in state else None


def _fetched_s(container: Body) -> float | None:
    """Return the seconds in which the init container of the dataset has fetched it; None before, and for others.

    The kubelet gives times in whole seconds.
    """
    ended = (container.get("state") or {}).get("terminated") or {}
    began, finished = ended.get("startedAt"), ended.get("finishedAt")
    if container.get("name") != DATASET_CONTAINER or ended.get("exitCode") != 0 or not began or not finished:
        return None
    return max(0.0, (datetime.fromisoformat(finished) - datetime.fromisoformat(began)).total_seconds())


def _stuck(container: Body) -> Stuck | None:
    """Return the reason why a container waits; None if it does not wait.

    If the container waits because its last run ended, the reason says how this run ended. The result is also None for
    a container that fetches and is being retried, because ``_fetching`` reports this case.
    """
    waiting = (container.get("state") or {}).get("waiting")
    if not waiting:
        return None
    reason, message = waiting.get("reason") or "Waiting", waiting.get("message") or ""
    ended = (container.get("lastState") or {}).get("terminated")
    if reason == "CrashLoopBackOff" and container.get("name") in _FETCHING:
        return None
    if reason == "CrashLoopBackOff" and ended:
        reason = ended.get("reason") or reason
        message = f"exit code {ended.get('exitCode')}: {(ended.get('message') or '').strip()[-1000:]}"
    return Stuck(reason, message, container.get("image", ""))


def stateful_set(body: Body) -> SetSeen:
    meta = body["metadata"]
    annotations, status = meta.get("annotations") or {}, body.get("status") or {}
    return SetSeen(
        name=meta["name"],
        group=compact((meta.get("labels") or {}).get(GROUP_LABEL, "")),
        replicas=body["spec"].get("replicas", 1),
        spec_digest=annotations.get(SPEC_ANNOTATION, ""),
        applied=annotations.get(APPLIED_ANNOTATION, ""),
        uid=compact(meta["uid"]),
        made_replicas=status.get("replicas") or 0,
        reconciled=status.get("observedGeneration", 0) >= meta.get("generation", 0),
    )


def config_map(body: Body) -> MapSeen:
    """Reduce a ConfigMap to the plan, the report or the suggestion of a job.

    Other ConfigMaps may have the label of a job too, and hold 1 MiB each. The result for these has only their name.
    """
    meta, data = body["metadata"], body.get("data") or {}
    job = (meta.get("labels") or {}).get(JOB_LABEL, "")
    plan_name, report_name, _ = config_map_names(job)
    suggestion_name = Names(job, "").suggestion
    if owning_job(body) != job or meta["name"] not in (plan_name, report_name, suggestion_name):
        return MapSeen(meta["name"], plan=None, report=None)
    suggestion = data.get(SUGGESTION_KEY) if meta["name"] == suggestion_name else None
    unread = looks.suggestion_problem(data) if suggestion is not None else None
    report = data.get(REPORT_KEY) if meta["name"] == report_name else None
    problem = report_problem(report or "")
    annotations = meta.get("annotations") or {}
    return MapSeen(
        name=meta["name"],
        plan=signed_part(data) if meta["name"] == plan_name and PLAN_KEY in data else None,
        report=None if problem else report,
        report_problem=problem,
        suggestion=None if unread else suggestion,
        suggestion_problem=unread,
        applied=annotations.get(APPLIED_ANNOTATION, ""),
        support=annotations.get(SUPPORT_ANNOTATION, ""),
        signature=annotations.get(SIGNATURE_ANNOTATION, "")[:MAX_SIGNATURE],
    )


def provisioning_request(body: Body) -> ProvisioningSeen:
    meta, annotations = body["metadata"], body["metadata"].get("annotations") or {}
    conditions = (body.get("status") or {}).get("conditions") or ()
    return ProvisioningSeen(
        name=meta["name"],
        uid=meta["uid"],
        created=time(meta["creationTimestamp"]),
        digest=annotations.get(SPEC_ANNOTATION, ""),
        conditions={
            item["type"]: (item.get("status") == "True", item.get("reason") or "", item.get("message") or "")
            for item in conditions
        },
        deleting="deletionTimestamp" in meta,
        applied=annotations.get(APPLIED_ANNOTATION, ""),
    )


def node(body: Body) -> NodeSeen:
    """Reduce a node to the fields on which decisions depend.

    Heartbeats and the list of images are left out, so that a node in which nothing else changed compares equal.
    """
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    conditions: dict[str, Body] = {item["type"]: item for item in status.get("conditions") or ()}
    annotations, ready = meta.get("annotations") or {}, conditions.get("Ready", {})
    since = ready.get("lastTransitionTime")
    return NodeSeen(
        name=meta["name"],
        ready=ready.get("status") == "True",
        since=time(since) if since else datetime.fromtimestamp(0, UTC),
        schedulable=not spec.get("unschedulable", False),
        labels=dict(meta.get("labels") or {}),
        taints=tuple(
            (taint["key"], taint.get("value") or "", taint["effect"])
            for taint in spec.get("taints") or ()
            if taint["key"] not in _KNOWN_TAINTS
        ),
        allocatable=dict(status.get("allocatable") or {}),
        bandwidth=annotations.get("dljob.dev/network-bandwidth"),
        conditions=_conditions(conditions),
        ignore_faults=annotations.get(IGNORE_FAULTS_ANNOTATION) == "true",
        kernel=str((status.get("nodeInfo") or {}).get("kernelVersion") or ""),
    )
