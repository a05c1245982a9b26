"""Tests of jobs whose checkpoint claim only one node can use: they grow on one node, and say why not to several."""

from dataclasses import replace

import pytest

from dljob.cluster import ClusterView
from dljob.job.identity import profile_key
from dljob.job.observed import ClaimSeen, Observed
from dljob.planner import Learned, LearnedPoint
from dljob.reconcile import needs_view
from dljob.reconcile.parsed import parse_observed
from support.builders import DIGITS, NOW, T4, Json, after, changed, nodes, plan_of, report, seen, settled
from support.job_lifecycle import condition_of, gone, kinds, step, verdict

ELASTIC: Json = {**{k: v for k, v in DIGITS.items() if k != "epochs"}, "steps": 100_000, "nodes": {"min": 1, "max": 3}}
WHOLE = nodes(
    {"name": "n", "count": 3, "cpu": 2, "memory": "4Gi"},
    {"name": "t", "count": 2, "device": T4, "devices": 1, "cpu": 8, "memory": "32Gi", "bandwidth": "3.125G"},
)
SMALL, CPUS = ClusterView(WHOLE.nodes[:1]), ClusterView(WHOLE.nodes[:3])
SCALES = Learned(
    (LearnedPoint(32, 0.1, 50), LearnedPoint(48, 0.15, 50), LearnedPoint(96, 0.3, 50)),
    link_latency_s=1e-5, link_bandwidth_Bps=1e9,
)  # fmt: skip
"""More CPU nodes are better."""


def trains_on_one(mode: str, spec: Json = ELASTIC) -> Observed:
    """Return a job that trains on one CPU node, all that there was. ``mode``: access mode of its checkpoint claim."""
    first = seen(spec, SMALL)
    own = parse_observed(first).spec
    assert own is not None
    first = replace(first, learned={(profile_key(own), "cpu"): SCALES})
    observed = settled(after(first, step(first)))
    assert plan_of(observed).nodes == 1
    claims = {name: replace(claim, access_modes=(mode,)) for name, claim in observed.claims.items()}
    observed = after(replace(observed, claims=claims), step(observed, 5.0))
    saved = {"step": 490, "unix_s": NOW.timestamp()}
    observed = replace(observed, report=report(observed, step=500, steps=100_000, step_s=0.3, last_checkpoint=saved))
    return after(observed, step(observed, 10.0))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("ReadWriteOnce", ("False", "NotWorthwhile")), ("ReadWriteMany", ("True", "BetterPlan"))],
)
def test_job_says_why_it_does_not_grow_to_several_nodes(mode: str, expected: tuple[str, str]) -> None:
    desired = step(replace(trains_on_one(mode), view=CPUS, capacity_grew=True), 20)
    assert verdict(desired, "Resizing") == expected and desired.scales == ()
    message = condition_of(desired, "Resizing").message
    assert ("checkpoint.volume.shared: true" in message) is (mode == "ReadWriteOnce"), message


def test_job_grows_on_one_node_although_a_plan_on_several_would_be_better_than_its_own() -> None:
    """Fixed bug: the best plan used several nodes, so that the job stayed with its plan on the slowest node."""
    spec = {**ELASTIC, "model": {"name": "resnet18"}, "dataset": {"name": "synthetic-images"}}
    desired = step(replace(trains_on_one("ReadWriteOnce", spec), view=WHOLE, capacity_grew=True), 20)
    assert verdict(desired, "Resizing") == ("True", "BetterPlan"), condition_of(desired, "Resizing").message
    assert "to 1 x tesla-t4" in condition_of(desired, "Resizing").message.lower()


def test_job_that_may_use_more_nodes_runs_on_where_its_claim_is() -> None:
    """Fixed bug: after ``kubectl scale``, the pods stopped for a plan on several nodes, which could not start."""
    running = replace(trains_on_one("ReadWriteOnce"), view=CPUS)
    scaled = changed(running, nodes={"min": 1, "max": 8})
    desired = step(scaled, 20)
    assert "ReadWriteMany" in condition_of(desired, "Planned").message
    assert (desired.scales, desired.deletes) == ((), ()) and plan_of(after(scaled, desired)).nodes == 1
    again = step(after(scaled, desired), 30)
    assert (again.scales, again.deletes) == ((), ()) and verdict(again, "VolumeReady") == ("True", "Bound")


def test_job_that_stops_for_other_requests_can_start_again() -> None:
    running = replace(trains_on_one("ReadWriteOnce"), view=CPUS)
    other = changed(running, nodes={"min": 1, "max": 8}, resources={"memory": "3Gi"})
    down = gone(after(other, step(other, 20)))
    desired = step(down, 30)
    assert "StatefulSet" in kinds(desired) and verdict(desired, "VolumeReady") == ("True", "Bound")
    assert plan_of(after(down, desired)).nodes == 1


def test_job_that_needs_several_nodes_is_told_to_use_another_claim() -> None:
    running = replace(trains_on_one("ReadWriteOnce"), view=CPUS)
    down = gone(after(scaled := changed(running, nodes={"min": 3, "max": 8}), step(scaled, 20)))
    assert verdict(step(down, 30), "VolumeReady") == ("False", "ClaimNotShared")


def test_job_that_has_stopped_continues_on_one_node() -> None:
    running = replace(trains_on_one("ReadWriteOnce"), view=CPUS)
    suspended = changed(running, suspend=True)
    down = gone(after(suspended, step(suspended, 20)))
    resumed = changed(down, suspend=False, nodes={"min": 1, "max": 8})
    assert needs_view(resumed)
    desired = step(resumed, 30)
    assert "StatefulSet" in kinds(desired) and plan_of(after(resumed, desired)).nodes == 1


@pytest.mark.parametrize(
    ("fields", "access", "several"),
    [
        ({"dataset": {"uri": "pvc://data/train", "samples": 1797}}, "ReadWriteOnce", False),
        ({"dataset": {"uri": "pvc://data/train", "samples": 1797}}, "ReadOnlyMany", True),
        (
            {"dataset": {"uri": "https://data.example/train.tar", "samples": 1797, "cacheClaimName": "data"}},
            "ReadOnlyMany", False,
        ),
        ({"trainer": {"source": {"archive": {"uri": "pvc://data/script.tar"}}}}, "ReadWriteOnce", False),
    ],
    ids=["data", "shared data", "cache", "script"],
)  # fmt: skip
def test_claim_with_data_or_files_keeps_a_job_on_one_node(fields: Json, access: str, several: bool) -> None:
    """Fixed bug: after a move was decided, a job with such a claim got a plan on several nodes, and never started."""
    script: Json = {
        "model": {"hints": {"parameters": 1e6, "flopsPerSample": 1e9}}, "trainer": {"command": ["python", "train.py"]},
        "dataset": {"uri": "file:///made/by/the/script", "samples": 1797},
    }  # fmt: skip
    shared = {"volume": {"shared": True}}
    spec = {**ELASTIC, **script, **fields, "nodes": {"min": 1, "max": 1}, "checkpoint": shared}
    spec["trainer"] = script["trainer"] | fields.get("trainer", {})
    first = seen(spec, SMALL, claims={"data": ClaimSeen("data", "Bound", (access,))})
    own = parse_observed(first).spec
    assert own is not None, parse_observed(first).refusal
    first = replace(first, learned={(profile_key(own), "cpu"): SCALES})
    running = replace(settled(after(first, step(first))), view=CPUS)
    scaled = changed(running, nodes={"min": 1, "max": 8})
    planned = step(scaled, 20)
    assert (plan_of(after(scaled, planned)).nodes == 1 and planned.scales == ()) is not several
    assert ("'data'" in condition_of(planned, "Planned").message) is not several
