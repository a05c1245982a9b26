"""Tests of the size of a large job's objects. The API server rejects a ConfigMap of more than 1 MiB."""

import json

import pytest

from dlcontract import PLAN_KEY, Plan
from dljob.cluster import ClusterView
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile.planning import make_plan
from support.builders import A100, T4, Json, after, nodes, plan_of, seen
from support.job_lifecycle import status, step, verdict

MIB = 2**20
LONG_NAME = "a-name-of-a-job-with-forty-characters-ab"
GROUPS = {
    "homogeneous": [(A100, 512, 8)],
    "heterogeneous": [(A100, 300, 8), (T4, 212, 8)],
    "one rank on each node": [(A100, 4096, 1)],
}


def large(groups: list[tuple[str, int, int]]) -> tuple[Json, ClusterView]:
    rows = [{"device": device, "nodes": count, "ranksPerNode": each} for device, count, each in groups]
    spec = {
        "model": {"name": "resnet50"}, "dataset": {"name": "synthetic-images"}, "globalBatchSize": 65_536, "steps": 10,
        "planning": {"mode": "Fixed", "groups": rows},
    }  # fmt: skip
    view = nodes(
        *(
            {"name": f"n{i}", "count": count, "device": device, "devices": each, "cpu": 128, "memory": "1Ti"}
            for i, (device, count, each) in enumerate(groups)
        )
    )
    return spec, view


@pytest.mark.parametrize("case", GROUPS)
def test_objects_of_4096_ranks_have_at_most_half_of_a_mebibyte(case: str) -> None:
    spec, view = large(GROUPS[case])
    observed = seen(spec, view, LONG_NAME)
    desired = step(observed)
    sizes = {f"{m['kind']} {m['metadata']['name']}": len(json.dumps(m)) for m in desired.objects}
    assert sum(len(group.batch_per_rank) for group in (status(desired).plan or pytest.fail()).groups) == 4096
    assert max(sizes.values()) < MIB // 2, sizes
    assert len(json.dumps(status(desired).manifest())) < MIB // 10
    stored = plan_of(after(observed, desired))
    assert StoredPlan.parse(stored.data()).plan == stored.plan, "agents and operator read what was planned"
    assert stored.with_term(2).plan == Plan.parse(stored.with_term(2).data()[PLAN_KEY])


def test_plan_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_plan, "MAX_PLAN_NBYTES", 10_000)
    spec, view = large([(A100, 300, 8)])
    desired = step(seen(spec, view))
    assert verdict(desired, "Planned") == ("False", "PlanTooLarge")
    assert desired.objects == ()
