"""Tests of queue.assignment: Together with a real scheduler and API server: a running job gives devices to another."""

from collections.abc import Iterator
from typing import Any

import pytest

from dlcontract import CheckpointMark, RunPhase
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, wait_for
from support.cluster.live_job import Play

pytestmark = pytest.mark.api
STEPS = 1_000_000


@pytest.fixture(scope="module")
def operator_environment() -> dict[str, str]:
    return {"DLJOB_QUEUE_ASSIGNMENT": "Together"}


@pytest.fixture(scope="module")
def nodes(kubectl: Kubectl) -> Iterator[HollowNodes]:
    """Return one node with four GPUs."""
    with HollowNodes(kubectl.namespace, 1, device=kubectl.namespace.replace("api", "hollow"), gpus=4) as found:
        yield found


def submit(play: Play, name: str, claim: str, steps: int) -> None:
    play.submit(
        name,
        model={"hints": {"parameters": 10_000, "flopsPerSample": 10**11}},
        dataset={"uri": "file:///made/by/the/script", "samples": 10**6},
        trainer={"command": ["python", "train.py"]},
        epochs=None, steps=steps, globalBatchSize=240, nodes={"min": 1, "max": 1}, parallelism={"strategy": "Data"},
        checkpoint={"volume": {"claimName": claim}},
    )  # fmt: skip


def gpus(kubectl: Kubectl, job: str) -> list[str]:
    """Return the GPU request of each pod of a job."""
    pods: list[dict[str, Any]] = kubectl.list("pods", f"dljob.dev/job={job}")
    return [pod["spec"]["containers"][0]["resources"]["requests"].get("nvidia.com/gpu", "0") for pod in pods]


def test_running_job_gives_half_of_its_devices_to_a_short_one(play: Play, claim: str) -> None:
    kubectl = play.kubectl
    submit(play, "long", claim, STEPS)
    play.until_ready("long", 1)
    assert gpus(kubectl, "long") == ["4"]
    submit(play, "short", claim, 2000)

    def gives_way() -> bool:
        plan = play.plan("long")
        mark = CheckpointMark(step=490, unix_s=1.0)
        play.report("long", RunPhase.RUNNING, step=500, steps=STEPS, step_s=plan.expected.step_s, last_checkpoint=mark)
        return condition(kubectl.job("long"), "Resizing") is not None

    wait_for("the long job to give way", gives_way, 60)
    play.until_reported("long", "Resizing", "Resized")
    play.kubectl.wait_events("long", "DevicesReassigned")
    play.until_ready("long", 1)
    play.until_ready("short", 1)
    assert (gpus(kubectl, "long"), gpus(kubectl, "short")) == (["2"], ["2"])
    long = kubectl.job("long")["status"]
    assert (long["failures"], long.get("preemptions", 0)) == (0, 0)
