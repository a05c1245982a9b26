"""Tests of the main memory that pods request: it is what the plan shows and what the planner fits into nodes."""

from math import ceil

import pytest

from dljob.job.plan.stored import StoredPlan
from dljob.perf.resources import memory
from dljob.perf.workload.workload import builtin
from support.builders import DIGITS, rendered, seen


@pytest.mark.parametrize("ranks", [1, 4])
def test_plan_counts_shared_memory_that_pods_request(ranks: int) -> None:
    workload = builtin("mlp", "digits")
    for is_gpu in (False, True):
        shm = memory.shm_nbytes(ranks, is_gpu)
        assert shm >= ranks * 128 * 2**20
        without = memory.pod_nbytes(workload, 8, ranks, is_gpu) - shm
        process_nbytes = memory.GPU_PROCESS_NBYTES if is_gpu else memory.PROCESS_NBYTES
        assert without >= memory.AGENT_NBYTES + ranks * process_nbytes


def test_pod_requests_the_memory_of_the_plan() -> None:
    manifests = rendered(seen(DIGITS))
    accepted = StoredPlan.parse(next(m["data"] for m in manifests if "plan.json" in m.get("data", {})))
    (stateful_set,) = [m for m in manifests if m["kind"] == "StatefulSet"]
    requests = stateful_set["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert requests["memory"] == f"{ceil(accepted.memory_nbytes / 2**20)}Mi"
