"""Tests of elastic scripts for torchrun, with real agents, and ranks that reduce with gloo."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dlcontract import ModelRef, Plan, Report, RunPhase
from support.trainer.pods import Job, Pod
from support.trainer.ranks import SPEAKING

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
SCRIPT = SPEAKING.replace("faults/speaking_rank", "scripts/elastic_script")
QUICK = {"DLTRAIN_SHRINK_AFTER_S": "2"}
START_S = 120.0
"""Time limit for starts of ranks, which import torch."""


def elastic(job: Job, *options: str, min_ranks: int = 1) -> Plan:
    command = ("torchrun", SCRIPT, str(job.directory), *options)
    return job.plan(model=ModelRef(command=command, framework="Torchrun", elastic=True), min_ranks=min_ranks)


def starts(pod: Pod) -> list[tuple[int, ...]]:
    """Return (rank, number of ranks, step, samples of all ranks, global batch, restarts) of each start in a pod."""
    found = re.findall(r"rank (\d+) of (\d+) starts at step (\d+), batch (\d+) of (\d+), restarts (\d+)", pod.text())
    return [tuple(map(int, numbers)) for numbers in found]


def waits(pod: Pod) -> bool:
    """Return True if the agent of a pod obeys the coordinator of a job that runs without this pod."""
    try:
        return "the job is in the phase Running" in pod.get("/readyz")[1]
    except OSError:
        return False


def running_on(size: int) -> Callable[[Report], bool]:
    def is_so(report: Report) -> bool:
        return report.phase is RunPhase.RUNNING and report.world_size == size

    return is_so


def saved_step(job: Job) -> int:
    """Let the script save a checkpoint. Return its step."""
    (job.directory / "save").touch()
    job.wait(lambda: not (job.directory / "save").exists())
    [file] = Path(job.checkpoints).glob("*/step")
    return int(file.read_text())


def wait_for_start(pod: Pod, job: Job, count: int) -> tuple[int, ...]:
    job.wait(lambda: len(starts(pod)) >= count, START_S)
    return starts(pod)[count - 1]


def test_elastic_script_goes_on_without_a_lost_pod_and_grows_at_its_next_checkpoint(three: Job) -> None:
    three.start(elastic(three), **QUICK)
    wait_for_start(three.pods[0], three, 1)
    step = saved_step(three)
    three.pods[1].kill()
    report = three.until(running_on(2), START_S)
    assert report.restarts == {"PodLost": 1} and report.failures == 0 and not report.refused_sizes
    assert wait_for_start(three.pods[0], three, 2) == (0, 2, step, 60, 60, 1)
    assert wait_for_start(three.pods[2], three, 2) == (1, 2, step, 60, 60, 1), "ranks are numbered without a gap"

    three.pods[1].start(**QUICK)
    three.wait(lambda: waits(three.pods[1]))
    assert three.until(running_on(2)).restarts == {"PodLost": 1}, "a script without a new checkpoint is not disturbed"
    later = saved_step(three)
    back = three.until(running_on(3), START_S)
    assert later > step and wait_for_start(three.pods[1], three, 2)[:4] == (1, 3, later, 60)
    assert back.restarts == {"PodLost": 1} and back.failures == 0 and back.term == report.term
    (three.directory / "end").touch()
    three.until(lambda r: r.phase is RunPhase.SUCCEEDED)


@pytest.mark.long
def test_number_of_ranks_that_the_script_refuses_is_tried_once(three: Job) -> None:
    three.start(elastic(three, "refused=2").model_copy(update={"backoff_limit": 0}), **QUICK)
    wait_for_start(three.pods[0], three, 1)
    step = saved_step(three)
    three.pods[2].kill()
    report = three.until(lambda r: r.refused_sizes, START_S)
    [refused] = report.refused_sizes
    assert refused.ranks == 2 and "ValueError: this script needs an odd number of ranks, not 2" in refused.message
    assert report.phase is RunPhase.RESTARTING and report.failures == 0 and report.failure is not None
    assert "it had only 2 of 3 ranks, so the job waits for the lost pods" in report.failure.message

    three.pods[2].start(**QUICK)
    assert wait_for_start(three.pods[0], three, 2)[:3] == (0, 3, step), "the job goes on with all pods"
    again = three.until(running_on(3))
    assert again.failures == 0 and again.refused_sizes == report.refused_sizes
    (three.directory / "end").touch()
    three.until(lambda r: r.phase is RunPhase.SUCCEEDED)


@pytest.mark.long
def test_elastic_script_goes_on_without_its_first_pod(three: Job) -> None:
    three.start(elastic(three, min_ranks=2), **QUICK)
    wait_for_start(three.pods[0], three, 1)
    step = saved_step(three)
    three.pods[0].kill()
    report = three.until(running_on(2), START_S)
    assert report.restarts == {"CoordinatorLost": 1} and report.failures == 0 and report.term == 2
    assert wait_for_start(three.pods[1], three, 2)[:4] == (0, 2, step, 60)
    three.pods[0].start(**QUICK)
    assert wait_for_start(three.pods[0], three, 2)[1] == 3
