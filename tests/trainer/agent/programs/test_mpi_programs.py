"""Tests of jobs with framework MPI, with real agents and ranks: mpi4py, Horovod's API, launchers, failures, restarts."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from dlcontract import CheckpointRef, ModelRef, Plan, RunPhase
from support.trainer.pods import Job, job
from support.trainer.ranks import BODIES, alone, run

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
NO_TORCH = {"DLTRAIN_IMPORT_AHEAD": "off"}
ENDED = (RunPhase.SUCCEEDED, RunPhase.FAILED)
ALLREDUCE = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
print("rank", world.rank, "of", world.size, "sum", world.allreduce(world.rank + 1), flush=True)
names = "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK PMIX_RANK RANK DLJOB_CHECKPOINT_DIR"
for name in names.split():
    print(f"{name}={os.environ[name]}", flush=True)
"""


def mpi(made: Job, *command: str, per_pod: int = 1, **fields: object) -> Plan:
    """Return a plan for an MPI program, without a dataset that the ranks would read and without a known batch."""
    model = ModelRef(command=command, framework="MPI")
    return made.plan(model=model, per_pod=per_pod, batch_known=False, **fields)


def test_mpi4py_has_all_ranks_of_all_pods(two: Job) -> None:
    """The launcher in the command starts nothing, so the world has 4 ranks and not 4 worlds of 4 ranks."""
    launcher = ("mpirun", "--allow-run-as-root", "-np", "9", "-x", "LEVEL=debug", "-mca", "btl_tcp_if_include", "eth7")
    two.start(mpi(two, *launcher, "python", "-c", ALLREDUCE, per_pod=2), **NO_TORCH)
    report = two.until(lambda r: r.phase in ENDED)
    assert report.phase is RunPhase.SUCCEEDED, report.failure
    text = "".join(pod.text() for pod in two.pods)
    assert (
        "found -np, -mca btl_tcp_if_include; these options have no effect, because the plan sets 4 ranks on 2 nodes"
        in text
    )
    assert sorted(re.findall(r"\] rank (\d) of 4 sum 10", text)) == ["0", "1", "2", "3"]
    for rank in range(4):
        found = dict(re.findall(rf"\[rank {rank}\] (\w+)=(\S+)", text))
        numbers = [found[name] for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK")]
        assert numbers == [str(rank)] * 3
        assert (found["OMPI_COMM_WORLD_SIZE"], found["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("4", str(rank % 2))
        assert found["DLJOB_CHECKPOINT_DIR"] == f"{two.checkpoints}/test-{two.plan().uid}"


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        pytest.param(("sh", "-c", 'exec "$0" -c "$1"', sys.executable), NO_TORCH, marks=pytest.mark.long),
        (("python", "-m", "mpi4py", "-c"), {}),
        pytest.param(("python", "-u", "-c"), {}, marks=pytest.mark.long),
    ],
    ids=["another interpreter", "mpi4py's own way to run", "preloaded interpreter"],
)
def test_program_joins_the_world_however_it_starts(command: tuple[str, ...], environment: dict[str, str]) -> None:
    """Its two ranks share a pod, and so a process that has imported torch."""
    with job(1) as one:
        one.start(mpi(one, *command, ALLREDUCE, per_pod=2), **environment)
        report = one.until(lambda r: r.phase in ENDED)
        assert report.phase is RunPhase.SUCCEEDED, report.failure
        assert sorted(re.findall(r"\] rank (\d) of 2 sum 3", one.pods[0].text())) == ["0", "1"]


def test_horovod_script_computes_what_one_process_computes(tmp_path: Path) -> None:
    body = str(BODIES / "training/scripts/horovod_script.py")
    ended = run(alone("-m", "dltrain.local", body, str(tmp_path / "one.pt")), OMP_NUM_THREADS="1")
    assert ended.code == 0 and "size 1, lr 0.0125" in ended.output, ended.output
    with job(1) as made:
        made.checkpoints.chmod(0o777)
        path = made.checkpoints / "two.pt"
        made.start(mpi(made, "horovodrun", "-np", "2", "python", body, str(path), per_pod=2))
        report = made.until(lambda r: r.phase in ENDED)
        assert report.phase is RunPhase.SUCCEEDED, report.failure
        assert "size 2, lr 0.0125" in made.pods[0].text()
        torch.testing.assert_close(torch.load(path), torch.load(tmp_path / "one.pt"))


FAILING = """
import os, pathlib, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
mark = pathlib.Path(os.environ["DLJOB_CHECKPOINT_DIR"]) / f"mark-{world.rank}"
if mark.exists():
    world.Barrier()
    print("resumed", flush=True)
    sys.exit()
mark.parent.mkdir(parents=True, exist_ok=True)
mark.write_text("")
world.Barrier()
if world.rank == 1:
    FAILURE
world.Barrier()
"""


@pytest.mark.parametrize(
    ("failure", "reason", "code", "words"),
    [
        pytest.param(
            "raise RuntimeError('broken input')", "RankFailed", 1, "RuntimeError: broken input", marks=pytest.mark.long
        ),
        pytest.param("sys.exit(7)", "RankFailed", 7, "", marks=pytest.mark.long),
        pytest.param("world.Abort(5)", "RankFailed", 5, "", marks=pytest.mark.long),
        ("os.kill(os.getpid(), 9)", "RankKilled", 137, ""),
    ],
    ids=["exception", "exit", "abort", "kill"],
)
def test_failed_rank_restarts_all_ranks_and_the_program_resumes(
    two: Job, failure: str, reason: str, code: int, words: str
) -> None:
    """The other rank waits in a barrier, and the failed one would wait for it in MPI_Finalize."""
    two.checkpoints.mkdir(parents=True, exist_ok=True)
    two.checkpoints.chmod(0o777)
    plan = mpi(two, "python", "-c", FAILING.replace("FAILURE", failure), backoff_limit=1)
    two.start(plan, **NO_TORCH)
    failed = two.until(lambda r: r.failure is not None)
    assert failed.failure is not None
    found = (failed.failure.reason, failed.failure.rank, failed.failure.exit_code)
    assert found == (reason, 1, code), failed.failure
    assert words in failed.failure.log_tail
    report = two.until(lambda r: r.phase in ENDED)
    assert report.phase is RunPhase.SUCCEEDED and report.failures == 1, report.failure
    assert all("] resumed\n" in pod.text() for pod in two.pods)


@pytest.mark.parametrize(
    ("command", "framework", "words"),
    [
        (("mpirun", "-n", "2", "./a", ":", "-n", "2", "./b"), "MPI", "found several programs after mpirun"),
        (("sh", "-c", "mpirun -n 4 ./a"), "MPI", "found mpirun inside a shell command"),
        (("mpirun", "-n", "2", "./a"), "Torchrun", "Set trainer.framework: MPI"),
    ],
)
def test_launcher_that_would_start_other_ranks_is_refused(command: tuple[str, ...], framework: str, words: str) -> None:
    with job(1) as one:
        model = ModelRef.model_validate({"command": command, "framework": framework})
        one.start(one.plan(model=model, backoff_limit=3), **NO_TORCH)
        report = one.until(lambda r: r.phase is RunPhase.FAILED)
        assert report.failure is not None and (report.failure.reason, report.failure.retry) == ("BadInput", False)
        assert words in report.failure.message


def test_mpirun_in_a_script_is_refused() -> None:
    """The script is not in the command, so only its call of mpirun shows that it starts ranks."""
    with job(1) as one:
        script = one.directory / "run.sh"
        script.write_text("set -e\nmpirun -n 4 echo nested\n")
        one.start(mpi(one, "sh", str(script), per_pod=2), **NO_TORCH)
        report = one.until(lambda r: r.phase is RunPhase.FAILED)
        assert report.failure is not None and (report.failure.reason, report.failure.retry) == ("BadInput", False)
        assert "found mpirun in a program that every rank runs" in report.failure.log_tail
        assert "nested\n" not in one.pods[0].text()


def test_program_without_checkpoints_has_no_folder_for_them() -> None:
    with job(1) as one:
        program = ("sh", "-c", "echo folder ${DLJOB_CHECKPOINT_DIR-none}")
        one.start(mpi(one, *program, checkpoint=CheckpointRef(enabled=False)), **NO_TORCH)
        one.until(lambda r: r.phase is RunPhase.SUCCEEDED)
        assert "[rank 0] folder none\n" in one.pods[0].text()
