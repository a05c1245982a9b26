"""Tests of what runs of scripts show about memory: from the report to the profile, and to the plan of the next job."""

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlcontract import Failure, PodMemory, Report, RunPhase
from dljob.api import DLProfileStatus
from dljob.api.profiles.script import MeasuredMemory as Stored
from dljob.calibrate.learned import Learned, LearnedPoint
from dljob.calibrate.memory import MemoryPoint, Split
from dljob.job.identity import profile_name
from dljob.job.observed import Observed
from dljob.job.observed_structure import with_memory
from dljob.job.plan.stored import StoredPlan
from dljob.job.profiles import MANAGED_LABEL, MANAGER, MAX_PROFILES, expired, learned, learned_by_model, updated_profile
from dljob.kube import Cache, Kube
from dljob.kueue import Within
from dljob.reconcile import RunMemory, parse_observed
from dljob.reconcile.planning import make_plan
from support.builders import CONFIG, NOW, Json, after, nodes, plan_of, planned, report, seen, settled
from support.job_lifecycle import condition_of, done, started, step, training
from support.servers.fake_api import FakeApi

MIB = 2**20
SCRIPT: Json = {
    "trainer": {"command": ["torchrun", "train.py"], "framework": "Torchrun", "image": "registry.example/mine:1"},
    "nodes": {"min": 2},
}
DESCRIBED: Json = {
    "model": {"hints": {"parameters": 1000, "flopsPerSample": 1000.0}},
    "trainer": {"command": ["python", "train.py"]},
    "globalBatchSize": 64, "steps": 100, "nodes": {"min": 2, "max": 2}, "dataset": {"name": "digits"},
}  # fmt: skip
LARGE = nodes({"name": "n", "count": 3, "cpu": 2, "memory": "64Gi"})
KILLED = Failure(reason="OutOfMemory", message="rank 1 was killed", rank=1, host="digits-cpu-1", exit_code=137)


def begun(spec: Json) -> Observed:
    """Return a job that trains on large nodes."""
    observed = started(spec, view=LARGE)
    observed = replace(observed, report=report(observed))
    return after(observed, step(observed))


def used(mib: float, pod: str = "digits-cpu-1") -> PodMemory:
    return PodMemory(pod=pod, ranks=1, peak_nbytes=int(mib * MIB))


def complete(spec: Json, mib: float) -> RunMemory:
    found = step(done(RunPhase.SUCCEEDED, spec, pod_memory=used(mib))).memory
    assert found is not None
    return found


def store(*found: RunMemory) -> dict[tuple[str, str], Learned]:
    """Write to profiles as the operator does, and return what plans of the namespace then know."""
    api, cache = FakeApi(), Cache(now=lambda: NOW)
    kube: Any = api

    async def write() -> None:
        for each in found:
            await Kube(kube, cache, 600.0).update_memory(each, NOW)

    asyncio.run(write())
    profiles = [body for (kind, _, _), body in api.objects.items() if kind == "dlprofiles"]
    assert learned_by_model(profiles, "team-b") == {}, "what a script shows about itself is its owner's"
    return learned_by_model(profiles, "team-a")


@pytest.mark.parametrize(("spec", "batch"), [(SCRIPT, None), (DESCRIBED, 32)])
def test_next_job_of_the_same_script_requests_what_the_first_needed(spec: Json, batch: int | None) -> None:
    first = planned(seen(spec, view=LARGE)).memory_nbytes
    observed = begun({**spec, "resources": {"memory": "20Gi"}})
    found = step(replace(observed, report=report(observed, RunPhase.SUCCEEDED, pod_memory=used(10_000)))).memory
    assert found is not None and (found.device, found.namespace) == ("cpu", "team-a")
    assert found.point == MemoryPoint(1, batch, "Data", 10_000 * MIB, 20 * 2**30)
    known = store(found)
    plan = planned(seen(spec, view=LARGE, learned=known))
    assert first < 10_000 * MIB < plan.memory_nbytes == found.point.needed_nbytes < 20 * 2**30
    assert plan.status.memory == "measured in an earlier run: a pod needed 9.77 GiB"
    text = condition_of(step(seen(spec, view=LARGE, learned=known)), "Planned").message
    assert "11.3 GiB of memory per pod, measured in an earlier run: a pod needed 9.77 GiB" in text
    other = {**spec, "trainer": {**spec["trainer"], "args": ["--width=2"]}}
    assert planned(seen(other, view=LARGE, learned=known)).memory_nbytes == first, "another script"


def test_memory_is_known_after_any_end_and_while_a_run_comes_close_to_its_limit() -> None:
    running = training(SCRIPT)
    limit = plan_of(running).memory_nbytes
    assert step(running).memory is None, "an agent of an earlier release does not measure it"
    observed = replace(running, report=report(running, pod_memory=used(0.5 * limit / MIB)))
    assert step(observed).memory is None, "the next job begins with enough"
    close = used(0.95 * limit / MIB)
    found = step(replace(running, report=report(running, pod_memory=close))).memory
    assert found is not None and found.point == MemoryPoint(1, None, "Data", close.peak_nbytes)
    failure = Failure(reason="ProgramFailed", message="it failed")
    failed = step(done(RunPhase.FAILED, SCRIPT, pod_memory=close, failure=failure)).memory
    assert failed == found, "a failure for another reason says nothing about the limit"
    assert complete(SCRIPT, 100).point.sufficient_nbytes == plan_of(running).memory_nbytes


def test_memory_that_kueue_has_admitted_does_not_change() -> None:
    def measured(mib: int) -> dict[tuple[str, str], Learned]:
        point = MemoryPoint(1, peak_nbytes=mib * MIB)
        return {(key, device): Learned(memory=(point,)) for key, device in store(complete(SCRIPT, 50))}

    before = parse_observed(seen(SCRIPT, view=LARGE, learned=measured(8000)))
    accepted = make_plan.decide(before, CONFIG)
    assert isinstance(accepted, StoredPlan) and accepted.status.memory is not None
    larger = replace(before.observed, learned=measured(16_000))
    fewer = replace(before, observed=larger, accepted=accepted, within=Within((("cpu", 1, 1),)))
    found = make_plan.decide(fewer, CONFIG)
    assert isinstance(found, StoredPlan) and found.nodes == 1 and found.memory_nbytes == accepted.memory_nbytes


def test_built_in_models_are_predicted_instead() -> None:
    assert step(done(RunPhase.SUCCEEDED, pod_memory=used(100))).memory is None


SPLIT: Json = {
    "model": {"hints": {"parameters": 100_000_000, "flopsPerSample": 6e8}},
    "trainer": {"command": ["python", "train.py"]},
    "parallelism": {"strategy": "Pipeline", "stages": 2, "microBatches": 4},
    "globalBatchSize": 64, "steps": 100, "nodes": {"min": 2, "max": 2}, "dataset": {"name": "digits"},
}  # fmt: skip


def test_next_job_with_the_same_split_requests_what_the_first_needed() -> None:
    """Regression: what pods of a split model needed was not stored."""
    first = planned(seen(SPLIT, view=LARGE)).memory_nbytes
    seen_memory = PodMemory(pod="digits-cpu-1", ranks=1, peak_nbytes=900 * MIB, parts=(600 * MIB, 800 * MIB))
    found = step(done(RunPhase.SUCCEEDED, SPLIT, pod_memory=seen_memory)).memory
    split = Split(parts=2, replicas=1, micro_batches=4, checkpoints=True)
    assert found is not None
    assert found.point == MemoryPoint(
        1, 16, "Pipeline", 900 * MIB, first, split=split, parts_nbytes=(600 * MIB, 800 * MIB)
    )
    known = store(found)
    [stored] = [each.memory for each in known.values() if each.memory]
    assert stored == (found.point,)
    plan = planned(seen(SPLIT, view=LARGE, learned=known))
    assert plan.memory_nbytes == found.point.needed_nbytes < first
    assert plan.status.memory == "measured in an earlier run: a pod needed 900 MiB"
    more = {**SPLIT, "parallelism": {**SPLIT["parallelism"], "microBatches": 8}}
    assert planned(seen(more, view=LARGE, learned=known)).memory_nbytes == planned(seen(more, view=LARGE)).memory_nbytes


@pytest.mark.parametrize("parts", [(), (0, 5), (5,), (5, 5, 5), (5, 2**50)])
def test_incomplete_or_absurd_memory_of_parts_is_not_used(parts: tuple[int, ...]) -> None:
    seen_memory = PodMemory(pod="digits-cpu-1", ranks=1, peak_nbytes=900 * MIB, parts=parts)
    found = step(done(RunPhase.SUCCEEDED, SPLIT, pod_memory=seen_memory)).memory
    assert found is not None and (found.point.peak_nbytes, found.point.parts_nbytes) == (900 * MIB, ())


def test_absurd_memory_is_not_used() -> None:
    """The script can write to the agent's files. It cannot use more than the limit of its pod."""
    limit = plan_of(training(SCRIPT)).memory_nbytes / MIB
    for absurd in (used(limit + 2), used(2**30), used(100, pod="another-cpu-0")):
        assert step(done(RunPhase.SUCCEEDED, SCRIPT, pod_memory=absurd)).memory is None
    assert complete(SCRIPT, limit).point.peak_nbytes == int(limit * MIB)
    with pytest.raises(ValueError, match="peak_nbytes"):
        Report.parse(report(training(SCRIPT)).replace('"pod_memory":null', '"pod_memory":{"pod":"a","ranks":1,"peak_nbytes":1e40}'))  # fmt: skip


def test_other_releases_understand_the_report() -> None:
    observed = training(SCRIPT)
    document = json.loads(report(observed, pod_memory=used(5)))
    document["pod_memory"]["colour"] = "red"
    assert Report.parse(json.dumps(document)).pod_memory == used(5)
    del document["pod_memory"]
    assert Report.parse(json.dumps(document)).pod_memory is None


def out_of_memory(spec: Json, times: int) -> Observed:
    """Return the job after the kernel ended ranks at their limit, at last for good."""
    observed = begun({**spec, "runPolicy": {"backoffLimit": times - 1}})
    counts = {"failures": times, "restarts": {"OutOfMemory": times}, "failure": KILLED}
    return replace(observed, report=report(observed, RunPhase.FAILED, **counts))


@pytest.mark.parametrize("spec", [SCRIPT, DESCRIBED])
def test_after_a_job_failed_for_memory_the_next_one_begins_with_more(spec: Json) -> None:
    observed = out_of_memory(spec, 1)
    limit = plan_of(observed).memory_nbytes
    found = step(observed).memory
    assert found is not None and found.point.insufficient_nbytes == limit and found.point.sufficient_nbytes is None
    plan = planned(seen(spec, view=LARGE, learned=store(found)))
    assert plan.memory_nbytes == 2 * limit and plan.status.memory is not None and "too little" in plan.status.memory
    fixed = planned(seen({**spec, "resources": {"memory": "1Gi"}}, view=LARGE, learned=store(found)))
    assert fixed.status.memory is None, "the spec sets it"


@pytest.mark.parametrize("limit", [0, 2])
def test_the_end_of_a_rank_that_makes_the_job_fail_is_remembered(limit: int) -> None:
    """Regression: no restart follows the last end, so that the report counts one restart less, and it was missed."""
    observed = begun({**SCRIPT, "runPolicy": {"backoffLimit": limit}})
    present, restarts = plan_of(observed).memory_nbytes, {"OutOfMemory": limit} if limit else {}
    if limit:
        counts = {"failures": limit, "restarts": restarts, "failure": KILLED}
        observed = replace(observed, report=report(observed, RunPhase.RESTARTING, **counts))
        observed = after(observed, step(observed))
        observed = replace(after(observed, step(observed)), pods=())
        observed = settled(after(observed, step(observed)))
        present *= 2
    assert plan_of(observed).memory_nbytes == present
    counts = {"failures": limit + 1, "restarts": restarts, "failure": KILLED}
    found = step(replace(observed, report=report(observed, RunPhase.FAILED, **counts))).memory
    assert found is not None and found.point.insufficient_nbytes == present


def test_next_job_begins_with_the_memory_to_which_the_first_was_raised() -> None:
    """Also if the agent measures no memory."""
    observed = begun({**SCRIPT, "runPolicy": {"backoffLimit": 5}})
    limit = plan_of(observed).memory_nbytes
    counts = {"failures": 1, "restarts": {"OutOfMemory": 1}, "failure": KILLED}
    observed = replace(observed, report=report(observed, RunPhase.RESTARTING, **counts))
    observed = after(observed, step(observed))  # The end of the rank is counted,
    observed = after(observed, step(observed))  # the pods stop,
    observed = replace(observed, pods=())
    observed = settled(after(observed, step(observed)))  # and others start.
    assert plan_of(observed).memory_nbytes == 2 * limit
    for small in ({}, {"pod_memory": used(3)}, {"pod_memory": used(limit // MIB)}):  # Samples can miss a peak.
        found = step(replace(observed, report=report(observed, RunPhase.SUCCEEDED, **counts, **small))).memory
        assert found is not None and found.point == MemoryPoint(1, None, "Data", 2 * limit, 2 * limit)
        assert planned(seen(SCRIPT, view=LARGE, learned=store(found))).memory_nbytes == 2 * limit
        running = step(replace(observed, report=report(observed, **counts, **small))).memory
        assert running is not None and running.point == MemoryPoint(1, None, "Data", None, None, limit)
        assert planned(seen(SCRIPT, view=LARGE, learned=store(running))).memory_nbytes == 2 * limit
    message = condition_of(step(replace(observed, report=report(observed, **counts))), "MemoryExceeded").message
    assert "each pod requests 8.5 GiB" in message and "The next job of this script" in message
    large = used(1.5 * limit / MIB)
    found = step(replace(observed, report=report(observed, RunPhase.SUCCEEDED, **counts, pod_memory=large))).memory
    assert found is not None and found.point == MemoryPoint(1, None, "Data", large.peak_nbytes, 2 * limit)
    plan = planned(seen(SCRIPT, view=LARGE, learned=store(found)))
    assert plan.memory_nbytes == found.point.needed_nbytes < 2 * limit


def test_memory_survives_other_measurements_and_the_way_through_the_api() -> None:
    point = MemoryPoint(2, 32, "Data", 5 * MIB, 7 * MIB, None)
    status = with_memory(DLProfileStatus(), point, NOW)
    assert status.updated == NOW and status.memory == (
        Stored(ranks=2, batch=32, peak_bytes=5 * MIB, sufficient_bytes=7 * MIB),
    )
    assert learned(DLProfileStatus.model_validate(status.manifest())).memory == (point,)
    assert with_memory(status, point, NOW + timedelta(days=1)) is status, "nothing has changed"
    run = Report.parse(report(training(), ranks=({"rank": 0, "device": "cpu", "share": 32, "compute_s": 0.1},)))
    later = updated_profile(status, "program-1", "cpu", run, NOW)
    assert later.compute and later.memory == status.memory


def test_memory_is_added_to_the_shared_measurements_of_a_script() -> None:
    """With shared profiles, step times of scripts are everybody's, but their memory is not."""
    shared: Json = {
        "spec": {"model": "program-1", "device": "cpu"},
        "status": {"compute": [{"batch": 8, "seconds": 0.5}]},
    }
    own: Json = {
        "spec": {"model": "program-1", "device": "cpu", "namespace": "team-a"},
        "status": {"memory": [{"ranks": 1, "peakBytes": 500}]},
    }
    [found] = learned_by_model([own, shared], "team-a").values()
    assert found.points == (LearnedPoint(8, 0.5),) and found.memory == (MemoryPoint(1, peak_nbytes=500),)
    [other] = learned_by_model([own, shared], "team-b").values()
    assert other.points and not other.memory
    own["status"]["compute"] = [{"batch": 8, "seconds": 0.7}]
    [found] = learned_by_model([own, shared], "team-a").values()
    assert found.points == (LearnedPoint(8, 0.7),), "its own measurements take precedence"


def test_profiles_with_memory_alone_displace_no_measurements() -> None:
    def profile(number: int, **status: Any) -> Json:
        meta = {"name": f"p{number}", "labels": {MANAGED_LABEL: MANAGER}, "creationTimestamp": NOW.isoformat()}
        return {"metadata": meta, "spec": {"namespace": "team-a"}, "status": {"updated": (NOW - number * timedelta(1e-3)).isoformat()} | status}  # fmt: skip

    scripts = [profile(n, memory=[{"ranks": 1, "peakBytes": 5}]) for n in range(MAX_PROFILES + 3)]
    compute, step = (
        [{"batch": 8, "seconds": 0.5}],
        {"strategy": "Sharded", "nodes": 2, "nodeDevices": 1, "batch": 8, "seconds": 1},
    )
    memory = [{"ranks": 1, "peakBytes": 5}]
    measured = [profile(10**4, compute=compute), profile(10**4 + 1, memory=memory, splitSteps=[step])]
    assert set(expired([*scripts, *measured], NOW)) == {f"p{MAX_PROFILES + n}" for n in range(3)}


def test_profile_has_the_key_of_the_script() -> None:
    api, cache = FakeApi(), Cache(now=lambda: NOW)
    kube: Any = api
    found = complete(SCRIPT, 50)
    spec = parse_observed(seen(SCRIPT)).spec
    assert spec is not None
    asyncio.run(Kube(kube, cache, 600.0).update_memory(found, NOW))
    stored = api.objects["dlprofiles", "", profile_name(found.model, "cpu", "team-a")]
    assert stored["spec"] == {"model": found.model, "device": "cpu", "namespace": "team-a"}
