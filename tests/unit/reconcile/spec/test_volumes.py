"""Tests of jobs with volumes that only some nodes can mount: which claims count, their plans, pods and conditions."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from dljob.api import DLJobSpec
from dljob.cluster.node_selector import NodeSelector
from dljob.cluster.templates import NodeTemplates, parse_templates
from dljob.job.observed import ClaimSeen, ClassSeen, Observed
from dljob.planner import Infeasible
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import decide, question
from dljob.reconcile.spec.volumes import mounted_claims, volume_limits
from support.builders import CONFIG, DIGITS, Json, after, changed, nodes, plan_of, planned, report, seen, settled
from support.job_lifecycle import condition_of, kinds, step, verdict

ZONE = "topology.kubernetes.io/zone"
TWO_ZONES = nodes(
    {"name": "a", "count": 2, "cpu": 2, "memory": "4Gi", "zone": "a"},
    {"name": "b", "count": 3, "cpu": 2, "memory": "4Gi", "zone": "b"},
)
OWN = "digits-checkpoints"
ELASTIC: Json = {**DIGITS, "nodes": {"min": 1, "max": 5}, "checkpoint": {"enabled": False}}
DATA: Json = {
    **ELASTIC, "model": {"name": "digits-cnn"}, "globalBatchSize": 96,
    "dataset": {"uri": "pvc://data/train.npz", "samples": 1000, "sampleBytes": 256},
}  # fmt: skip


def zone(*names: str) -> NodeSelector:
    return NodeSelector.parse_topologies([{"matchLabelExpressions": [{"key": ZONE, "values": list(names)}]}])


def bound(name: str, volume: str, mode: str = "ReadWriteMany") -> ClaimSeen:
    return ClaimSeen(name, "Bound", (mode,), volume=volume)


def with_volume(spec: Json = DATA, claim: str = "data", zones: str = "a", **more: Any) -> Observed:
    return seen(spec, TWO_ZONES, claims={claim: bound(claim, "pv")}, volumes={"pv": zone(zones)}, **more)


CLAIMS: dict[str, tuple[Json, dict[str, str]]] = {
    "the claim that dljob makes": ({"checkpoint": {}}, {OWN: "spec.checkpoint.volume"}),
    "a claim for checkpoints": (
        {"checkpoint": {"volume": {"claimName": "mine"}}}, {"mine": "spec.checkpoint.volume.claimName"},
    ),
    "checkpoints in a store": ({"checkpoint": {"uri": "s3://bucket/x"}}, {}),
    "no checkpoints": ({}, {}),
    "data": ({"dataset": DATA["dataset"]}, {"data": "spec.dataset.uri"}),
    "a cache of data": (
        {"dataset": {"uri": "https://x.example/a.npz", "samples": 9, "cacheClaimName": "cache"}},
        {"cache": "spec.dataset.cacheClaimName"},
    ),
    "a script": (
        {
            "trainer": {
                "source": {"archive": {"uri": "pvc://scripts/train.tar"}},
                "command": ["python", "train.py"], "framework": "Torchrun",
            },
            "collective": "Auto",
        },
        {"scripts": "spec.trainer.source.archive.uri"},
    ),
    "an override": (
        {
            "podTemplateOverrides": [
                {"manager": "me", "spec": {"priority": 1}},
                {
                    "manager": "you",
                    "spec": {
                        "volumes": [
                            {"name": "more", "persistentVolumeClaim": {"claimName": "more"}},
                            {"name": "none", "emptyDir": {}},
                        ]
                    },
                },
            ]
        },
        {"more": "spec.podTemplateOverrides[1].spec.volumes"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), CLAIMS.values(), ids=CLAIMS.keys())
def test_claims_that_all_pods_mount(change: Json, expected: dict[str, str]) -> None:
    spec = DLJobSpec.model_validate({**ELASTIC, **change})
    assert mounted_claims(spec, OWN) == expected


@pytest.mark.parametrize(
    "volumes", [None, {}, "x", ["x"], [{"persistentVolumeClaim": None}], [{"persistentVolumeClaim": {}}]]
)
def test_overrides_may_contain_anything(volumes: Any) -> None:
    override = {"manager": "me", "spec": {"volumes": volumes}}
    spec = DLJobSpec.model_validate({**ELASTIC, "podTemplateOverrides": [override]})
    assert mounted_claims(spec, OWN) == {}


ZONAL, PLAIN = ClassSeen("zonal", default=True, topologies=zone("a", "b")), ClassSeen("plain")
LIMITS: dict[str, tuple[Json, dict[str, ClaimSeen], tuple[ClassSeen, ...] | None, list[tuple[str, str]]]] = {
    "a bound claim": (DATA, {"data": bound("data", "pv")}, None, [("spec.dataset.uri", "volume 'pv'")]),
    "a volume that all nodes can mount": (DATA, {"data": bound("data", "nfs")}, None, []),
    "a claim that does not exist": (DATA, {}, (ZONAL,), []),
    "a lost claim": (DATA, {"data": ClaimSeen("data", "Lost", (), "zonal", volume="pv")}, (ZONAL,), []),
    "a claim that is not bound": (
        DATA, {"data": ClaimSeen("data", "Pending", (), "zonal")}, (ZONAL, PLAIN),
        [("spec.dataset.uri", "StorageClass 'zonal'")],
    ),
    "a claim that is not bound, and asks for a volume of others": (
        DATA, {"data": ClaimSeen("data", "Pending", (), "plain", volume="pv")}, (ZONAL, PLAIN), [],
    ),
    "a claim without a class": (DATA, {"data": ClaimSeen("data", "Pending", (), "")}, (ZONAL,), []),
    "a claim of a class without topologies": (DATA, {"data": ClaimSeen("data", "Pending", (), "plain")}, (PLAIN,), []),
    "classes that may not be read": (DATA, {"data": ClaimSeen("data", "Pending", (), "zonal")}, None, []),
    "the claim to make, in the default class": (
        {**ELASTIC, "checkpoint": {}}, {}, (ZONAL, PLAIN), [("spec.checkpoint.volume", "StorageClass 'zonal'")],
    ),
    "the claim to make, in another class": (
        {**ELASTIC, "checkpoint": {"volume": {"storageClassName": "plain"}}}, {}, (ZONAL, PLAIN), [],
    ),
    "the claim that dljob has made": (
        {**ELASTIC, "checkpoint": {}}, {OWN: bound(OWN, "pv")}, (PLAIN,), [("spec.checkpoint.volume", "volume 'pv'")],
    ),
    "two default classes": ({**ELASTIC, "checkpoint": {}}, {}, (ZONAL, replace(PLAIN, default=True)), []),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "claims", "classes", "expected"), LIMITS.values(), ids=LIMITS.keys())
def test_limits(
    spec: Json, claims: dict[str, ClaimSeen], classes: tuple[ClassSeen, ...] | None, expected: list[tuple[str, str]]
) -> None:
    found = volume_limits(DLJobSpec.model_validate(spec), OWN, claims, classes, {"pv": zone("a")})
    assert [(each.field, each.source) for each in found] == expected


def test_plan_uses_only_nodes_that_can_mount_the_data() -> None:
    """Fixed bug: pods on nodes of other zones stayed pending, and the job was planned again in the same way."""
    spec = {**DATA, "nodes": {"min": 2, "max": 5}}
    found = planned(with_volume(spec))
    assert found.nodes == 2
    assert planned(seen(spec, TWO_ZONES, claims={"data": bound("data", "pv")})).nodes == 5, "an unlimited volume"


def test_pods_may_run_only_where_the_plan_counted_nodes() -> None:
    observed = with_volume()
    [found] = [item for item in step(observed).objects if item["kind"] == "StatefulSet"]
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = found["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][key]["nodeSelectorTerms"]
    wanted = {"key": ZONE, "operator": "In", "values": ["a"]}
    assert all(term["matchExpressions"].count(wanted) == 1 for term in terms)
    in_a, *_, in_b = TWO_ZONES.nodes
    domain = plan_of(after(observed, step(observed))).node_domain
    assert domain.has(in_a) and not domain.has(in_b), "its reservation counts nodes of zone a"


def test_pods_stay_as_they_were_if_all_nodes_can_mount_the_volume() -> None:
    found = planned(seen(DATA, TWO_ZONES, claims={"data": bound("data", "pv")}, volumes={"pv": zone("a", "b")}))
    assert found.domain is None


def test_pods_stay_as_they_were_if_a_volume_needs_what_a_plan_cannot_say() -> None:
    by_name = NodeSelector.parse(
        {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a-0"]}]}]}
    )
    found = planned(seen(DATA, TWO_ZONES, claims={"data": bound("data", "pv")}, volumes={"pv": by_name}))
    assert found.nodes == 1 and found.domain is None


def test_condition_names_field_claim_volume_affinity_and_remedy() -> None:
    desired = step(with_volume({**DATA, "nodes": {"min": 3, "max": 5}}))
    assert verdict(desired, "Planned") == ("False", "VolumeNodeConflict") and kinds(desired) == []
    message = condition_of(desired, "Planned").message
    assert message.startswith("spec.dataset.uri: found volume 'pv' of claim 'data'")
    assert all(text in message for text in (f"{ZONE} in (a)", "expected at least 3", "lower spec.nodes.min")), message


def test_job_that_stopped_starts_again_where_its_checkpoints_are() -> None:
    """The claim that the operator makes for checkpoints gets its volume where the first pod runs."""
    spec = {**ELASTIC, "checkpoint": {}, "nodes": {"min": 1, "max": 1}}
    first = seen(spec, TWO_ZONES)
    assert parse_observed(first).volumes == ()
    stopped = replace(first, claims={OWN: bound(OWN, "pv", "ReadWriteOnce")}, volumes={"pv": zone("b")})
    found = planned(stopped)
    assert found.domain is not None and found.node_domain.has(TWO_ZONES.nodes[-1])
    assert not found.node_domain.has(TWO_ZONES.nodes[0])


def test_running_pods_run_on_after_their_claim_has_got_its_volume() -> None:
    """A change of the spec with the same plan must not restart them, although new pods would be bound to the zone."""
    spec = {**ELASTIC, "checkpoint": {}, "nodes": {"min": 1, "max": 1}}
    first = seen(spec, TWO_ZONES)
    started = settled(after(first, step(first)))
    running = after(started, step(replace(started, report=report(started))))
    running = replace(running, report=report(running))
    placed = replace(running, claims={OWN: bound(OWN, "pv")}, volumes={"pv": zone("b")})
    observed = changed(placed, objective={"minimize": "Energy"})
    assert planned(observed).domain is not None and plan_of(running).domain is None
    desired = step(observed)
    assert (desired.scales, desired.deletes) == ((), ()) and verdict(desired, "Running")[0] == "True"
    assert plan_of(after(observed, desired)).domain is None
    elsewhere = changed(placed, scheduling={"nodeSelector": {ZONE: "b"}})
    assert step(elsewhere).scales != (), "another change that concerns the nodes restarts them"


def test_jobs_with_equal_specs_and_other_volumes_are_other_questions() -> None:
    one, other = (question(parse_observed(with_volume(zones=name))) for name in ("a", "b"))
    assert one.volumes != other.volumes and one != other
    assert one.observed.volumes == {} == one.observed.claims, "what others mount does not matter"
    assert pickle.loads(pickle.dumps(one)) == one, "another process plans"


TEMPLATES: dict[str, tuple[Json, str | None]] = {
    "in the zone of the volume": ({"zone": "a"}, "Planned"),
    "in another zone": ({"zone": "b"}, None),
    "in an unknown zone": ({}, "Planned"),
}


@pytest.mark.parametrize(("labels", "reason"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_nodes_that_an_autoscaler_can_add(labels: Json, reason: str | None) -> None:
    """A template need not name the zone of its nodes. The autoscaler then chooses one in which the volume is."""
    new = parse_templates(json.dumps([{"cpu": 4, "memory": "8Gi", "count": 8, **labels}]))
    config = replace(CONFIG, node_templates=NodeTemplates(new))
    found = decide(parse_observed(with_volume({**DATA, "nodes": {"min": 3, "max": 5}})), config)
    if reason is None:
        assert isinstance(found, Infeasible) and found.reason == "VolumeNodeConflict"
    else:
        assert not isinstance(found, Infeasible) and (found.new_nodes or 0) >= 1
        assert found.domain is None, "a new node may get its labels late"
