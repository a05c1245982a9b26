"""Tests that the plan after a run predicts the measured step of this run, whoever loaded its data."""

from datetime import UTC, datetime

import pytest

from dlcontract import RankMeasure, Report, RunPhase
from dljob.api import DLJobSpec, DLProfileStatus
from dljob.calibrate import Place
from dljob.cluster import cluster_view
from dljob.job.plan.request import planner_request
from dljob.job.profiles import learned, updated_profile
from dljob.planner import Decision, plan

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SHARE, COMPUTE_S, FETCH_S, COMMUNICATION_S = 64, 0.020, 0.004, 0.003


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize(("ranks", "cores"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_plan_after_a_run_predicts_its_step(ranks: int, cores: int, prefetched: bool) -> None:
    """Fixed bug: the time in which a thread of the rank prefetched data counted twice, as computing and as data."""
    data_s, communication_s = 0.0 if prefetched else FETCH_S, COMMUNICATION_S if ranks > 1 else 0.0
    step_s = COMPUTE_S + data_s + communication_s
    measures = tuple(
        RankMeasure(
            rank=rank, device="cpu", share=SHARE, compute_s=COMPUTE_S, data_s=data_s, fetch_s=FETCH_S,
            comm_s=communication_s,
        )
        for rank in range(ranks)
    )  # fmt: skip
    report = Report(
        uid="u", plan_number=1, plan_digest="d", term=1, phase=RunPhase.SUCCEEDED, unix_s=0.0, ranks=measures,
        step_s=step_s,
    )  # fmt: skip
    found = updated_profile(DLProfileStatus(), "lenet", "cpu", report, NOW, Place(ranks, 1), layout=(cores, 1))
    spec = DLJobSpec.model_validate(
        {
            "model": {"name": "lenet"},
            "dataset": {"name": "synthetic-images"},
            "globalBatchSize": SHARE * ranks,
            "steps": 100,
            "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": ranks}]},
            "resources": {"cpu": str(cores)},
            "collective": "Ring",
        }
    )
    nodes = cluster_view({"nodes": [{"name": f"n{i}", "cpu": str(cores)} for i in range(ranks)]})
    decision = plan(planner_request("job", spec), nodes, {("lenet", "cpu"): learned(found)})
    assert isinstance(decision, Decision)
    assert decision.chosen.prediction.step_s == pytest.approx(step_s, rel=0.03)
