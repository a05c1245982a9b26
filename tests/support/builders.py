"""Small jobs, clusters and observations for unit tests, and the effect of applying a Desired.

The real planner, contract and renderer make the objects.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from dlcontract import Report, RunPhase
from dljob.cluster import ClusterView, cluster_view
from dljob.job.observed import SPEC_ANNOTATION, ClaimSeen, ClassSeen, JobSeen, Observed, PodSeen, SetSeen
from dljob.job.plan.stored import OPERATOR_KEY, StoredPlan
from dljob.reconcile import Desired
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import decide
from dljob.render import RenderConfig, checkpoint_claim, stateful_sets, support
from dljob.render.config import Manifest

Json = dict[str, Any]
A100, T4 = "NVIDIA-A100-SXM4-40GB", "Tesla-T4"
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
CREATED = datetime(2026, 3, 1, 11, 59, 58, tzinfo=UTC)
UID = "6f1c2f36-0a4e-4b0a-9d5c-1f2e3d4c5b6a"
CONFIG = RenderConfig(trainer_image="registry.example/dljob-trainer:0.1.0")
DIGITS: Json = {
    "model": {"name": "digits-cnn"},
    "dataset": {"name": "digits"},
    "globalBatchSize": 96,
    "epochs": 5,
    "nodes": {"min": 3, "max": 3},
    "collective": "Ring",
}


def nodes(*entries: Json) -> ClusterView:
    return cluster_view({"nodes": list(entries)})


CPUS = nodes({"name": "n", "count": 3, "cpu": 2, "memory": "4Gi"})
MIXED = nodes(
    {"name": "a", "count": 2, "device": A100, "devices": 2, "cpu": 32, "memory": "256Gi", "bandwidth": "12.5G"},
    {"name": "t", "count": 2, "device": T4, "devices": 1, "cpu": 8, "memory": "32Gi", "bandwidth": "3.125G"},
)


def job(spec: Json | None = None, name: str = "digits", **more: Any) -> JobSeen:
    fields: Json = {"namespace": "team-a", "uid": UID, "generation": 1, "created": CREATED, **more}
    return JobSeen(name=name, spec=DIGITS if spec is None else spec, **fields)


def seen(spec: Json | None = None, view: ClusterView = CPUS, name: str = "digits", **more: Any) -> Observed:
    """Return a new job on a cluster with a default storage class."""
    return Observed(job=job(spec, name), view=view, **{"classes": (ClassSeen("shared", default=True),), **more})


def planned(observed: Observed, config: RenderConfig = CONFIG) -> StoredPlan:
    """Return the planner's plan for a job, which must be feasible."""
    decision = decide(parse_observed(observed, defaults=config.job_defaults), config)
    assert isinstance(decision, StoredPlan), decision
    return decision


def rendered(observed: Observed, config: RenderConfig = CONFIG) -> tuple[Manifest, ...]:
    """Return all objects of a new job in the order in which they are applied."""
    accepted, spec = planned(observed, config), parse_observed(observed, defaults=config.job_defaults).spec
    assert spec is not None
    claim = checkpoint_claim(observed.job, spec, accepted, observed.classes)
    return (
        *support(observed.job, spec, accepted, config),
        *([claim] if claim else []),
        *stateful_sets(observed.job, spec, accepted, config),
    )


def plan_of(observed: Observed) -> StoredPlan:
    """Return the current plan."""
    assert observed.plan is not None, "the job has no plan"
    return StoredPlan.parse(observed.plan)


def without_spec(observed: Observed) -> Observed:
    """Return the job with its plan in the form of release 0.2, which did not store the spec in it."""
    assert observed.plan is not None
    mine = json.loads(observed.plan[OPERATOR_KEY])
    assert mine.pop("spec")
    return replace(observed, plan={**observed.plan, OPERATOR_KEY: json.dumps(mine)})


def report(observed: Observed, phase: RunPhase = RunPhase.RUNNING, **changes: Any) -> str:
    """Return a report as the coordinator of the current plan writes it."""
    plan = plan_of(observed).plan
    fields: Json = {
        "uid": plan.uid, "plan_number": plan.number, "plan_digest": plan.digest(), "term": plan.term,
        "unix_s": NOW.timestamp(), "step": 10, "steps": 75, "step_s": 0.5, "world_size": len(plan.ranks), **changes,
    }  # fmt: skip
    return Report(phase=phase, **fields).to_json()


def changed(observed: Observed, **changes: Any) -> Observed:
    """Return the job after the user edited its spec, with the next generation."""
    job = observed.job
    return replace(observed, job=replace(job, spec={**job.spec, **changes}, generation=job.generation + 1))


def after(observed: Observed, desired: Desired) -> Observed:
    """Return the observation after the desired state was applied, before any controller reacts."""
    sets = {item.name: item for item in observed.sets}
    claims, plan = dict(observed.claims), observed.plan
    for manifest in desired.objects:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "StatefulSet":
            sets[name] = _set(manifest)
        elif kind == "PersistentVolumeClaim":
            claims[name] = ClaimSeen(name, "Bound", tuple(manifest["spec"]["accessModes"]))
        elif kind == "ConfigMap" and "data" in manifest:
            plan = manifest["data"]
    for scale in desired.scales:
        sets[scale.name] = replace(sets[scale.name], replicas=scale.replicas)
    deleted = {(target.kind, target.name) for target in desired.deletes}
    status: Mapping[str, Any] = desired.status.manifest() if desired.status is not None else observed.job.status
    return replace(
        observed,
        job=replace(observed.job, status=status),
        sets=tuple(item for item in sets.values() if ("StatefulSet", item.name) not in deleted),
        pods=tuple(pod for pod in observed.pods if ("Pod", pod.name) not in deleted),
        claims=claims,
        plan=plan,
    )


def _set(manifest: Manifest) -> SetSeen:
    meta, spec = manifest["metadata"], manifest["spec"]
    group, revision = meta["labels"]["dljob.dev/group"], meta["annotations"][SPEC_ANNOTATION]
    return SetSeen(meta["name"], group, spec["replicas"], revision, uid=f"uid-{meta['name']}")


def settled(observed: Observed, *, ready: bool = True) -> Observed:
    """Return the observation after controllers, scheduler and kubelets have created the pods of each set."""
    pods = [
        PodSeen(f"{item.name}-{i}", f"uid-{item.name}-{i}", item.group, node=f"{item.name}-node-{i}", ready=ready)
        for item in observed.sets
        for i in range(item.replicas)
    ]
    return replace(observed, pods=tuple(pods))
