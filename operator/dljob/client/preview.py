"""Plan jobs that need not exist for the current cluster, as the operator would. Nothing in the cluster changes."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.client import operator_pods, update_check
from dljob.client.errors import BadInputError
from dljob.client.operator_pods import OperatorPod
from dljob.cluster import ClusterView
from dljob.cluster.energy import DAY_S
from dljob.cluster.templates import NO_TEMPLATES, NodeTemplates
from dljob.job.defaults import with_defaults
from dljob.job.observed import JOB_LABEL
from dljob.job.plan.recommendation import Job, Recommendation, recommend
from dljob.job.plan.status import figures
from dljob.job.profiles import learned_by_model
from dljob.planner import Choice, Decision, Learned, VolumeLimit, scaling
from dljob.reconcile.spec.volumes import mounted_claims, volume_limits
from dljob.render import Names

Constants = Mapping[tuple[str, str], Learned]
_REMEDY = "Ask an administrator to bind the chart's ClusterRole for plans (dljob-plan) to you"


@dataclass(frozen=True)
class ClusterState:
    """The state of a cluster that affects plans."""

    view: ClusterView
    constants: Constants
    """Measured constants by (model, device type). Empty if the user may not read profiles, or if there are none.
    ``observe`` returns only those that all namespaces share."""
    operators: tuple[OperatorPod, ...] = ()
    profiles: tuple[Mapping[str, Any], ...] = ()
    """The DLProfile objects of the cluster, also those that only the plans of one namespace use."""
    warning: str | None = None
    """What the user may not read, and what plans use instead; None if the user may read all that plans depend on."""
    without: Callable[[str, str], ClusterView] | None = None
    """Function that returns the nodes as if the pods of the job with this namespace and name were gone; None for a
    cluster that a file describes, which has no jobs."""
    volumes: Mapping[tuple[str, str], tuple[VolumeLimit, ...]] = field(default_factory=dict)
    """Namespace and name of a job → its claims that only some nodes can mount. ``with_volumes`` sets it."""

    def of_job(self, namespace: str, job: str) -> "ClusterState":
        """Return the state for the plan of a job: the measured constants of its namespace, and nodes that it can use.

        What the job itself uses, if it runs already, counts as free, as for the operator.
        """
        view = self.view if self.without is None else self.without(namespace, job)
        view = view.on_platforms(operator_pods.architectures(self.operators, namespace))
        return replace(self, view=view, constants=learned_by_model(self.profiles, namespace))


async def observe(api: Any) -> ClusterState:
    """Return the nodes with their free resources, the profiles and the pods of operators of the cluster.

    Without the permission to list profiles, the result has a warning and no measured constants. Raise ApiError if the
    API server answers with another error, such as that the user may not list nodes or pods.
    """
    from dljob.kube import ApiError, cluster_view
    from dljob.kube.kinds import NODE, POD, PROFILE
    from dljob.kube.objects.trim import node

    active = "status.phase!=Succeeded,status.phase!=Failed"
    try:
        nodes, pods = await asyncio.gather(api.find(NODE, None), api.find(POD, None, fieldSelector=active))
    except ApiError as error:
        if not error.forbidden:
            raise
        raise ApiError(
            error.code,
            error.reason,
            f"current cluster: {error.message}; expected the permission to list nodes and the pods of all namespaces, "
            f"because plans depend on free devices. {_REMEDY}. Without it, plan for a cluster that a "
            "file describes, or apply the job with planning.mode: PlanOnly, and read its plan from status.plan",
        ) from None
    warning = None
    try:
        profiles = await api.find(PROFILE, None)
    except ApiError as error:
        if error.code not in (403, 404):
            raise
        profiles = []
        if error.forbidden:
            warning = (
                f"current cluster: {error.message}; expected the permission to list dlprofiles, because the operator "
                f"plans with their measurements. This plan uses data sheets. {_REMEDY}"
            )
    seen = [node(body) for body in nodes]
    operators = operator_pods.operator_pods(pods, {each.name: each.labels for each in seen})

    def without(namespace: str, job: str) -> ClusterView:
        return cluster_view(seen, [each for each in pods if not _is_of(each["metadata"], namespace, job)])

    view, constants = cluster_view(seen, pods), learned_by_model(profiles, "")
    return ClusterState(view, constants, operators, tuple(profiles), warning, without)


async def with_volumes(
    api: Any, state: ClusterState, jobs: Sequence[tuple[Job, str]], defaults: JobDefaults | None = None
) -> ClusterState:
    """Return the state with the claims of jobs that only some nodes can mount.

    ``jobs``: each with its namespace. ``defaults``: the administrator's defaults; None: those of the operators in
    ``state``. Without the permission to get claims or volumes, the result has a warning, and the plans of jobs that
    need them may use any node. Raise ApiError if the API server answers with another error.
    """
    from dljob.kube import ApiError

    found: dict[tuple[str, str], tuple[VolumeLimit, ...]] = {}
    warning = None
    for job, namespace in jobs:
        own = defaults_of(state, namespace)[0] if defaults is None else defaults
        try:
            found[namespace, job.name] = await _limits(api, job, namespace, own)
        except ApiError as error:
            if not error.forbidden:
                raise
            warning = (
                f"current cluster: {error.message}; expected the permission to get persistentvolumeclaims "
                "and persistentvolumes, because a job runs only on nodes that can mount its volumes. This plan may "
                f"use others. {_REMEDY}"
            )
    texts = [text for text in (state.warning, warning) if text]
    return replace(state, volumes=found, warning="; ".join(texts) or None)


async def _limits(api: Any, job: Job, namespace: str, defaults: JobDefaults) -> tuple[VolumeLimit, ...]:
    """Return the claims of a job that only some nodes can mount. Of the cluster's volumes, only theirs are read.

    Without the permission to list StorageClasses, a claim without a volume limits nothing.
    """
    from dljob.kube import ApiError
    from dljob.kube.kinds import CLAIM, STORAGE_CLASS, VOLUME, Kind
    from dljob.kube.objects import storage

    async def get(kind: Kind, where: str | None, name: str) -> Mapping[str, Any] | None:
        try:
            body: Mapping[str, Any] = await api.get(kind, where, name)
        except ApiError as error:
            if not error.not_found:
                raise
            return None
        return body

    spec, claim_name = with_defaults(job.spec, defaults), Names(job.name, "").claim
    names = mounted_claims(spec, claim_name)
    bodies = {name: await get(CLAIM, namespace, name) for name in names}
    claims = {name: storage.claim(body) for name, body in bodies.items() if body is not None}
    volumes = {}
    for claim in claims.values():
        body = await get(VOLUME, None, claim.volume) if claim.volume else None
        if body is not None and (nodes := storage.volume(body)) is not None:
            volumes[claim.volume] = nodes
    classes = []
    if len(claims) < len(names) or any(claim.phase != "Bound" for claim in claims.values()):
        try:
            classes = [storage.storage_class(body) for body in await api.find(STORAGE_CLASS, None)]
        except ApiError as error:
            if not error.forbidden:
                raise
    return volume_limits(spec, claim_name, claims, classes, volumes)


def _is_of(metadata: Mapping[str, Any], namespace: str, job: str) -> bool:
    """Return True if the pod with this metadata is one of a job."""
    return metadata.get("namespace") == namespace and (metadata.get("labels") or {}).get(JOB_LABEL) == job


async def refusals(api: Any, jobs: Sequence[tuple[Job, str]]) -> list[str]:
    """Return a line for the user for each job of the cluster that must not be changed to the job in its manifest.

    ``jobs``: the jobs of manifests, each with its namespace.
    """
    found = [(job.name, await update_check.refusal(api, job.manifest, namespace)) for job, namespace in jobs]
    return [f"{name}: {problem}" for name, problem in found if problem]


def defaults_of(state: ClusterState, namespace: str) -> tuple[JobDefaults, NodeTemplates]:
    """Return the administrator's defaults for jobs of a namespace, and the nodes that an autoscaler can add.

    Both come from the settings of the operators that manage the namespace. Return ``NO_DEFAULTS`` and ``NO_TEMPLATES``
    if there are none.
    """
    if not state.operators:
        return NO_DEFAULTS, NO_TEMPLATES
    return (
        operator_pods.of_namespace(state.operators, namespace),
        operator_pods.templates_of_namespace(state.operators, namespace),
    )


def planned(
    job: Job,
    state: ClusterState,
    defaults: JobDefaults = NO_DEFAULTS,
    templates: NodeTemplates = NO_TEMPLATES,
    namespace: str = "",
) -> tuple[Recommendation, list[tuple[int, Choice]]]:
    """Return the plan of a job that would be planned now, and its scaling curve: (number of nodes, best plan for it).

    ``namespace``: that of the job, to find its volumes in ``state``. Raise BadInputError for a job that cannot be
    planned.
    """
    try:
        volumes = state.volumes.get((namespace, job.name), ())
        now = datetime.now(UTC)
        found = recommend(job, state.view, state.constants, defaults, templates, time.time() % DAY_S, volumes, now)
    except ValueError as error:
        raise BadInputError(f"{job.name}: {error}") from None
    curve = scaling(found.request, found.view, state.constants) if isinstance(found.answer, Decision) else []
    return found, curve


def document(found: Recommendation, points: Sequence[tuple[int, Choice]]) -> dict[str, Any]:
    """Return a plan and its scaling curve as the JSON object that ``dljob plan --json`` prints."""
    return found.document() | {"scaling": curve(points)}


def curve(points: Sequence[tuple[int, Choice]]) -> list[dict[str, float]]:
    """Return the scaling curve (predictions by number of nodes) as the list for the key ``scaling`` of the JSON output.

    ``points``: (number of nodes, best plan for this number). Each item has the number of nodes and of ranks, the
    predicted step time and its 90th percentile in seconds, the samples per second, and the efficiency as a fraction of
    1.
    """
    return [
        {
            "nodes": nodes,
            "ranks": sum(len(group.shares) for group in choice.groups),
            "stepSeconds": figures(choice.prediction.step_s),
            "stepSecondsP90": figures(choice.prediction.step_p90_s),
            "samplesPerSecond": figures(choice.prediction.samples_per_s),
            "efficiency": figures(choice.prediction.efficiency),
        }
        for nodes, choice in points
    ]
