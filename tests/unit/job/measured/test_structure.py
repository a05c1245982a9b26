"""Tests of the observed structure of a script on its way from the report to a DLProfile and to the next plan."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from dlcontract import CollectiveCount, Failure, HostCalls, Report, RunPhase, Structure, Work
from dljob.api import DLProfileStatus
from dljob.api.profiles.script import ObservedStructure
from dljob.job.identity import profile_key, profile_name
from dljob.job.observed_structure import planner_structure, with_structure
from dljob.job.profiles import learned, learned_by_model
from dljob.kube import Cache, Kube
from dljob.kube.kinds import PROFILE
from dljob.perf.workload.observed import Collectives
from dljob.perf.workload.structure import CALL_S
from dljob.reconcile import RunMeasurements
from dljob.reconcile.parsed import parse_observed
from support.builders import NOW, Json, planned, report, seen
from support.job_lifecycle import done, started, status, step
from support.servers.fake_api import FakeApi

SPEC: Json = {
    "trainer": {"command": ["torchrun", "train.py"], "framework": "Torchrun", "image": "registry.example/mine:1"},
    "nodes": {"min": 2},
    "resources": {"memory": "1Gi"},
}
SEEN = Structure(
    parameters=1474, samples=32, sample_nbytes=80, flops=270336.0, activation_nbytes=8448, optimizer_slots=1,
    work=(Work(kind="product", count=2, forward_flops=90112.0, moved_nbytes=49152),), steps=3, world_size=2,
)  # fmt: skip
TIMED = SEEN.model_copy(update={"steps": 640, "step_s": 0.02})


def measurements(
    structure: Structure | None, phase: RunPhase = RunPhase.SUCCEEDED, **more: Any
) -> RunMeasurements | None:
    spec = more.pop("spec", SPEC)
    if phase is RunPhase.SUCCEEDED:
        return step(done(phase, spec, structure=structure, **more)).measurements
    observed = started(spec)
    return step(replace(observed, report=report(observed, phase, structure=structure, **more))).measurements


def test_complete_run_stores_structure_time_and_steps() -> None:
    found = measurements(TIMED)
    assert found is not None and found.devices == ("cpu",) and found.structure is not None
    assert found.structure.manifest() == {
        "parameters": 1474, "frozenBytes": 0, "flopsPerSample": 8448.0, "activationBytesPerSample": 264.0,
        "sampleBytes": 80.0,
        "batch": 32, "optimizerSlots": 1, "nodes": 2, "ranksPerNode": 1, "cores": 1, "stepSeconds": 0.02, "steps": 640,
        "work": [
            {"kind": "product", "count": 2, "forwardFlopsPerSample": 2816.0, "movedBytesPerSample": 1536.0}
        ],
    }  # fmt: skip


def test_structure_is_stored_while_the_script_runs() -> None:
    for seen_so_far, step_s in ((SEEN, None), (TIMED, 0.02)):
        found = measurements(seen_so_far, RunPhase.RUNNING)
        assert found is not None and found.structure is not None
        assert (found.structure.step_seconds, found.structure.steps) == (step_s, 0), "nobody knows the number of steps"
    assert measurements(None, RunPhase.RUNNING) is None and measurements(None) is None


@pytest.mark.parametrize(
    ("change", "more", "expected"),
    [
        ({"world_size": 1}, {}, (None, 0)),
        ({}, {"restarts": {"RankFailed": 1}}, (None, 0)),
        ({"step_s": 0.0}, {}, (None, 640)),
    ],
    ids=["fewer ranks than planned", "after a restart", "no time"],
)
def test_time_of_another_place_is_not_stored(change: Json, more: Json, expected: tuple[float | None, int]) -> None:
    found = measurements(TIMED.model_copy(update=change), **more)
    assert found is not None and found.structure is not None
    assert (found.structure.step_seconds, found.structure.steps) == expected


def test_absurd_or_superfluous_structures_are_not_stored() -> None:
    assert measurements(SEEN.model_copy(update={"flops": 1e20})) is None
    assert measurements(SEEN.model_copy(update={"flops": 5e-324, "samples": 10**9})) is None, "0 for each sample"
    described = SPEC | {"model": {"hints": {"parameters": 1000, "flopsPerSample": 6000}}}
    assert measurements(TIMED, spec=described) is None, "the spec has a model"


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": 0}, {"samples": 0}, {"flops": 0}, {"flops": "Infinity"}, {"step_s": -1}, {"optimizer_slots": 7},
        {"parameters": 10**30}, {"work": [{"kind": "product", "count": 0}]}, {"work": [{"kind": "x", "count": 1}] * 9},
        {"collectives": [{"kind": "barrier", "count": 0}]}, {"collectives": [{"kind": "barrier", "count": 10**7}]},
        {"collectives": [{"kind": "x", "count": 1, "nbytes": -1}]}, {"collectives": [{"kind": "x", "count": 1}] * 17},
    ],
)  # fmt: skip
def test_report_with_an_invalid_structure_is_refused(change: Json) -> None:
    document = json.loads(report(started(SPEC), structure=SEEN))
    document["structure"].update(change)
    with pytest.raises(ValueError, match="structure"):
        Report.parse(json.dumps(document))


def test_other_releases_understand_the_report() -> None:
    """An old agent sends no structure. A newer one may send more fields, and other kinds of work."""
    observed = started(SPEC)
    assert Report.parse(report(observed)).structure is None
    document = json.loads(report(observed, structure=SEEN))
    document["structure"] |= {"colour": "red", "work": [{"kind": "unheard of", "count": 1, "more": 2}]}
    found = Report.parse(json.dumps(document)).structure
    assert found is not None and found.work[0].kind == "unheard of"


def test_structure_without_a_time_does_not_replace_one_with_a_time() -> None:
    first = ObservedStructure(parameters=5, flops_per_sample=9.0, batch=2, step_seconds=0.1)
    known = with_structure(DLProfileStatus(), first, NOW, complete=True)
    assert known is not None and known.structure == first and known.updated == NOW
    later = first.model_copy(update={"step_seconds": None})
    assert with_structure(known, later, NOW, complete=True) == with_structure(known, first, NOW, complete=True) == known
    other = later.model_copy(update={"parameters": 6})
    assert with_structure(known, other, NOW, complete=False) != known, "it is another script now"
    faster = with_structure(known, first.model_copy(update={"step_seconds": 0.05}), NOW, complete=True)
    assert faster is not None and faster.structure is not None and faster.structure.step_seconds == 0.05
    assert with_structure(known, None, NOW, complete=True) is None


def test_first_step_times_of_a_running_script_do_not_replace_those_of_a_complete_run() -> None:
    """They do take the place of none, so that the first run already has a prediction from measured steps."""
    untimed = ObservedStructure(parameters=5, flops_per_sample=9.0, batch=2)
    timed = untimed.model_copy(update={"step_seconds": 0.05})
    known = with_structure(DLProfileStatus(structure=untimed), timed, NOW, complete=False)
    assert known is not None and known.structure == timed
    slower = untimed.model_copy(update={"step_seconds": 0.5})
    assert with_structure(known, slower, NOW, complete=False) == known
    ended = with_structure(known, slower, NOW, complete=True)
    assert ended is not None and ended.structure == slower


def test_next_job_with_the_same_script_is_predicted() -> None:
    """The whole way: a run that reports nothing by itself, its profile, and the first plan of the next job."""
    found, api, cache = measurements(TIMED), FakeApi(), Cache(now=lambda: NOW)
    assert found is not None
    kube: Any = api
    asyncio.run(Kube(kube, cache, 600.0).update_profiles(found, "team-a", NOW))
    spec = parse_observed(seen(SPEC)).spec
    assert spec is not None
    stored = api.objects["dlprofiles", "", profile_name(profile_key(spec), "cpu", "team-a")]
    assert stored["spec"]["namespace"] == "team-a" and stored["status"]["structure"]["parameters"] == 1474
    writes = len(api.writes) if hasattr(api, "writes") else None
    asyncio.run(Kube(kube, cache, 600.0).update_profiles(found, "team-a", NOW))
    assert writes is None or len(api.writes) == writes, "nothing has changed"
    constants = learned_by_model([stored], "team-a")
    assert learned_by_model([stored], "team-b") == {}
    plan = planned(seen(SPEC, learned=constants)).status
    assert plan.predicted.step_seconds == pytest.approx(0.02, rel=0.05)
    assert plan.predicted.total_seconds == pytest.approx(640 * 0.02, rel=0.2)
    assert plan.structure is not None and "1,474 parameters" in plan.structure
    assert plan.missing_fields is not None and "choice of the best number of nodes" in plan.missing_fields[0]
    conditions = status(step(seen(SPEC, learned=constants))).conditions
    [text] = [each.message for each in conditions if each.type == "Planned"]
    assert "predicted step 20ms, training 12.8s" in text and "no predicted time" not in text
    cache.put(PROFILE, stored)


def test_stored_structure_survives_a_profile_without_one() -> None:
    parsed = learned(DLProfileStatus(structure=ObservedStructure(parameters=5, flops_per_sample=9.0, batch=2)), "cpu")
    assert parsed.structure is not None and (parsed.structure.device, parsed.structure.step_s) == ("cpu", None)
    assert learned(DLProfileStatus()).structure is None


def test_failed_run_stores_nothing_new() -> None:
    failure = Failure(reason="RankFailed", message="it failed")
    assert step(done(RunPhase.FAILED, SPEC, structure=TIMED, failure=failure)).measurements is None


def test_calls_of_the_host_reach_the_plan() -> None:
    calls = HostCalls(updates=1, functions=4800, different=450, views=100, operators=70, products=5, messages=1)
    found = measurements(TIMED.model_copy(update={"host": calls}))
    assert found is not None and found.structure is not None
    assert found.structure.manifest()["hostCalls"] == {
        "updates": 1, "functions": 4800, "different": 450, "views": 100, "operators": 70, "products": 5, "convolutions": 0,
        "messages": 1, "distributed": 0, "random": 0,
    }  # fmt: skip
    stored = ObservedStructure.model_validate(found.structure.manifest())
    planned = planner_structure(stored, "cpu")
    assert planned is not None and dict(planned.host_calls or ()) == calls.model_dump()
    assert set(calls.model_dump()) == set(CALL_S), "each kind has its time"
    before = measurements(TIMED)
    assert before is not None and before.structure is not None and before.structure.host_calls is None


def test_collectives_reach_the_plan() -> None:
    counted = (CollectiveCount(kind="all_reduce", count=2, nbytes=5900), CollectiveCount(kind="barrier", count=1))
    found = measurements(TIMED.model_copy(update={"collectives": counted}))
    assert found is not None and found.structure is not None
    assert found.structure.manifest()["collectives"] == [
        {"kind": "all_reduce", "count": 2, "totalBytes": 5900}, {"kind": "barrier", "count": 1, "totalBytes": 0}
    ]  # fmt: skip
    stored = ObservedStructure.model_validate(found.structure.manifest())
    planned = planner_structure(stored, "cpu")
    assert planned is not None
    assert planned.collectives == (Collectives("all_reduce", 2, 5900), Collectives("barrier", 1, 0))
    none = measurements(TIMED.model_copy(update={"collectives": ()}))
    assert none is not None and none.structure is not None and none.structure.manifest()["collectives"] == []
    before = measurements(TIMED)
    assert before is not None and before.structure is not None and before.structure.collectives is None
