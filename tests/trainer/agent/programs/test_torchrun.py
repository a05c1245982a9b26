"""Tests of jobs for torchrun with real agents and ranks: the variables that scripts get, and launchers in commands."""

import os
import re
import shutil
from pathlib import Path

import pytest

from dlcontract import ModelRef, RunPhase
from dltrain.host.cgroup import threads
from support.trainer.pods import SHARED_MEMORY, Job, job
from support.trainer.ranks import SPEAKING

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
NO_TORCH = {"DLTRAIN_IMPORT_AHEAD": "off"}


def test_torchrun_scripts_get_torchrun_variables(two: Job) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    mpi = f"env | grep ^OMPI_ | grep -vc ^{SHARED_MEMORY}= || true"
    command = ["sh", "-c", f"for n in {names}; do eval echo $n=\\$$n; done; {mpi}"]
    two.start(two.plan(model=ModelRef(command=tuple(command), framework="Torchrun")), **NO_TORCH)
    two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    for rank, pod in enumerate(two.pods):
        variables = dict(re.findall(rf"\[rank {rank}\] (\w+)=(\S+)", pod.text()))
        assert variables == {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank),
            "GROUP_RANK": str(rank), "MASTER_ADDR": two.pods[0].address, "MASTER_PORT": "7599",
            "OMP_NUM_THREADS": str(threads(1)),
        }  # fmt: skip
        assert f"[rank {rank}] 0\n" in pod.text(), "there is no MPI in a torchrun job"


def test_torchrun_in_the_command_starts_each_rank_once() -> None:
    """The launcher would start all ranks once more in each process of the agent."""
    names = "RANK WORLD_SIZE LOCAL_RANK TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
    names += " DLJOB_LOCAL_BATCH_SIZE DLJOB_GLOBAL_BATCH_SIZE"
    options = ["--nnodes=7", "--nproc-per-node", "gpu", "--max-restarts=3", "--no-python"]
    script = ["sh", "-c", f"echo one rank; for n in {names}; do eval echo $n=\\$$n; done"]
    with job(1) as one:
        model = ModelRef(command=("torchrun", *options, *script), framework="Torchrun")
        one.start(one.plan(model=model, backoff_limit=5, per_pod=2), **NO_TORCH)
        report = one.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
        assert report.phase is RunPhase.SUCCEEDED, report.failure
        text = one.pods[0].text()
        assert text.count("] one rank\n") == 2
        assert "found --nnodes, --nproc-per-node, --max-restarts; these options have no effect" in text
        for rank in range(2):
            found = dict(re.findall(rf"\[rank {rank}\] (\w+)=(\S+)", text))
            assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == (str(rank), "2", str(rank))
            assert found["TORCHELASTIC_RESTART_COUNT"] == "0" and found["TORCHELASTIC_MAX_RESTARTS"] == "5"
            assert found["TORCHELASTIC_RUN_ID"]
            assert int(found["DLJOB_LOCAL_BATCH_SIZE"]) * 2 == int(found["DLJOB_GLOBAL_BATCH_SIZE"])


def test_log_names_variables_of_the_pod_that_the_ranks_do_not_get() -> None:
    """Fixed bug: those of spec.trainer.envFrom were replaced, and nothing said so. Only the pod knows its variables."""
    with job(1) as one:
        model = ModelRef(command=("sh", "-c", "echo found $RANK $MODE"), framework="Torchrun")
        one.start(one.plan(model=model, per_pod=2), **NO_TORCH, RANK="70", MASTER_PORT="s3cret", MODE="fast")
        report = one.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
        assert report.phase is RunPhase.SUCCEEDED, report.failure
        text = one.pods[0].text()
        assert "found 0 fast" in text and "found 1 fast" in text
        assert text.count("environment of the pod: found MASTER_PORT, RANK; expected other names") == 1, text
        assert "s3cret" not in text


@pytest.mark.long
def test_gan_trains_as_it_is(two: Job) -> None:
    """It has two optimizers, and a branch that some backward passes do not reach (``find_unused_parameters``)."""
    script = SPEAKING.replace("faults/speaking_rank", "training/gan_script")
    two.start(two.plan(model=ModelRef(command=("torchrun", script), framework="Torchrun")))
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED), 120.0)
    assert report.phase is RunPhase.SUCCEEDED, two.logs()
    found = [re.findall(r"sums of parameters (\S+ \S+)", pod.text()) for pod in two.pods]
    assert len(found[0]) == 1 and found[0] == found[1], "gradients of both networks are reduced"


LATE = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)
for _ in range(100):
    dist.all_reduce(torch.ones(1), async_op=True)
"""
"""Gloo's threads still need the interpreter when this script ends."""


def test_script_over_gloo_that_a_shell_starts_ends_without_an_abort(two: Job, tmp_path: Path) -> None:
    """Fixed bug: with an interpreter of its own, each rank aborted at its end in some runs."""
    (tmp_path / "train.py").write_text(LATE)
    model = ModelRef(command=("sh", "-c", f"python {tmp_path}/train.py"), framework="Torchrun")
    two.start(two.plan(model=model), **NO_TORCH)
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
    assert report.phase is RunPhase.SUCCEEDED, two.logs()


def test_deepspeed_launcher_is_refused_with_the_equivalent(two: Job) -> None:
    command = ("deepspeed", "--num_gpus", "8", "train.py", "--deepspeed_config", "z.json")
    two.start(two.plan(model=ModelRef(command=command, framework="Torchrun"), backoff_limit=3), **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.FAILED)
    assert report.failure is not None and (report.failure.reason, report.failure.retry) == ("BadInput", False)
    assert "'torchrun train.py --deepspeed_config z.json'" in report.failure.message


@pytest.mark.parametrize(
    ("framework", "command"),
    [
        ("Torchrun", ("torchrun", "train.py")),
        pytest.param("Torchrun", ("python", "-m", "train"), marks=pytest.mark.long),
        pytest.param("MPI", ("mpirun", "python", "train.py"), marks=pytest.mark.long),
    ],
    ids=["torchrun", "module", "mpi"],
)
def test_script_finds_its_folder_as_on_a_laptop(
    two: Job, tmp_path: Path, framework: str, command: tuple[str, ...]
) -> None:
    """The working directory of the pod, in which the files of ``trainer.source`` are, is the one of each rank."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("import os\nprint('found', os.getcwd(), flush=True)\n")
    (tmp_path / "train.py").write_text("import lib.helper\nopen('train.py').close()\n")
    for pod in two.pods:
        at = pod.command.index("sh")
        pod.command[at:at] = ["env", "-C", str(tmp_path)]
    two.start(two.plan(model=ModelRef(command=command, framework=framework)), **NO_TORCH)
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
    assert report.phase is RunPhase.SUCCEEDED, report.failure
    for rank, pod in enumerate(two.pods):
        assert f"[rank {rank}] found {tmp_path}\n" in pod.text()
