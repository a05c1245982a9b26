"""Tests of the operators of tests/api, which are forks of a process that has imported the operator."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dljob.kube.kinds import DLJOB
from support.cluster.kubectl import wait_for
from support.operator_forks.forked_operator import ForkedOperator
from support.servers.threaded_api import ThreadedApiServer, threaded_api

WITHIN_S = 60.0
CREATED = "2026-01-01T00:00:00Z"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ThreadedApiServer]:
    with threaded_api(tmp_path) as found:
        yield found


@pytest.fixture
def operator(api: ThreadedApiServer, tmp_path: Path) -> Iterator[Callable[..., ForkedOperator]]:
    """Return a function that makes an operator, which uses a server in memory."""
    made: list[ForkedOperator] = []

    def make(**env: str) -> ForkedOperator:
        made.append(ForkedOperator(str(api.kubeconfig), "team-a", tmp_path / f"log-{len(made)}", **env))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def test_fork_is_an_operator_that_signals_pause_end_and_kill(operator: Callable[..., ForkedOperator]) -> None:
    one = operator(DLJOB_WATCH_SILENCE_SECONDS="7")
    one.start(within_s=WITHIN_S)
    assert b"DLJOB_WATCH" not in Path(f"/proc/{one.pid}/environ").read_bytes(), "it is a fork"
    wait_for("it to lead", lambda: one.metric("dljob_operator_leader") == 1, WITHIN_S, lambda: one.log)
    one.send(signal.SIGSTOP)
    state = Path(f"/proc/{one.pid}/stat")
    wait_for("it to be stopped", lambda: state.read_text().rpartition(")")[2].split()[0] == "T", WITHIN_S)
    one.send(signal.SIGCONT)
    assert one.running and one.stop() == 0 and not one.running, one.log
    one.start(within_s=WITHIN_S)
    assert one.stop(signal.SIGKILL) == -signal.SIGKILL


def test_planner_answers_and_ends_with_its_operator(
    operator: Callable[..., ForkedOperator], api: ThreadedApiServer
) -> None:
    one = operator()
    one.start(within_s=WITHIN_S)
    spec = {"model": {"name": "digits-cnn"}, "dataset": {"name": "digits"}, "globalBatchSize": 60, "epochs": 5}
    api.put(
        DLJOB,
        {
            "metadata": {"name": "some", "namespace": "team-a", "generation": 1, "creationTimestamp": CREATED},
            "spec": spec,
        },
    )

    def planned() -> str | None:
        conditions = api.job("some").get("status", {}).get("conditions", ())
        return next((str(each["reason"]) for each in conditions if each["type"] == "Planned"), None)

    reason = wait_for("the planner's answer", planned, WITHIN_S, lambda: one.log)
    assert reason == "TooFewNodes", "there are no nodes"
    planner = next(pid for pid in children(one.pid) if b"forked_planner.py" in command_line(pid))
    assert one.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_for("the planner's end", lambda: b"forked_planner.py" not in command_line(planner), WITHIN_S)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(number) for task in tasks for number in task.read_text().split()]


def command_line(pid: int) -> bytes:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""


def test_wrong_setting_ends_the_fork_with_one_line(operator: Callable[..., ForkedOperator]) -> None:
    one = operator(DLJOB_WATCH_SILENCE_SECONDS="soon")
    one.start(ready=False)
    wait_for("its end", lambda: not one.running, WITHIN_S)
    assert one.log.startswith("dljob-operator: ") and one.log.count("\n") == 1
