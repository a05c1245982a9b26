"""Tests of measured steps of ranks that each hold a part of the model: from the report to the next plan."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import RankMeasure, RunPhase
from dljob.api import DLProfileStatus
from dljob.api.profiles.steps import MAX_SPLIT_STEPS
from dljob.calibrate.learned import Learned, Place, SplitPoint
from dljob.job.identity import profile_name
from dljob.job.observed_structure import planner_split_steps, with_split_step
from dljob.job.profiles import learned_by_model
from dljob.kube import Cache, Kube
from dljob.reconcile import RunMeasurements
from support.builders import NOW, Json, planned, seen
from support.job_lifecycle import done, step
from support.servers.fake_api import FakeApi

PIPELINE: Json = {
    "model": {"name": "gpt-mini"},
    "dataset": {"name": "synthetic-tokens"},
    "globalBatchSize": 64,
    "steps": 100,
    "nodes": {"min": 2, "max": 2},
    "parallelism": {"strategy": "Pipeline", "stages": 2, "microBatches": 8},
}
TENSOR: Json = PIPELINE | {"parallelism": {"strategy": "Tensor"}}
SHARDED: Json = PIPELINE | {
    "model": {"hints": {"parameters": 10**6, "flopsPerSample": 6e8, "activationBytesPerSample": 10**6}},
    "dataset": {"name": "digits"},
    "trainer": {"command": ["python", "train.py"]},
    "parallelism": {"strategy": "Sharded"},
}
POINT = SplitPoint("Pipeline", Place(2, 1, "MPI", cores=1), 64, 0.5, 8)
points = st.builds(
    lambda nodes, batch, step_s: replace(POINT, place=Place(nodes, 1, "MPI", cores=1), batch=batch, step_s=step_s),
    st.integers(1, 3),
    st.sampled_from([32, 64, 128]),
    st.floats(1e-4, 1e4),
)


def measured(spec: Json, step_s: float | None = 0.5, lost: int = 0, data_s: float = 0.0) -> RunMeasurements | None:
    ranks = tuple(
        RankMeasure(rank=i, device="cpu", share=64, compute_s=0.1, wait_s=0.0, comm_s=0.0, data_s=data_s)
        for i in range(2 - lost)
    )
    return step(done(RunPhase.SUCCEEDED, spec, ranks=ranks, step_s=step_s)).measurements


@pytest.mark.parametrize("spec", [PIPELINE, TENSOR, SHARDED], ids=["Pipeline", "Tensor", "Sharded"])
def test_next_plan_has_the_measured_step(spec: Json) -> None:
    """The whole way: a run, its profile, and the plan of the next job."""
    first = planned(seen(spec)).status.predicted
    assert first.step_seconds is not None and first.step_seconds_p90 is not None
    slow_s = 3 * first.step_seconds
    found, api, cache = measured(spec, slow_s), FakeApi(), Cache(now=lambda: NOW)
    assert found is not None and found.split_step is not None and found.devices == ("cpu",)
    assert found.split_step.strategy == spec["parallelism"]["strategy"]
    kube: Any = api
    asyncio.run(Kube(kube, cache, 600.0).update_profiles(found, "team-a", NOW))
    constants = learned_by_model([api.objects["dlprofiles", "", profile_name(found.model, "cpu", "team-a")]], "team-a")
    again = planned(seen(spec, learned=constants)).status.predicted
    assert again.step_seconds == pytest.approx(slow_s, rel=0.15)
    assert again.step_seconds is not None and again.step_seconds_p90 is not None
    assert again.step_seconds_p90 / again.step_seconds < first.step_seconds_p90 / first.step_seconds


def test_run_that_lost_a_rank_or_has_no_step_time_stores_nothing() -> None:
    assert measured(PIPELINE, lost=1) is None
    assert measured(PIPELINE, step_s=None) is None


def test_waiting_for_input_is_no_part_of_the_step() -> None:
    found = measured(PIPELINE, 0.5, data_s=0.2)
    assert found is not None and found.split_step is not None
    assert found.split_step.step_s == pytest.approx(0.3)


@given(st.lists(points, min_size=1, max_size=40))
def test_profiles_keep_the_newest_steps_and_the_mean_of_equal_ones(runs: list[SplitPoint]) -> None:
    status = DLProfileStatus()
    for run in runs:
        status = with_split_step(status, run, NOW)
    kept = planner_split_steps(status.split_steps)
    assert len(kept) <= MAX_SPLIT_STEPS and kept[-1].like(runs[-1])
    assert len({(each.place, each.batch) for each in kept}) == len(kept)
    for each in kept:
        equal = [run.step_s for run in runs if run.like(each)]
        assert min(equal) * (1 - 1e-9) <= each.step_s <= max(equal) * (1 + 1e-9)
    assert status.observed_jobs == len(runs)


def test_steps_survive_a_run_with_another_strategy() -> None:
    status = with_split_step(DLProfileStatus(observed_jobs=3), POINT, NOW)
    assert DLProfileStatus.model_validate(status.manifest()) == status
    assert Learned(split_steps=planner_split_steps(status.split_steps)).split_steps == (POINT,)
