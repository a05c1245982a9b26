"""Tests of running jobs that follow a cluster whose nodes come and go, with real scheduling."""

from collections.abc import Iterator

import pytest

from dlcontract import CheckpointMark, RunPhase
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, wait_for
from support.cluster.live_job import SPEC, Play

pytestmark = pytest.mark.api
STEPS = 100_000


@pytest.fixture(scope="module")
def nodes(kubectl: Kubectl) -> Iterator[HollowNodes]:
    """Return two nodes with one GPU each. The test adds a third."""
    with HollowNodes(kubectl.namespace, 2, device=kubectl.namespace.replace("api", "hollow"), gpus=1) as found:
        yield found


def trains(play: Play, name: str, step: int) -> None:
    """Report steps that are slow enough for another node to be worth a restart."""
    mark = CheckpointMark(step=step, unix_s=1.0)
    step_s = 2 * play.plan(name).expected.step_s
    play.report(name, RunPhase.RUNNING, step=step, steps=STEPS, step_s=step_s, last_checkpoint=mark)


def test_job_grows_onto_a_node_that_joins_and_shrinks_when_it_is_gone(
    play: Play, nodes: HollowNodes, claim: str
) -> None:
    kubectl = play.kubectl
    play.submit(
        "elastic",
        model={"hints": {"parameters": 10_000, "flopsPerSample": 10**11}},
        dataset={"uri": "file:///made/by/the/script", "samples": 10**6},
        trainer={"command": ["python", "train.py"]},
        epochs=None, steps=STEPS, globalBatchSize=240, nodes={"min": 1, "max": 3}, parallelism={"strategy": "Data"},
        checkpoint={"volume": {"claimName": claim}}, scheduling={**SPEC["scheduling"], "startTimeout": "5s"},
    )  # fmt: skip
    play.until_ready("elastic", 2)
    trains(play, "elastic", 500)
    kubectl.wait_phase("elastic", "Running", 30)

    nodes.add(f"{kubectl.namespace}-2")

    def moves() -> bool:
        trains(play, "elastic", 600)
        return condition(kubectl.job("elastic"), "Resizing") is not None and play.plan("elastic").number == 2

    wait_for("the plan with three nodes", moves, 60)
    play.until_ready("elastic", 3)
    job = kubectl.job("elastic")
    assert job["status"]["plan"]["nodes"] == 3
    play.until_reported("elastic", "Resizing", "Resized", "to 3 x", "sooner")
    play.kubectl.wait_events("elastic", "BetterPlan", "Resized")

    # The place of a pod that is lost stays reserved: no other job takes it.
    kubectl.run("delete", "pod", "--wait=false", kubectl.list("pods", "dljob.dev/job=elastic")[0]["metadata"]["name"])
    play.submit("other", nodes={"min": 1, "max": 1})
    play.until_reported("other", "Planned", "DeviceBusy")
    play.until_ready("elastic", 3)
    kubectl.run("delete", "dljob", "other")

    trains(play, "elastic", 700)
    kubectl.wait_phase("elastic", "Running", 30)
    gone = nodes.names[-1]
    nodes.remove(gone)
    play.report("elastic", RunPhase.RESTARTING, step=700, steps=STEPS)
    play.until_reported("elastic", "PodsReady", "Unschedulable")
    wait_for("the plan with two nodes", lambda: play.plan("elastic").number == 3, 60)
    play.until_ready("elastic", 2)
    small = play.until_reported("elastic", "Resizing", "Resized", "from 3 x", "to 2 x", "startTimeout")
    assert not small["status"].get("startTimeouts"), "it has not released its nodes"
    play.kubectl.wait_events("elastic", "NodesGone")
    trains(play, "elastic", 800)
    kubectl.wait_phase("elastic", "Running", 30)
