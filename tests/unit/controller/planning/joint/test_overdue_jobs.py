"""A steady stream of short jobs does not keep a long job from starting."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dljob.controller.planning.joint.candidates import Candidates
from dljob.controller.planning.joint.state import PlanningState
from dljob.controller.planning.parsed_objects import PlansByJob
from dljob.kube import JobKey
from support.builders import NOW, T4, job
from support.controller.fake_operator import Operator
from support.controller.shared_devices import LONG, together
from support.controller.simulated_pool import SimulatedPool
from support.servers.fake_api import FakeCluster

MINUTE = timedelta(minutes=1)
SHORT_JOBS = 4
LIMIT_S = 3000.0
"""The long job is overdue after 900 s, and then waits for short jobs, which take 200 s each."""


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_long_job_starts_although_shorter_ones_come_all_the_time(nodes: int) -> None:
    """Fixed bug: with at least as many shorter jobs as devices, it waited for ever. ``nodes``: what it needs."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        pool, short = SimulatedPool(cluster, operator, {"n1": (T4, 1), "n2": (T4, 1)}), set[JobKey]()

        def submit() -> None:
            while len(short - pool.ended) < SHORT_JOBS:
                spec = {**LONG, "epochs": 20, "seed": len(pool.jobs)}
                short.add(pool.submit(f"short-{len(pool.jobs)}", "team-a", **spec))

        submit()
        long = pool.submit("long", "team-a", **{**LONG, "epochs": 40, "nodes": {"min": nodes, "max": nodes}})
        while not pool.holds(long):
            assert pool.elapsed_s < LIMIT_S, f"{len(pool.ended)} jobs have ended; {operator.message(long, 'Planned')}"
            submit()
            await pool.run()
        assert len(pool.ended) > SHORT_JOBS, "short jobs go first at the beginning"

    together({}, body)


def condition(kind: str, status: str, minutes: int) -> dict[str, Any]:
    at = (NOW + minutes * MINUTE).isoformat()
    return {"type": kind, "status": status, "reason": "Any", "message": "", "lastTransitionTime": at}


@pytest.mark.parametrize(
    ("conditions", "minutes"),
    [
        ([], 60),
        ([condition("Admitted", "True", 10)], 60),
        ([condition("Admitted", "False", 10)], 50),  # It was preempted then, for example.
        ([condition("Admitted", "False", 10), condition("Suspended", "True", 10)], 20),
    ],
)
def test_a_job_waits_since_it_was_created_stopped_or_resumed(conditions: list[Any], minutes: int) -> None:
    """The last job was resumed 40 minutes after its creation. Until it has pods, its status says that it is suspended."""
    cache: Any = SimpleNamespace()
    now = NOW + 40 * MINUTE
    candidates = Candidates(PlanningState(cache, cache, PlansByJob(), dict, lambda: 0.0, lambda: now))
    waiting = job(created=NOW, status={"conditions": conditions})
    candidates.waited_s(waiting)
    now = NOW + 60 * MINUTE
    assert candidates.waited_s(waiting) == minutes * 60
    candidates.forget_others(())
    assert candidates.waited_s(waiting) == (0 if len(conditions) == 2 else minutes * 60)
