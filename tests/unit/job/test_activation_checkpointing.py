"""Tests of the activation checkpointing of a job: what the planner is asked, plan, status, digests and measurements."""

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from dlcontract import Plan, RankMeasure, Report, RunPhase
from dljob.api import DLJobSpec, DLProfileStatus
from dljob.api.spec.model import BLOCK_MODELS, REFERENCES_WITHOUT_BLOCKS
from dljob.calibrate.learned import measured_key, parts_of_key
from dljob.cluster import cluster_view
from dljob.job.identity import profile_key
from dljob.job.plan.request import planner_request
from dljob.job.plan.status import plan_status
from dljob.job.plan.trainer import trainer_plan
from dljob.job.profiles import updated_profile
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.references import REFERENCES
from dljob.perf.workload.workload import builtin, reference
from dljob.planner import Decision, plan

THREE = cluster_view({"nodes": [{"name": "n", "count": 3, "cpu": 2}]})
BASE: dict[str, Any] = {
    "model": {"name": "resnet18"}, "dataset": {"name": "synthetic-images"}, "globalBatchSize": 96, "steps": 25,
}  # fmt: skip
HINTS = {"parameters": 10**6, "flopsPerSample": 1e9, "activationBytesPerSample": 10**8}
BLOCKS = {**HINTS, "checkpointedActivationBytesPerSample": 10**7}


def spec(**changes: Any) -> DLJobSpec:
    return DLJobSpec.model_validate(BASE | changes)


def script(hints: dict[str, Any], **changes: Any) -> DLJobSpec:
    return spec(model={"hints": hints}, trainer={"command": ["a"]}, **changes)


def decided(job_spec: DLJobSpec) -> Decision:
    found = plan(planner_request("job", job_spec), THREE, {})
    assert isinstance(found, Decision), found
    return found


def shown(job_spec: DLJobSpec) -> tuple[bool | None, str]:
    """Return what status.plan says about activation checkpointing."""
    status = plan_status(job_spec, decided(job_spec), 1, "digest")
    return status.activation_checkpointing, status.activation_checkpointing_reason or ""


def planned(job_spec: DLJobSpec) -> Plan:
    return trainer_plan("job", "team", "uid-1", job_spec, decided(job_spec), 3, 2, "job", "cluster.local")


def test_a_job_without_the_field_has_the_plan_of_earlier_releases() -> None:
    """Agents reject unknown fields. So those of earlier releases accept plans without it, and reject all others."""
    asked = spec(activationCheckpointing="Always")
    assert '"activation_checkpointing":true' in planned(asked).to_json()
    assert "activation" not in planned(spec()).to_json() + planned(spec(activationCheckpointing="Never")).to_json()
    assert planned(spec()).digest() == planned(spec(activationCheckpointing="Never")).digest()
    assert planned(spec()).digest() != planned(asked).digest()
    assert "activationCheckpointing" not in spec().manifest()
    # The digest of an earlier release. It changes if stored jobs get another key, and lose their measurements.
    assert profile_key(script(HINTS)) == "program-341a7d7c8bb4"


def test_status_says_why() -> None:
    used, why = shown(spec(activationCheckpointing="Always"))
    assert used and why.startswith("spec.activationCheckpointing is Always; a sample keeps 2 MiB of activations")
    assert shown(spec()) == shown(spec(activationCheckpointing="Never")) == (None, "")
    used, why = shown(spec(activationCheckpointing="Auto"))
    assert used is False and "no better" in why


@pytest.mark.parametrize(
    ("job_spec", "why"),
    [
        (
            spec(activationCheckpointing="Auto", parallelism={"synchronization": "Asynchronous"}),
            "asynchronous training",
        ),
        (spec(activationCheckpointing="Auto", collective="LayeredServer"), "LayeredServer"),
        (spec(activationCheckpointing="Auto", model={"name": "lenet"}), "the model has no blocks"),
        (
            spec(activationCheckpointing="Auto", parallelism={"strategy": "Pipeline", "stages": 2}),
            "model parallelism has no activation checkpointing",
        ),
        (script(HINTS, activationCheckpointing="Auto"), "checkpointedActivationBytesPerSample is not set"),
    ],
)
def test_auto_never_uses_it_where_it_cannot_run(job_spec: DLJobSpec, why: str) -> None:
    used, reason = shown(job_spec)
    assert used is False and why in reason
    assert not planned(job_spec).activation_checkpointing


def test_the_api_names_the_models_with_blocks() -> None:
    assert [name for name in MODELS if builtin(name, None).checkpointed_nbytes is not None] == list(BLOCK_MODELS)
    unknown = [name for name in REFERENCES if reference(name).checkpointed_nbytes is None]
    assert unknown == list(REFERENCES_WITHOUT_BLOCKS)


def test_hints_of_a_script_reach_the_planner() -> None:
    request = planner_request("job", script(BLOCKS, activationCheckpointing="Always"))
    assert (request.recomputation, request.checkpointed_nbytes_per_sample) == ("Always", 10**7)
    assert decided(script(BLOCKS, activationCheckpointing="Always")).chosen.recomputes
    less, more = (
        decided(script(BLOCKS, activationCheckpointing=each)).chosen.prediction.memory_nbytes
        for each in ("Always", "Never")
    )
    assert less < more


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        ({"parallelism": "Optimizer", "collective": "Ring", "measure_collective": False}, True),
        ({"optimizer": {"find_rate": True}}, True),
        ({"model": {"command": ["a"], "framework": "MPI"}}, False),
        ({"collective": "LayeredServer", "measure_collective": False}, False),
    ],
)
def test_trainer_plans_with_it_have_a_gradient_of_the_batch(changes: Any, valid: bool) -> None:
    fields = planned(spec()).model_dump(mode="json", by_alias=True) | {"activation_checkpointing": True} | changes
    if valid:
        assert Plan.model_validate(fields).activation_checkpointing
        return
    with pytest.raises(ValidationError, match=r"activation_checkpointing|LayeredServer"):
        Plan.model_validate(fields)


def test_measurements_have_a_key_of_their_own() -> None:
    assert measured_key("resnet50.cifar", "FP32") == "resnet50.cifar"
    keys = {measured_key("a", precision, again) for precision in ("FP32", "BF16", "FP16") for again in (False, True)}  # type: ignore[arg-type]
    assert keys == {"a", "a.bf16", "a.fp16", "a.checkpointed", "a.bf16.checkpointed", "a.fp16.checkpointed"}
    assert all(measured_key(*parts_of_key(key)) == key for key in keys)


def test_a_profile_with_it_learns_from_a_run() -> None:
    report = Report.model_construct(
        phase=RunPhase.SUCCEEDED, probes=(), mismatches=(), noise=None, link_latency_s=None, link_bandwidth_Bps=None,
        ranks=(RankMeasure(rank=0, device="Tesla-T4", share=32, compute_s=0.5),), step_s=0.5,
    )  # fmt: skip
    for key in ("resnet50.bf16.checkpointed", "program-1.checkpointed"):
        after = updated_profile(DLProfileStatus(), key, "Tesla-T4", report, datetime(2026, 1, 1, tzinfo=UTC))
        assert [(point.batch, point.seconds) for point in after.compute] == [(32, 0.5)]
