"""Tests of values over all jobs that are computed again only if that takes little of the time."""

import asyncio
import gc
from unittest.mock import AsyncMock
from weakref import ref

from dljob.cluster import ClusterView
from dljob.controller.metrics import Metrics
from dljob.controller.planning.amortized import FACTOR, YIELD_EVERY, Amortized, OfEachJob, in_turns
from dljob.controller.planning.background import Planning
from dljob.controller.planning.possible_plans import KEPT_S, PossiblePlans
from dljob.controller.planning.reserving import FreeResources, Reserving
from dljob.job.observed import JobSeen
from dljob.job.plan.stored import StoredPlan
from dljob.kube import Cache, JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob, parse_observed
from dljob.scheduling import Reservation, ReservationBook
from support.builders import DIGITS, seen
from support.controller.fake_operator import LONG, SPEC, Operator, on_two_nodes, run_on
from support.servers.fake_api import FakeCluster

QUESTION = parse_observed(seen(DIGITS))


class Clock:
    def __init__(self, cost_s: float) -> None:
        self.now_s, self.cost_s, self.made = 0.0, cost_s, 0

    def __call__(self) -> float:
        return self.now_s

    def make(self) -> int:
        self.now_s += self.cost_s
        self.made += 1
        return self.made


def test_a_cheap_value_is_always_up_to_date() -> None:
    clock = Clock(0.0)
    value = Amortized(clock.make, clock)
    assert [value.of(state) for state in (1, 1, 2, 3)] == [1, 1, 2, 3]


def test_an_expensive_value_takes_a_small_part_of_the_time() -> None:
    clock = Clock(0.5)
    value = Amortized(clock.make, clock)
    for state in range(2000):
        value.of(state)
        clock.now_s += 0.1
    assert 0.5 * clock.made <= clock.now_s / FACTOR
    assert clock.made > 10, "but it is not forgotten"
    value.forget()
    before = clock.made
    value.of(0)
    assert clock.made == before + 1


def test_value_of_a_job_is_made_once_for_each_change_of_it() -> None:
    made: list[str] = []

    def make(job: JobSeen) -> str:
        made.append(job.name)
        return job.name

    values = OfEachJob(make)
    first, second = seen(DIGITS).job, seen(DIGITS | {"epochs": 9}).job
    assert first.key == second.key
    assert [values.of(job) for job in (first, first, second, second, first)] == [first.name] * 5
    assert len(made) == 3
    values.forget_others([("team-a", "unknown")])
    values.of(first)
    assert len(made) == 4


def test_values_of_jobs_keep_no_earlier_version_of_a_job_in_memory() -> None:
    values = OfEachJob(lambda job: job.name)
    job = seen(DIGITS).job
    earlier = ref(job)
    values.of(job)
    del job
    gc.collect()
    assert earlier() is None
    assert values.of(seen(DIGITS).job), "and a job that is gone is not an error"


def test_loop_over_all_jobs_lets_other_tasks_run() -> None:
    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(tick())
        assert [item async for item in in_turns(range(10 * YIELD_EVERY))] == [*range(10 * YIELD_EVERY)]
        other.cancel()
        assert ticks >= 9

    asyncio.run(main())


def test_view_of_what_is_free_takes_a_small_part_of_the_time() -> None:
    """With hundreds of pods and plans a second, it was made for each of them, for each job that asked."""
    clock, cache, book, made = Clock(0.0), Cache(), ReservationBook(patience_s=1e9), 0

    class Slow(Metrics):
        def __init__(self) -> None:
            super().__init__()
            self.reserved_pods = self  # type: ignore[assignment]

        def set(self, _: float) -> None:
            nonlocal made
            made += 1
            clock.now_s += 0.5

    free = FreeResources(cache, book, Reserving(cache, book, clock), Slow(), clock)
    one = Reservation("cpu", 1, 1, 1.0, 2**30)
    for i in range(2000):
        book.accept(("team-a", f"job-{i}"), (one,), clock.now_s)
        free.look()
        clock.now_s += 0.1
    assert made > 10 and 0.5 * made <= clock.now_s / FACTOR
    before, versions = made, free.versions()
    book.accept(("team-a", "last"), (one,), clock.now_s)
    free.look(fresh=True)
    assert made == before + 1 and free.versions() != versions and free.view is not None
    free.look(fresh=True)
    assert made == before + 1, "nothing has changed"


def test_order_of_many_questions_takes_a_small_part_of_the_time() -> None:
    """Each answer sorted all questions. With 800 of them, that took a seventh of the operator's time."""
    clock, sorts = Clock(0.0), 0
    planning = Planning(Cache(), AsyncMock(), lambda key: None, Metrics(), clock)

    def turn(key: JobKey) -> tuple[object, ...]:
        nonlocal sorts
        sorts += 1
        clock.now_s += 0.0001
        return (key,)

    planning._turn = turn  # type: ignore[method-assign]
    keys = [("team-a", f"job-{i:04}") for i in range(1000)]
    planning._asked = dict.fromkeys(reversed(keys), QUESTION)
    answered: list[JobKey] = []
    while planning._asked:
        answered.append(key := planning._next())
        del planning._asked[key]
        clock.now_s += 0.01
    assert answered == keys and 0.0001 * sorts <= clock.now_s / FACTOR
    planning._asked = dict.fromkeys(keys[5:7], QUESTION)
    assert planning._next() == keys[5], "an empty line is sorted at once"


def test_plans_on_parts_of_the_cluster_are_not_made_again_with_each_change() -> None:
    """The whole cluster is planned again after each change, because the predicted run time depends on it."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **LONG)
        await run_on(cluster, operator, running, "n1")
        key = cluster.submit("elastic", second=1, **{**SPEC, "nodes": {"min": 2, "max": 2}})
        await operator.watch(5.0)
        question = operator.planning._answers.for_devices()[key]
        whole, now_s, asked = operator.planning._queue.holdings.view_without(key, {running}), 0.0, list[ClusterView]()

        async def ask(question: ParsedJob, view: ClusterView) -> StoredPlan | Infeasible:
            asked.append(view)
            return await operator.planning._ask(question, view)

        plans = PossiblePlans(lambda: now_s)
        assert await plans.learn(question, whole, 1, ask, stop=lambda: False) and len(asked) == 2
        assert [each.pods.groups[0].nodes for each in plans.get(question)] == [2], "both are the same plan"
        assert await plans.learn(question, whole, 1, ask, stop=lambda: False) and len(asked) == 2
        assert await plans.learn(question, whole, 2, ask, stop=lambda: False) and asked[2:] == [whole]
        now_s = KEPT_S
        assert not await plans.learn(question, whole, 3, ask, stop=lambda: True), "stopped before the parts"
        assert await plans.learn(question, whole, 3, ask, stop=lambda: False) and len(asked) == 5

    on_two_nodes(body)
