"""Tests of the process that makes plans: its answers, and what the operator does when it crashes or hangs."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from dljob.controller.planning.answers import PlanningError
from dljob.controller.planning.process import PlannerProcess
from dljob.controller.planning.worker import State, Task
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible, Learned
from dljob.reconcile import parse_observed
from dljob.reconcile.planning.make_plan import decide, question
from support.builders import CONFIG, CPUS, MIXED, nodes, seen

QUESTION = question(parse_observed(seen()))
EXPECTED = decide(parse_observed(seen()), CONFIG)
CRASHES = "import os; os._exit(3)"
HANGS = "import sys; sys.stdin.buffer.read()"
BABBLES = "import sys; sys.stdout.buffer.write((8).to_bytes(8) + b'nonsense'); sys.stdout.flush(); sys.stdin.read()"


def ask(body: Callable[[PlannerProcess], Awaitable[Any]], *command: str, limit_s: float = 60.0) -> tuple[Any, int]:
    """Run ``body`` with a planner. Return its result and how often the process failed."""
    failures: list[None] = []

    async def main() -> Any:
        more = {"command": (sys.executable, *command)} if command else {}
        planner = PlannerProcess(CONFIG, lambda: failures.append(None), limit_s, **more)
        try:
            return await body(planner)
        finally:
            await planner.close()

    return asyncio.run(main()), len(failures)


def test_answers_equal_those_of_the_planner() -> None:
    async def body(planner: PlannerProcess) -> list[Any]:
        await planner.start()
        few = nodes({"name": "n", "count": 1, "cpu": 2, "memory": "4Gi"})
        views = (CPUS, CPUS, few, MIXED, CPUS)
        return [await planner.plan(QUESTION, view, {}) for view in views]

    found, failures = ask(body)
    assert failures == 0 and found[0] == found[1] == found[4] == EXPECTED
    assert isinstance(found[2], Infeasible) and isinstance(found[3], StoredPlan) and found[3] != EXPECTED


def test_plan_that_crosses_the_border_is_stored_in_the_same_form() -> None:
    found, _ = ask(lambda planner: planner.plan(QUESTION, CPUS, {}))
    assert isinstance(found, StoredPlan) and isinstance(EXPECTED, StoredPlan) and found.data() == EXPECTED.data()
    stored = replace(QUESTION, accepted=StoredPlan.parse(found.data()))
    assert ask(lambda planner: planner.plan(stored, CPUS, {}))[0].data() == found.data(), "the plan has not changed"


@pytest.mark.parametrize(
    ("program", "words", "limit_s"),
    [
        (CRASHES, "process that makes plans ended", 60.0),
        (HANGS, "longer than", 0.5),
        (BABBLES, "process that makes plans ended", 60.0),
    ],
    ids=["crash", "hang", "nonsense"],
)
def test_broken_process_is_an_error_and_is_replaced(program: str, words: str, limit_s: float) -> None:
    async def body(planner: PlannerProcess) -> None:
        for _ in range(2):
            with pytest.raises(PlanningError, match=words):
                await planner.plan(QUESTION, CPUS, {})
            assert planner._process is None

    assert ask(body, "-c", program, limit_s=limit_s)[1] == 2


def test_process_that_was_killed_is_replaced() -> None:
    async def body(planner: PlannerProcess) -> Any:
        await planner.plan(QUESTION, CPUS, {})
        assert planner._process is not None
        planner._process.kill()
        await planner._process.wait()
        return await planner.plan(QUESTION, CPUS, {})

    assert ask(body) == (EXPECTED, 0), "the new process gets the configuration and all nodes again"


def test_cancelled_question_ends_the_process() -> None:
    """Otherwise the next question would get the answer of this one."""

    async def body(planner: PlannerProcess) -> None:
        task = asyncio.create_task(planner.plan(QUESTION, CPUS, {}))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert planner._process is None
        assert await planner.plan(QUESTION, CPUS, {}) == EXPECTED

    ask(body)


def test_error_in_the_planner_does_not_end_the_process() -> None:
    async def body(planner: PlannerProcess) -> Any:
        with pytest.raises(PlanningError, match="AssertionError"):
            await planner.plan(replace(QUESTION, digest=None), CPUS, {})
        process = planner._process
        assert process is not None and await planner.plan(QUESTION, CPUS, {}) == EXPECTED
        return planner._process is process

    assert ask(body) == (True, 0)


def test_only_changes_cross_the_border() -> None:
    planner, profiles = PlannerProcess(CONFIG), dict[tuple[str, str], Learned]()
    first = planner._task(QUESTION, MIXED, profiles)
    assert len(first.nodes) == len(MIXED.nodes) and first.config is CONFIG and first.profiles == {}
    again = planner._task(QUESTION, MIXED, profiles)
    assert again.nodes == () and again.gone == () and again.config is None and again.profiles is None
    changed = replace(MIXED, nodes=(replace(MIXED.nodes[0], free_devices=0), *MIXED.nodes[2:]))
    third = planner._task(QUESTION, changed, {})
    assert [node.free_devices for node in third.nodes] == [0] and third.gone == (MIXED.nodes[1].name,)
    state = State()
    for task in (first, again, third):
        state.answer(Task(task.question, task.nodes, task.gone, task.profiles, task.config))
    assert sorted(state.nodes) == sorted(node.name for node in changed.nodes)


def test_process_imports_only_the_core() -> None:
    program = (
        "import sys, dljob.controller.planning.worker; "
        "print(*(name for name in ('kopf', 'aiohttp', 'prometheus_client', 'dljob.kube') if name in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == ""
