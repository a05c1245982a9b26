"""Tests that the controller writes mere progress at a limited rate, and everything else at once."""

from collections.abc import Awaitable, Callable
from typing import Any

import dlcontract
from dlcontract import Report, RunPhase
from dljob.job.plan.stored import StoredPlan
from dljob.kube import JobKey
from dljob.kube.kinds import CONFIG_MAP, DLJOB, POD
from dljob.status.pace import ProgressPace
from support.builders import NOW, T4
from support.controller.fake_operator import SPEC, Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s, run

KEY: JobKey = ("team-a", "digits")
PER_MINUTE = 1 / 60


async def report(cluster: FakeCluster, step: int, phase: RunPhase = RunPhase.RUNNING, **more: Any) -> None:
    plan = StoredPlan.parse((await cluster.api.get(CONFIG_MAP, KEY[0], f"{KEY[1]}-plan"))["data"]).plan
    text = Report(
        uid=plan.uid, plan_number=plan.number, plan_digest=plan.digest(), term=plan.term, phase=phase,
        unix_s=NOW.timestamp(), step=step, steps=1000, step_s=0.1, world_size=2, **more,
    ).to_json()  # fmt: skip
    await cluster.api.merge(CONFIG_MAP, KEY[0], f"{KEY[1]}-report", {"data": {dlcontract.REPORT_KEY: text}})


async def shown(cluster: FakeCluster) -> tuple[str, int]:
    """Return the phase and the step in the stored status."""
    status = (await cluster.api.get(DLJOB, *KEY))["status"]
    return status["phase"], status["progress"]["step"]


def on_a_running_job(test: Callable[[FakeCluster, Operator], Awaitable[None]]) -> None:
    """Run a test with a job that trains, in its turn to write: the next turn is a minute later."""

    async def main() -> None:
        cluster = FakeCluster()
        for name in ("n1", "n2"):
            cluster.node(name, T4, 1)
        async with Operator(cluster, pace=ProgressPace(PER_MINUTE, now_s, burst=1)) as operator:
            operator.queue.add(cluster.submit(KEY[1], **SPEC))
            await operator.watch()
            pods = await cluster.create_pods(KEY)
            await cluster.bind(pods, "n1", "n2")
            for pod in pods:
                ready = {"type": "Ready", "status": "True"}
                await cluster.api.merge(POD, KEY[0], pod["metadata"]["name"], {"status": {"conditions": [ready]}})
            await report(cluster, 1)
            await operator.watch()
            assert await shown(cluster) == ("Running", 1)
            await report(cluster, 2)
            await operator.watch()
            assert await shown(cluster) == ("Running", 2), "the burst"
            await test(cluster, operator)

    run(main())


def test_progress_waits_for_its_turn_and_shows_the_last_report_then() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        for step in (3, 4, 5):
            await report(cluster, step)
            await operator.watch(10.0)
            assert await shown(cluster) == ("Running", 2)
        await operator.watch(40.0)
        assert await shown(cluster) == ("Running", 5), "nothing more was reported: the operator had to remember"

    on_a_running_job(body)


def test_the_end_is_shown_at_once() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        await report(cluster, 3)
        await operator.watch()
        outcome = dlcontract.Outcome(steps=1000, seconds=100.0, loss=0.1)
        await report(cluster, 1000, RunPhase.SUCCEEDED, outcome=outcome)
        await operator.watch()
        assert await shown(cluster) == ("Complete", 1000)

    on_a_running_job(body)
