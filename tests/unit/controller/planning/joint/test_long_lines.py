"""Tests of queue.assignment: Together with more waiting jobs than take part in an assignment."""

import pytest

from dljob.controller.planning.joint import assigning
from dljob.scheduling.assignment import Assignment, assign_all
from support.builders import T4
from support.controller.fake_operator import Operator
from support.controller.shared_devices import LONG, together, train
from support.servers.fake_api import FakeCluster


def test_jobs_beyond_those_that_take_part_cause_no_assignments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: after a takeover, devices were assigned again for each job of a long line, in vain."""
    made: list[int] = []

    def counted(jobs: list[object], *others: object) -> Assignment:
        made.append(len(jobs))
        return assign_all(jobs, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(assigning, "MAX_JOBS", 3)
    monkeypatch.setattr(assigning, "assign_all", counted)

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, running, "n1")
        keys = [cluster.submit(f"job-{i}", second=i + 1, **LONG) for i in range(12)]
        await operator.watch(30.0)
        assert {operator.planned(key) for key in keys} == {"DeviceBusy"}
        await operator.__aexit__()
        made.clear()
        async with Operator(cluster, together=True) as successor:
            for key in (running, *keys):
                successor.queue.add(key)
            await successor.watch(4.0)
            assert len(successor.asked) >= len(keys), "all of them have been planned"
        assert 1 <= len(made) <= 3, made

    together({"n1": T4}, body)
