"""Tests of a job when the zygote, the process that forks a pod's ranks, is killed or stopped."""

import os
import shutil
from pathlib import Path

import pytest

from dlcontract import RunPhase
from support.trainer.pods import KILL, STOP, Job, logged_rank
from support.trainer.ranks import speaking

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]


def test_zygote_killed_during_a_launch_is_no_missing_command(two: Job) -> None:
    two.start(two.plan(speaking("20", "mpi=1")))
    pod = two.pods[1]
    two.wait(pod.pids)
    sockets = Path(f"/proc/{pod.pids()[0]}/net/unix")
    two.wait(lambda: sockets.read_text().count("zygote.sock") > 1)  # The agent has asked; the zygote imports torch.
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pod.pids()}
    os.kill(next(pid for pid, line in commands.items() if "dltrain.launch.zygote" in line), KILL)
    report = two.until(lambda r: r.failure is not None)
    assert report.failure is not None and (report.failure.reason, report.failure.rank) == ("RankKilled", 1)
    assert "signal 9" in report.failure.log_tail
    assert two.until(lambda r: r.phase is RunPhase.SUCCEEDED).restarts == {"RankKilled": 1}


@pytest.mark.long
def test_stopped_zygote_does_not_keep_the_job_from_a_restart(two: Job) -> None:
    """Fixed bug: the pod waited forever for the ends of its ranks, which only the zygote learns."""
    two.start(two.plan(speaking("4000", "mpi=1")))
    two.until(lambda r: r.step >= 1)
    pod = two.pods[1]
    rank = logged_rank(pod, 1)
    zygote = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    assert "dltrain.launch.zygote" in Path(f"/proc/{zygote}/cmdline").read_text()
    os.kill(zygote, STOP)
    os.kill(rank, KILL)
    report = two.until(lambda r: r.restarts and r.phase is RunPhase.RUNNING)
    assert all(each.starts == 1 for each in two.pods), report
