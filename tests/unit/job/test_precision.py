"""Tests of the precision of a job: what the planner is asked, the plan for the trainer, and the measurements."""

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from dlcontract import Plan, RankMeasure, Report, RunPhase
from dljob.api import DLJobSpec, DLProfileStatus
from dljob.calibrate.learned import measured_key, parts_of_key
from dljob.cluster import cluster_view
from dljob.job.plan.request import planner_request
from dljob.job.plan.status import plan_status
from dljob.job.plan.trainer import trainer_plan
from dljob.job.profiles import updated_profile
from dljob.planner import Decision, plan

THREE = cluster_view({"nodes": [{"name": "n", "count": 3, "cpu": 2}]})
BASE: dict[str, Any] = {
    "model": {"name": "digits-cnn"}, "dataset": {"name": "digits"}, "globalBatchSize": 96, "epochs": 25,
}  # fmt: skip
SCRIPT: dict[str, Any] = {"model": {"hints": {"parameters": 1, "flopsPerSample": 1}}, "trainer": {"command": ["a"]}}


def spec(**changes: Any) -> DLJobSpec:
    return DLJobSpec.model_validate(BASE | changes)


def decided(job_spec: DLJobSpec) -> Decision:
    found = plan(planner_request("job", job_spec), THREE, {})
    assert isinstance(found, Decision), found
    return found


def shown(job_spec: DLJobSpec) -> tuple[str | None, str | None]:
    """Return the precision and its reason in status.plan."""
    status = plan_status(job_spec, decided(job_spec), 1, "digest")
    return status.precision, status.precision_reason


def planned(job_spec: DLJobSpec) -> Plan:
    return trainer_plan("job", "team", "uid-1", job_spec, decided(job_spec), 3, 2, "job", "cluster.local")


@pytest.mark.parametrize(
    ("changes", "precision", "scales"),
    [
        ({}, "FP32", True),
        (SCRIPT, "FP32", True),
        ({"precision": "FP32"}, "FP32", True),
        ({"precision": "BF16"}, "BF16", True),
        ({"precision": "FP16"}, "FP16", True),
        ({"precision": "Auto"}, None, True),
        (SCRIPT | {"precision": "Auto"}, None, True),
        ({"precision": "Auto", "optimizer": {"findLearningRate": True}}, None, False),
        ({"precision": "Auto", "parallelism": {"strategy": "Auto"}}, None, True),
        ({"precision": "Auto", "parallelism": {"strategy": "Pipeline", "stages": 2}}, "FP32", True),
        ({"precision": "Auto", "parallelism": {"synchronization": "Asynchronous"}}, "FP32", True),
        ({"precision": "Auto", "collective": "LayeredServer"}, "FP32", True),
    ],
)
def test_precision_is_chosen_only_on_request(changes: Any, precision: Any, scales: bool) -> None:
    request = planner_request("job", spec(**changes))
    assert (request.precision, request.may_scale_loss) == (precision, scales)


def test_plan_and_status_name_the_precision() -> None:
    """Agents reject unknown fields. So those of earlier releases accept plans in float32, and reject all others."""
    asked = spec(precision="BF16")
    assert '"precision":"BF16"' in planned(asked).to_json() and "precision" not in planned(spec()).to_json()
    assert shown(asked) == ("BF16", "BF16, as spec.precision requests")
    assert shown(spec()) == shown(spec(precision="FP32")) == (None, None)
    assert planned(asked).digest() != planned(spec()).digest()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "FP32: cpu is not known to have units for 16-bit numbers"),
        ({"parallelism": {"strategy": "Pipeline", "stages": 2}}, "FP32: model parallelism computes in float32"),
        ({"parallelism": {"synchronization": "Asynchronous"}}, "FP32: asynchronous training computes in float32"),
        ({"collective": "LayeredServer"}, "FP32: collective LayeredServer computes in float32"),
    ],
)
def test_status_says_why_auto_stays_in_float32(changes: Any, why: str) -> None:
    assert shown(spec(precision="Auto", **changes)) == ("FP32", why)


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({"precision": "FP16"}, True),
        ({"precision": "BF16", "parallelism": "Optimizer", "collective": "Ring", "measure_collective": False}, True),
        ({"precision": "BF16", "optimizer": {"find_rate": True}}, True),
        ({"precision": "FP16", "optimizer": {"find_rate": True}}, False),
        ({"precision": "BF16", "model": {"command": ["a"], "framework": "MPI"}}, False),
        ({"precision": "FP8"}, False),
    ],
)
def test_trainer_plans_in_16_bits_have_a_gradient_of_the_batch(changes: Any, valid: bool) -> None:
    fields = planned(spec()).model_dump(mode="json", by_alias=True) | changes
    if valid:
        assert Plan.model_validate(fields).precision == changes["precision"]
        return
    with pytest.raises(ValidationError, match="precision"):
        Plan.model_validate(fields)


def test_measurements_are_stored_by_precision() -> None:
    """The name alone is the key of float32, so profiles of earlier releases stay valid."""
    assert measured_key("resnet50.cifar", "FP32") == "resnet50.cifar"
    for precision in ("FP32", "BF16", "FP16"):
        assert parts_of_key(measured_key("resnet50.cifar", precision)) == ("resnet50.cifar", precision, False)  # type: ignore[arg-type]


def test_a_profile_of_a_precision_learns_from_a_run() -> None:
    report = Report.model_construct(
        phase=RunPhase.SUCCEEDED, probes=(), mismatches=(), noise=None, link_latency_s=None, link_bandwidth_Bps=None,
        ranks=(RankMeasure(rank=0, device="Tesla-T4", share=32, compute_s=0.5),), step_s=0.5,
    )  # fmt: skip
    after = updated_profile(DLProfileStatus(), "resnet50.bf16", "Tesla-T4", report, datetime(2026, 1, 1, tzinfo=UTC))
    assert [(point.batch, point.seconds) for point in after.compute] == [(32, 0.5)]
