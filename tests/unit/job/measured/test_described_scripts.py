"""Tests of scripts for torchrun whose spec says what they do: their predictions follow it, and their ranks do not see it."""

from typing import Any

import pytest

import dlcontract
from dlcontract import RunPhase
from dljob.api import DLJobSpec
from dljob.calibrate.learned import parts_of_key
from dljob.cluster import cluster_view
from dljob.job.plan.request import Computation, computation, planner_request
from dljob.job.plan.status import plan_status
from dljob.job.plan.trainer import trainer_plan
from dljob.planner import Decision, Infeasible, plan
from dljob.reconcile import RunMeasurements
from support.builders import Json, planned, seen
from support.job_lifecycle import done, step

A100S = cluster_view(
    {
        "nodes": [
            {
                "name": "a", "count": 2, "device": "NVIDIA-A100-SXM4-80GB", "gpu": True, "devices": 8, "cpu": 128,
                "memory": "1Ti", "bandwidth": "100G",
            }
        ]
    }
)  # fmt: skip
LLAMA: Json = {
    "model": {"hints": {"like": "Llama-3-8B"}},
    "dataset": {"uri": "s3://corpus/tokens.tar", "samples": 1000, "sampleBytes": 32768},
    "trainer": {"framework": "Torchrun", "image": "registry.example/mine:1", "command": ["torchrun", "fsdp.py"]},
    "globalBatchSize": 64,
    "epochs": 1,
    "optimizer": {"name": "AdamW"},
}
SHARDS: Json = {
    "precision": "BF16",
    "activationCheckpointing": "Always",
    "parallelism": {"strategy": "Sharded", "microBatches": 2},
}
MODEL: Json = {"hints": {"parameters": 10**6, "flopsPerSample": 6e8, "activationBytesPerSample": 10**6}}
SMALL: Json = LLAMA | {
    "model": MODEL, "dataset": {"name": "digits"}, "nodes": {"min": 2, "max": 2}, "checkpoint": {"enabled": True},
}  # fmt: skip


def answer(changes: Json) -> Decision | Infeasible:
    return plan(planner_request("job", DLJobSpec.model_validate(LLAMA | changes)), A100S, {})


def trainers(changes: Json) -> tuple[DLJobSpec, Decision, dlcontract.Plan]:
    spec, found = DLJobSpec.model_validate(LLAMA | changes), answer(changes)
    assert isinstance(found, Decision), found
    return spec, found, trainer_plan("job", "team", "uid-1", spec, found, 1, 1, "job", "cluster.local")


def test_plan_of_a_script_that_shards() -> None:
    """Fixed bug: such a script was refused, because plans counted the whole state in float32 on each rank."""
    spec, found, output = trainers(SHARDS)
    chosen = found.chosen
    assert (chosen.strategy, chosen.micro_batches, chosen.precision, chosen.recomputes) == ("Sharded", 2, "BF16", True)
    shown = plan_status(spec, found, 1, "digest")
    assert (shown.parallelism, shown.micro_batches, shown.precision) == ("Sharded", 2, "BF16")
    assert (output.parallelism, output.micro_batches, output.precision) == ("Data", 1, "FP32")
    assert not output.activation_checkpointing and not output.model.deferred
    assert output.min_ranks < len(output.ranks), "the script decides what fewer ranks can do"
    assert computation(spec, output) == Computation("Sharded", 2, "BF16", recomputes=True)


@pytest.mark.parametrize(
    ("ranks", "width", "layers", "measured_mib"),
    [
        (2, 128, 8, 364),
        (2, 256, 30, 420),
        (2, 512, 8, 481),
        (2, 1024, 8, 719),
        (4, 1024, 8, 599),
        (2, 870, 30, 948),
        (2, 1700, 8, 1469),
        (2, 2600, 6, 1775),
        (2, 3000, 5, 884),
    ],
)
def test_scripts_that_shard_on_cpus_get_the_memory_that_they_need(
    ranks: int, width: int, layers: int, measured_mib: int
) -> None:
    """Fixed bug: a pod reached its limit. Peaks of private memory of linear layers, each sharded by ``fully_shard``,
    with AdamW and 2 micro-batches of 32 samples (docs/design/0016)."""
    parameters = layers * width * (width + 1) + 10 * (width + 1)
    hints = {
        "parameters": parameters, "flopsPerSample": 6 * parameters, "activationBytesPerSample": 8 * layers * width,
    }  # fmt: skip
    changes: Json = {
        "model": {"hints": hints},
        "dataset": {"uri": "file:///made", "samples": 10**5, "sampleBytes": 4 * width},
        "globalBatchSize": 64 * ranks,
        "nodes": {"min": ranks, "max": ranks},
        "parallelism": {"strategy": "Sharded", "microBatches": 2},
        "checkpoint": {"enabled": False},
    }
    request = planner_request("job", DLJobSpec.model_validate(LLAMA | changes))
    found = plan(request, cluster_view({"nodes": [{"name": "c", "count": 4, "cpu": 8, "memory": "32Gi"}]}), {})
    assert isinstance(found, Decision), found
    assert found.chosen.prediction.memory_nbytes >= measured_mib * 2**20


@pytest.mark.parametrize(("precision", "measured_mib"), [("FP32", 916), ("BF16", 1302)])
def test_units_that_are_gathered_in_16_bits_fit_into_the_heap_twice_as_large(precision: str, measured_mib: int) -> None:
    """Fixed bug: units of 48 MiB counted as too large for the heap, but FSDP gathers 24 MiB of them in bfloat16."""
    unit = 12_593_152
    hints = {
        "parameters": 3 * unit, "largestUnitParameters": unit, "flopsPerSample": 18 * unit,
        "activationBytesPerSample": 135_168,
    }  # fmt: skip
    changes: Json = SMALL | {
        "model": {"hints": hints}, "dataset": {"uri": "file:///made", "samples": 10**5, "sampleBytes": 4096},
        "globalBatchSize": 128, "precision": precision, "parallelism": {"strategy": "Sharded", "microBatches": 2},
        "checkpoint": {"enabled": False},
    }  # fmt: skip
    request = planner_request("job", DLJobSpec.model_validate(LLAMA | changes))
    found = plan(request, cluster_view({"nodes": [{"name": "c", "count": 4, "cpu": 8, "memory": "32Gi"}]}), {})
    assert isinstance(found, Decision), found
    assert found.chosen.prediction.memory_nbytes >= measured_mib * 2**20


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "BF16"},
        {"activationCheckpointing": "Always"},
        {"parallelism": {"microBatches": 4}},
        {"parallelism": {"strategy": "Sharded"}},
    ],
    ids=["16 bits", "recomputation", "micro-batches", "sharded"],
)
def test_each_field_lowers_the_predicted_memory(changes: Json) -> None:
    group = {"device": "NVIDIA-A100-SXM4-80GB", "nodes": 2, "ranksPerNode": 8}
    planning = {"mode": "Fixed", "groups": [group]}
    small = {"model": {"hints": {"like": "GPT-2-large"}}, "globalBatchSize": 64, "planning": planning}
    used = []
    for each in ({}, changes):
        _, found, _ = trainers(small | each)
        used.append(found.chosen.prediction.memory_nbytes)
    assert used[1] < used[0]


@pytest.mark.parametrize(
    ("framework", "remedy"),
    [("Torchrun", "say what the script does to need less"), ("MPI", "set parallelism.microBatch")],
)
def test_script_that_does_not_fit_is_told_what_to_say(framework: str, remedy: str) -> None:
    """Fixed bug: the message advised parallelism.strategy, which the API refused for such scripts."""
    found = answer({"trainer": LLAMA["trainer"] | {"framework": framework}})
    assert isinstance(found, Infeasible) and found.reason == "DoesNotFit"
    assert remedy in found.message and "or remove spec.model" in found.message
    smaller = answer(
        {
            "trainer": LLAMA["trainer"] | {"framework": framework},
            "model": {"hints": {"like": "GPT-2-XL"}},
            "globalBatchSize": 4096,
        }
    )
    assert isinstance(smaller, Infeasible) and smaller.field == "spec.globalBatchSize" and remedy in smaller.message


def ended(spec: Json, **changes: Any) -> RunMeasurements | None:
    return step(done(RunPhase.SUCCEEDED, spec, step_s=0.5, **changes)).measurements


def test_reported_step_of_a_script_that_shards_counts_for_the_next_plan() -> None:
    sharded = SMALL | {"parallelism": {"strategy": "Sharded", "microBatches": 2}}
    first = planned(seen(sharded))
    assert first.plan.parallelism == "Data" and first.status.parallelism == "Sharded"
    found = ended(sharded)
    assert found is not None and found.split_step is not None
    assert (found.split_step.strategy, found.split_step.step_s, found.split_step.micro_batches) == ("Sharded", 0.5, 2)
    assert ended(sharded, world_size=1) is None, "not all ranks ran"


def test_measurements_have_the_precision_of_the_script() -> None:
    found = ended(SMALL | {"precision": "BF16"})
    assert found is not None and parts_of_key(found.model)[1:] == ("BF16", False)
