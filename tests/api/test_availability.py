"""Several operators at once: failover, a paused leader, and two releases for the same namespace."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster.kubectl import Kubectl, wait_for
from support.cluster.live_job import Play
from support.cluster.operator_process import OperatorProcess
from support.operator_forks.forked_operator import ForkedOperator

pytestmark = pytest.mark.api
LEADER = "dljob_operator_leader"
FAILOVER_S = 10.0
PAUSE_S = 60.0
"""Length of a long pause: four times as long as a Lease is valid, so that every request of the first has timed out."""


@pytest.fixture
def another(play: Play, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    made: list[OperatorProcess] = []

    def make(**env: str) -> OperatorProcess:
        found = ForkedOperator(
            play.kubectl.kubeconfig, play.kubectl.namespace, tmp_path / f"log{len(made)}", f"more-{len(made)}", **env
        )
        made.append(found)
        return found

    yield make
    for each in made:
        if each.running:
            each.send(signal.SIGCONT)
            each.stop(signal.SIGKILL)


def leads(operator: OperatorProcess) -> bool:
    return operator.metric(LEADER) == 1


def writes(kubectl: Kubectl, name: str) -> str:
    return str(kubectl.job(name)["metadata"]["resourceVersion"])


def posted(kubectl: Kubectl, name: str) -> dict[str, int]:
    """Return the number of times that each event of the job was posted, by the name of the event."""
    return {event["metadata"]["name"]: event.get("count", 1) for event in kubectl.events(name)}


def test_another_operator_leads_within_ten_seconds_of_a_crash(
    play: Play, operator: OperatorProcess, another: Callable[..., OperatorProcess]
) -> None:
    second = another()
    second.start()
    wait_for("the first to lead", lambda: leads(operator), 30)
    operator.stop(signal.SIGKILL)
    began = time.monotonic()
    try:
        wait_for("the second to lead", lambda: leads(second), 20)
        took_s = time.monotonic() - began
        assert took_s <= FAILOVER_S, f"failover took {took_s:.1f} s"
    finally:
        second.stop()
        operator.start()


def test_paused_leader_writes_nothing_after_it_resumes(
    play: Play, operator: OperatorProcess, another: Callable[..., OperatorProcess]
) -> None:
    second = another()
    second.start()
    wait_for("the first to lead", lambda: leads(operator), 30)
    play.run("paused")
    operator.send(signal.SIGSTOP)
    try:
        wait_for("the second to lead", lambda: leads(second), 20)
        play.patch("paused", suspend=True)
        play.kubectl.wait_phase("paused", "Suspended", 30)
        before = writes(play.kubectl, "paused")
    finally:
        operator.send(signal.SIGCONT)
    # The first has missed all these changes. It must find that it lost the Lease before it acts on its old view.
    wait_for("the first to notice", lambda: not leads(operator), 20)
    assert leads(second) and writes(play.kubectl, "paused") == before
    assert "not the leader" in operator.log or "no longer leads" in operator.log
    second.stop()
    wait_for("the first to lead again, without a restart", lambda: leads(operator), 20)
    play.patch("paused", suspend=False)
    play.until_ready("paused")
    play.kubectl.delete("dljob", "paused")


@pytest.mark.long
def test_leader_that_is_paused_for_a_minute_does_nothing_twice(
    play: Play, operator: OperatorProcess, another: Callable[..., OperatorProcess]
) -> None:
    """While it is paused, its successor suspends a job, ends one, starts one and changes the plan of another."""
    second = another()
    second.start()
    wait_for("the first to lead", lambda: leads(operator), 30)
    stopping, ending, growing, starting = names = [f"minute-{i}" for i in range(4)]
    play.run(stopping)
    play.run(ending)
    play.run(growing)
    until = time.monotonic() + PAUSE_S
    operator.send(signal.SIGSTOP)
    try:
        wait_for("the second to lead", lambda: leads(second), 20)
        play.patch(stopping, suspend=True)
        play.kubectl.wait_phase(stopping, "Suspended", 30)
        play.finish(ending)
        play.patch(growing, epochs=7)
        wait_for("the next plan", lambda: play.plan(growing).number == 2, 30)
        play.until_ready(growing)
        play.run(starting)
        wait_for("the end of the pause", lambda: time.monotonic() >= until, PAUSE_S)
        before = {name: writes(play.kubectl, name) for name in names}
        plans = {name: play.plan(name) for name in names}
        events = {name: posted(play.kubectl, name) for name in names}
    finally:
        operator.send(signal.SIGCONT)
    wait_for("the first to notice", lambda: not leads(operator), 20)
    assert leads(second)
    assert {name: writes(play.kubectl, name) for name in names} == before
    assert {name: play.plan(name) for name in names} == plans
    assert {name: posted(play.kubectl, name) for name in names} == events
    second.stop()
    wait_for("the first to lead again, without a restart", lambda: leads(operator), 20)
    play.patch(stopping, suspend=False)
    play.until_ready(stopping)
    for name in names:
        play.kubectl.delete("dljob", name)


def test_second_release_for_the_namespace_waits_and_says_why(
    play: Play, operator: OperatorProcess, another: Callable[..., OperatorProcess]
) -> None:
    """Fixed bug: it acted on the same jobs, or waited forever while it was ready."""
    wait_for("the first to lead", lambda: leads(operator), 30)
    other = another(DLJOB_LEASE_NAME="other-release")
    other.start(ready=False)
    wait_for("the reason", lambda: "already manages" in other.readiness(), 40, lambda: other.log)
    assert not leads(other) and play.kubectl.namespace in other.readiness()
    assert operator.stop() == 0
    try:
        wait_for("the other release to lead", lambda: leads(other), 40)
    finally:
        other.stop()
        operator.start()
