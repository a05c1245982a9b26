"""The first job in line is the same as if all waiting jobs were sorted before each plan."""

from datetime import timedelta
from random import Random
from typing import Any

import pytest

from dljob.controller.planning.answers import First, UsableDevices
from dljob.controller.planning.queueing import Queue
from dljob.kube.kinds import POD
from dljob.reconcile import ParsedJob
from dljob.scheduling import QueuedJob
from support.builders import NOW, T4
from support.controller.fake_operator import SPEC, Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import run


async def sorted_first(queue: Queue, question: ParsedJob, lines: Any, ask: Any, holds: bool, of: str) -> First | None:
    """Return the first job in line, by the rule of releases before lines: sort all jobs that come before the question."""
    usable = UsableDevices(queue._cache.ledger.view())
    mine_of = usable.of(question)
    devices = {key: each for key, each in lines.devices.items() if lines.counts(key)}
    if of == "devices":
        devices = {key: each for key, each in devices.items() if not mine_of.isdisjoint(usable.of(each))}
    waiting = devices if of == "devices" else {**devices, **lines.quota}
    mine = queue.job(question)

    def is_before(its: QueuedJob) -> bool:
        first = its.priority >= mine.priority if holds else queue._order(its) <= queue._order(mine)
        return first and its.key != mine.key

    before = {key: each for key, each in waiting.items() if is_before(queue.job(each))}
    if of == "quota":
        before = {key: each for key, each in before.items() if key[0] == mine.key[0]}
    for key in sorted(before, key=lambda key: queue._order(queue.job(before[key]))):
        found = None if queue.holdings.holds_devices(key) else await queue._shadows.of(key, before[key], ask)
        if found is not None and not (lines.passed_over(key) and found.start_s <= queue._clock()):
            return First(key, found)
    return None


def submit(cluster: FakeCluster, operator: Operator, random: Random, number: int) -> tuple[str, str]:
    """Submit a random job on one to three nodes, in one of three namespaces."""
    nodes = random.choice([1, 1, 2, 4])
    scheduling: dict[str, Any] = {}
    if random.random() < 0.4:
        due = operator.now + timedelta(minutes=random.choice([1, 60, 6000]))
        scheduling["finishBy"] = due.strftime("%Y-%m-%dT%H:%M:%SZ")
    if random.random() < 0.3:
        scheduling["priorityClassName"] = "high"
    spec = {**SPEC, "epochs": random.choice([5, 500, 50_000]), "seed": number, "nodes": {"min": nodes, "max": nodes}}
    namespace = random.choice(["team-a", "team-b", "team-c"])
    return cluster.submit(f"job-{number:02}", namespace, second=number, **spec, scheduling=scheduling)


async def end_one(cluster: FakeCluster, operator: Operator) -> None:
    """Suspend a running job, and delete its pods."""
    key = next((job.key for job in operator.cache.jobs() if operator.cache.pods_of(job.key)), None)
    if key is not None:
        await cluster.edit(key, suspend=True)
        for pod in await cluster.api.find(POD, key[0]):
            if pod["metadata"]["name"].startswith(f"{key[1]}-"):
                await cluster.api.delete(POD, key[0], pod["metadata"]["name"])


@pytest.mark.parametrize("seed", range(6))
def test_first_in_line_is_that_of_a_sorted_line(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, found, expected = Random(seed), list[First | None](), list[First | None]()
    first_before, within = Queue._first_before, Queue._within_quotas
    part = ["devices"]

    async def compared(
        self: Queue, question: ParsedJob, line: Any, lines: Any, ask: Any, *, holds: bool
    ) -> First | None:
        of = part[-1]
        found.append(await first_before(self, question, line, lines, ask, holds=holds))
        expected.append(await sorted_first(self, question, lines, ask, holds, of))
        return found[-1]

    async def of_quota(self: Queue, *given: Any, **more: Any) -> Any:
        part.append("quota")
        try:
            return await within(self, *given, **more)
        finally:
            part.pop()

    monkeypatch.setattr(Queue, "_first_before", compared)
    monkeypatch.setattr(Queue, "_within_quotas", of_quota)

    async def main() -> None:
        cluster = FakeCluster()
        cluster.priority_class("high", 100)
        for i in range(4):
            cluster.node(f"n{i}", T4, 1)
        cluster.quota("team-b", pods="2")
        async with Operator(cluster, together=seed % 2 == 1) as operator:
            for number in range(20):
                key = submit(cluster, operator, random, number)
                await operator.watch(random.choice([0.5, 1.0, 3.0]))
                operator.now = NOW + timedelta(minutes=number)
                if operator.planned(key) == "Planned":
                    free = [node.name for node in operator.cache.ledger.view().nodes if node.free_devices]
                    pods = await cluster.create_pods(key)
                    await cluster.bind(pods, *free[: len(pods)])
                elif random.random() < 0.4:
                    await end_one(cluster, operator)
                for each in operator.cache.jobs():
                    operator.queue.add(each.key)
                await operator.watch(1.0)

    run(main())
    assert found == expected
    assert found
