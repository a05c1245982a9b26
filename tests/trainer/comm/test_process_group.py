"""Tests of the environment of a rank: CPU quotas, threads, imports, and messages to the agent."""

import os
import sys
from pathlib import Path

import pytest
import torch

from dltrain.comm.core.collective import host_array
from dltrain.host.cgroup import cpu_quota, threads
from dltrain.optim.grad_scaler import LossScale
from dltrain.optim.noise_scale import NoiseScale
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import Busy, Step
from dltrain.protocol.reporter import RankReporter
from dltrain.train.progress import Progress
from support.trainer.listener import Listener
from support.trainer.ranks import run

CORES = float(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "20000 100000"}, 0.2),
        ({"cpu.max": "max 100000"}, CORES),
        ({"cpu.max": "6400000 100000"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES),
        ({}, CORES),
    ],
    ids=["v2", "v2 without", "v2 above the cores", "v1", "v1 without", "no cgroup"],
)
def test_cpu_quota_is_read_from_the_cgroup(files: dict[str, str], cpus: float, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert cpu_quota(tmp_path) == cpus


def test_a_rank_has_at_least_one_thread() -> None:
    assert threads(1000) == 1


@pytest.mark.parametrize("value, expected", [("3", 3), ("3,2", 3), ("", 1), ("0", 1), ("all", 1)])
def test_omp_num_threads_sets_the_number_of_threads(value: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads(1000) == expected


def test_importing_dltrain_does_not_import_torch_or_mpi() -> None:
    ended = run([sys.executable, "-c", "import sys, dltrain; print({'torch', 'mpi4py', 'numpy'} & set(sys.modules))"])
    assert ended.output == "set()\n"


def test_error_names_dtype_that_cannot_be_reduced() -> None:
    message = (
        r"found parameters of torch\.bfloat16 on a CPU; expected float32.*torch\.autocast.*spec\.collective: Torch"
    )
    with pytest.raises(BadInputError, match=message):
        host_array(torch.zeros(2, dtype=torch.bfloat16))


def test_lost_agent_does_not_stop_training(tmp_path: Path) -> None:
    with Listener(tmp_path) as listener:
        reporter = RankReporter(listener.path)
        reporter.mark("imported")
    for _ in range(100):
        reporter.mark("rendezvous")
    reporter.close()


def test_progress_is_rate_limited_except_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    with Listener(tmp_path) as listener:
        reporter = RankReporter(listener.path)
        progress = Progress(reporter, 0, "cpu", NoiseScale(8), LossScale())
        assert progress.due(last=False), "the first step"
        progress.report_step(1, 9, 0, 0.1, 1.0, 8, 1)
        assert not progress.due(last=False) and progress.due(last=True)
        progress.end_epoch()
        assert progress.due(last=False), "the first step after a pause"
        listener.wait_for(Busy, 1)
        assert (len(listener.of(Step)), listener.of(Busy)[0].limit_s) == (1, 60)
        reporter.close()


def test_losses_between_progress_updates_are_averaged() -> None:
    progress = Progress(RankReporter(None), 1, "cpu", NoiseScale(8), LossScale())
    for loss in (1.0, 2.0, 6.0):
        progress.add_loss(loss)
    progress.report_step(3, 9, 0, 0.1, 1.0, 8, 2)
    assert progress.loss == 3.0
