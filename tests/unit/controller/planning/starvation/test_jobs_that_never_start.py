"""Tests of jobs whose pods never run: they do not stop jobs of a lower priority again and again."""

from typing import Any

from dljob.job.waiting import MAX_KEPT_BACK_OFFS
from dljob.kube import JobKey
from dljob.kube.kinds import DLJOB
from support.builders import T4
from support.controller.fake_operator import SPEC, Json, Operator
from support.controller.simulated_pool import SimulatedPool
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

BOTH: Json = {**SPEC, "epochs": 1_000_000, "checkpoint": {"volume": {"claimName": "data"}}}
"""A job that needs both nodes for days, and writes checkpoints."""
STEP_S = 60.0


def classed(name: str) -> Json:
    return {**BOTH, "scheduling": {"priorityClassName": name}}


async def status(cluster: FakeCluster, key: JobKey) -> dict[str, Any]:
    found: dict[str, Any] = (await cluster.api.get(DLJOB, *key))["status"]
    return found


async def later(pool: SimulatedPool, hours: float) -> None:
    for _ in range(int(hours * 3600 / STEP_S)):
        await pool.run(STEP_S)


def test_job_that_never_starts_stops_others_only_a_few_times_and_keeps_no_other_from_it() -> None:
    """Fixed bug: a job with a wrong image stopped jobs of a lower priority for ever, each time in vain."""

    async def main() -> None:
        cluster = FakeCluster()
        cluster.claim("data", "ReadWriteMany")
        cluster.priority_class("urgent", 1000)
        cluster.priority_class("high", 500)
        async with Operator(cluster, preempts=True) as operator:
            pool = SimulatedPool(cluster, operator, {"n1": (T4, 1), "n2": (T4, 1)})
            low = pool.submit("low", "team-a", **BOTH)
            await later(pool, 0.05)
            assert pool.holds(low)
            pool.broken.add(pool.submit("wrong-image", "team-a", **classed("urgent")))
            await later(pool, 4.0)
            stops = (await status(cluster, low))["preemptions"]
            assert 1 <= stops <= MAX_KEPT_BACK_OFFS + 1
            await later(pool, 1.0)
            assert (await status(cluster, low))["preemptions"] == stops and pool.holds(low)
            other = pool.submit("other", "team-a", **classed("high"))
            await later(pool, 1.0)
            assert pool.holds(other) and not pool.holds(low)

    run(main())
