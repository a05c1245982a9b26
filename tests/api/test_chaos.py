"""Jobs complete while requests of two operators are refused, lost and delayed, and operators are killed or paused.

The seed of the faults' order is the environment variable DLJOB_CHAOS_SEED. ``benchmarks/cluster/chaos.py`` does the same
to real pods and their nodes, for as long as wanted.
"""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

import pytest

from dlcontract import RunPhase
from support.chaos.cluster_faults import disturbed, full_quota, killed, paused
from support.chaos.faulty_api import DISTURBANCES, Disturbance, FaultyApi
from support.chaos.watcher import Watcher, none_left
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, KubectlError, wait_for
from support.cluster.live_job import Play
from support.cluster.operator_process import OperatorProcess
from support.operator_forks.forked_operator import ForkedOperator

pytestmark = pytest.mark.api
SEED = int(os.environ.get("DLJOB_CHAOS_SEED", "1"))
STEPS = 100
FAULT_S = 1.0
"""Least seconds of a fault."""
JOB_EVERY = 4
"""A job is submitted after this number of faults, so that faults meet jobs of all ages."""


@pytest.fixture
def pair(kubectl: Kubectl, tmp_path: Path) -> Iterator[tuple[tuple[OperatorProcess, FaultyApi], ...]]:
    """Two operators, each with a proxy of its own."""
    made = []
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        api = FaultyApi(kubectl.kubeconfig, folder, SEED + i)
        api.start()
        made.append((ForkedOperator(str(api.kubeconfig), kubectl.namespace, folder / "log", f"chaos-{i}"), api))
    for one, _ in made:
        one.start()
    yield tuple(made)
    for one, api in made:
        one.kill()
        api.stop()


class Trainers:
    """Plays the trainers of all jobs: each look, every running job makes one more step of ten."""

    def __init__(self, play: Play) -> None:
        self._play, self.steps = play, dict[str, int]()

    def advance(self, names: list[str]) -> bool:
        """Let each job whose pods are ready report a later step. Return True once all are Complete."""
        complete = 0
        for name in names:
            status = self._play.kubectl.job(name).get("status", {})
            if status.get("phase") == "Complete":
                complete += 1
                continue
            planned = (status.get("plan") or {}).get("nodes")
            ready = [p for p in self._play.kubectl.list("pods", f"dljob.dev/job={name}") if _ready(p)]
            if planned is None or len(ready) < planned:
                continue
            step = self.steps[name] = min(self.steps.get(name, 0) + 10, STEPS)
            try:
                if step == STEPS:
                    self._play.succeed(name)
                else:
                    self._play.report(name, RunPhase.RUNNING, step=step, step_s=0.01)
            except (KubectlError, AssertionError):
                continue  # The plan or the report is not there yet.
        return complete == len(names)


def _ready(pod: dict[str, object]) -> bool:
    status = pod.get("status")
    return isinstance(status, dict) and any(
        c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", [])
    )


def lasting(
    fault: Disturbance | str, one: OperatorProcess, api: FaultyApi, kubectl: Kubectl
) -> AbstractContextManager[None]:
    """Return a fault of an operator, of its requests or of the namespace, which lasts while the context is open."""
    if isinstance(fault, Disturbance):
        return disturbed(api, fault)
    return {"kill": lambda: killed(one), "pause": lambda: paused(one), "quota": lambda: full_quota(kubectl)}[fault]()


def test_jobs_complete_whatever_happens_to_requests_and_operators(
    kubectl: Kubectl, nodes: HollowNodes, pair: tuple[tuple[OperatorProcess, FaultyApi], ...]
) -> None:
    random = Random(SEED)
    play = Play(kubectl, nodes.device)
    trainers = Trainers(play)
    watcher = Watcher(kubectl)
    watcher.start()
    faults: list[Disturbance | str] = [*DISTURBANCES, "kill", "pause", "quota"]
    random.shuffle(faults)
    names: list[str] = []
    log: list[str] = []
    for i, fault in enumerate(faults):
        if i % JOB_EVERY == 0:
            names.append(f"chaos-{i}")
            play.submit(names[-1], nodes={"min": 1, "max": 2})
        one, api = pair[random.randrange(2)]
        log.append(f"{fault if isinstance(fault, str) else fault.name} of {one.port}")
        with lasting(fault, one, api, kubectl):
            deadline = time.monotonic() + FAULT_S
            while time.monotonic() < deadline:
                trainers.advance(names)
    wait_for(
        "all jobs to complete", lambda: trainers.advance(names), 90,
        lambda: f"seed {SEED}, faults {log}: {[kubectl.describe_job(name) for name in names]}",
    )  # fmt: skip
    wait_for(
        "an event of every transition", lambda: not watcher.missing_events(), 30, lambda: str(watcher.missing_events())
    )
    assert {name: kubectl.job(name)["status"].get("restarts", 0) for name in names} == dict.fromkeys(names, 0)
    for name in names:
        kubectl.delete("dljob", name)
    none_left(kubectl, 60)
    watcher.stop()
    assert not watcher.violations, f"seed {SEED}, faults {log}: {watcher.violations}"
    assert all(one.running for one, _ in pair)


@pytest.mark.long
def test_event_that_was_forbidden_is_written_later(
    kubectl: Kubectl, nodes: HollowNodes, pair: tuple[tuple[OperatorProcess, FaultyApi], ...]
) -> None:
    """Fixed bug: the operator dropped it, so nothing but the status said that a job was complete."""
    [refused] = [found for found in DISTURBANCES if found.name == "events refused"]
    play = Play(kubectl, nodes.device)
    for _, api in pair:
        api.begin(refused)
    play.run("unheard")
    play.finish("unheard")
    assert not play.kubectl.events("unheard")
    for _, api in pair:
        api.end()
    play.kubectl.wait_events("unheard", "Complete", "Running")
    kubectl.delete("dljob", "unheard")
