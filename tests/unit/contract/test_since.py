"""Tests of the parts of a plan that agents of earlier releases reject."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlcontract import Plan, newer_parts
from support.builders import plan_of
from support.job_lifecycle import training

PATHS_0_2_0 = frozenset(json.loads(Path(__file__).with_name("plan-0.2.0.json").read_text()))
"""Fields of a plan of release 0.2.0, and their values where a field allows only some: ``collective=Ring``."""
SINCE_0_2_0 = {
    "batch_known", "checkpoint.interrupted_s", "checkpoint.uri", "collective=DDP", "collective=LayeredServer", "failure_rules", "model.framework=MPI",
    "parallelism=Sharded", "replicas",
    "activation_checkpointing", "model.deferred", "model.elastic", "optimizer.rate_curve", "precision", "refused_ranks", "until",
    "dataset.distribution", "dataset.uri", "dataset.sha256", "dataset.size_nbytes",
}  # fmt: skip
"""New fields and values, each without the fields below it. ``dlcontract.plan.since`` has a part for each."""

Json = dict[str, Any]


def paths(node: Json, definitions: Json, path: str = "") -> Iterator[str]:
    """Yield the fields that a JSON schema allows, and their values where a field allows only some."""
    if "$ref" in node:
        yield from paths(definitions[node["$ref"].rpartition("/")[2]], definitions, path)
    for part in (
        *node.get("anyOf", ()),
        *node.get("prefixItems", ()),
        *[node[key] for key in ("items",) if key in node],
    ):
        yield from paths(part, definitions, path)
    for value in (*node.get("enum", ()), *[node[key] for key in ("const",) if key in node]):
        yield f"{path}={value}"
    for name, field in node.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below
        yield from paths(field, definitions, below)


def test_each_new_field_of_a_plan_has_a_part() -> None:
    """If this fails, give the new field or value a part in ``dlcontract.plan.since``, and then add it here."""
    schema = Plan.model_json_schema(by_alias=True)
    new = {path for path in paths(schema, schema["$defs"]) if path not in PATHS_0_2_0}
    below = tuple(f"{root}{sign}" for root in SINCE_0_2_0 for sign in ".=")
    assert not {path for path in new if path not in SINCE_0_2_0 and not path.startswith(below)}
    assert new >= SINCE_0_2_0
    assert not PATHS_0_2_0 - set(paths(schema, schema["$defs"])), "a plan loses no field"


BASE = json.loads(plan_of(training()).plan.to_json())


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"until": {"metric": "accuracy", "at_least": 0.9}}, "spec.until"),
        ({"precision": "BF16"}, "spec.precision"),
        ({"optimizer": {"find_rate": True, "rate_curve": "Accuracy"}}, "spec.optimizer.learningRateCurve Accuracy"),
        ({"activation_checkpointing": True}, "spec.activationCheckpointing"),
        ({"refused_ranks": [1]}, "numbers of ranks that a script refused (spec.trainer.elastic)"),
        ({"failure_rules": [{"action": "FailJob", "reasons": ["Hung"]}]}, "spec.runPolicy.failureRules"),
        ({"collective": "DDP"}, "spec.collective DDP"),
        (
            {
                "parallelism": "Sharded",
                "collective": "Torch",
                "min_ranks": len(BASE["ranks"]),
                "model": {"command": ["x"]},
            },
            "spec.parallelism.strategy Sharded",
        ),
        (
            {
                "parallelism": "Tensor",
                "replicas": len(BASE["ranks"]),
                "rebalance": False,
                "min_ranks": len(BASE["ranks"]),
                "measure_collective": False,
            },
            "spec.parallelism.replicas",
        ),
        (
            {
                "parallelism": "Pipeline",
                "ranks": [{**rank, "share": BASE["global_batch"]} for rank in BASE["ranks"]],
                "rebalance": False,
                "min_ranks": len(BASE["ranks"]),
                "measure_collective": False,
                "model": {"command": ["x"]},
            },
            "spec.parallelism.strategy Pipeline and Tensor with spec.trainer.command",
        ),
        ({"batch_known": False}, "a script without spec.globalBatchSize"),
        ({"micro_batches": 2}, "gradient accumulation (spec.parallelism.gradientAccumulation)"),
        ({"checkpoint": {**BASE.get("checkpoint", {}), "interrupted_s": 3600.0}}, "interruptions of spot nodes"),
        ({"checkpoint": {**BASE.get("checkpoint", {}), "uri": "s3://models/a"}}, "spec.checkpoint.uri"),
        (
            {"model": {"command": ["x"], "framework": "Torchrun", "elastic": True}},
            "spec.trainer.elastic",
        ),
        ({"model": {"command": ["mpirun", "x"], "framework": "MPI"}}, "spec.trainer.framework MPI"),
        ({"model": {"command": ["x"], "deferred": True}}, "spec.parallelism.deferredInit"),
        (
            {"dataset": {"path": "/d/a.npz", "distribution": "Sharded", "uri": "s3://a/a.npz"}},
            "spec.dataset.distribution Sharded",
        ),
    ],
)
def test_new_part_is_named(changes: Json, part: str) -> None:
    plan = Plan.model_validate({**BASE, **changes})
    assert list(newer_parts(plan)) == [(part, "0.3.0")]


def test_plan_without_new_parts() -> None:
    assert list(newer_parts(Plan.model_validate(BASE))) == []


def test_short_form_of_ranks_is_a_part() -> None:
    first = BASE["ranks"][0] | {"group": "g0", "share": 1}
    names = [f"job-g0-{n}" for n in range(8000)]
    long = [{**first, "rank": n, "pod": pod, "host": f"{pod}.svc.n.svc.cluster.local"} for n, pod in enumerate(names)]
    plan = Plan.model_validate({**BASE, "ranks": long, "global_batch": 8000})
    assert [name for name, _ in newer_parts(plan)] == ["ranks in their short form (spec.nodes.max)"]


def test_layered_server_is_a_part() -> None:
    ranks = [{**rank, "role": "server" if rank["rank"] == 0 else "worker"} for rank in BASE["ranks"]]
    total = sum(rank["share"] for rank in ranks[1:])
    ranks[0]["share"] = 0
    plan = Plan.model_validate({**BASE, "ranks": ranks, "global_batch": total, "collective": "LayeredServer"})
    assert [name for name, _ in newer_parts(plan)] == ["spec.collective LayeredServer"]
