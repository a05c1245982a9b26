"""Tests of commands that begin with mpirun, mpiexec or horovodrun: each rank runs their program."""

from pathlib import Path

import pytest

from dlcontract import ModelRef, Plan, Rank
from dltrain.launch import commands, rank_environment
from dltrain.launch.mpi_launchers import mpi_script_command
from dltrain.launch.zygote import MPI_PROGRAM_ENV

PROGRAM = ("python", "train.py", "-n", "3")


@pytest.mark.parametrize(
    "launcher",
    [
        "mpirun -n 4",
        "/usr/local/bin/mpirun --np 4 -H a:2,b:2 --",
        "mpirun.openmpi -np 4 --hostfile=/etc/mpi/hostfile --map-by slot --bind-to none --allow-run-as-root",
        "mpirun -np 2 --allow-run-as-root -bind-to none -map-by slot -x LD_LIBRARY_PATH -mca pml ob1 -mca btl ^openib",
        "mpiexec -n 4 -ppn 2 -f hosts -genvall",
        "horovodrun -np 4 -H a:2,b:2 --verbose --gloo",
    ],
)
def test_program_is_started_without_its_launcher(launcher: str) -> None:
    found = mpi_script_command((*launcher.split(), *PROGRAM))
    assert found is not None and (found.command, found.env) == (PROGRAM, {})


@pytest.mark.parametrize("command", ["python train.py", "sh -c ./run.sh", "/app/train --mpirun 3", "torchrun a.py", ""])
def test_other_commands_have_no_mpi_launcher(command: str) -> None:
    assert mpi_script_command(tuple(command.split())) is None


def test_exported_variables_and_parameters_reach_the_ranks() -> None:
    options = "-x A=b=c -x PATH --mca coll_tuned_use_dynamic_rules 1 -mca mpi_show_mca_params all"
    found = mpi_script_command(("mpirun", *options.split(), "./a.out"))
    assert found is not None and found.overridden == ()
    assert found.env == {
        "A": "b=c",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_mpi_show_mca_params": "all",
    }
    found = mpi_script_command(("mpiexec", "-genv", "A", "b", "./a.out"))
    assert found is not None and found.env == {"A": "b"}


def test_options_of_horovodrun_become_variables() -> None:
    options = "--fusion-threshold-mb 32 --cycle-time-ms=3.5 --timeline-filename /tmp/t.json"
    found = mpi_script_command(("horovodrun", "-np", "2", *options.split(), "python", "a.py"))
    assert found is not None and found.env == {
        "HOROVOD_FUSION_THRESHOLD": "33554432", "HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_TIMELINE": "/tmp/t.json",
    }  # fmt: skip


def test_options_that_the_plan_overrides_are_named() -> None:
    options = "-np 8 -H a,b --oversubscribe --tag-output -mca btl_tcp_if_include eth0 -mca plm_rsh_agent rsh -np 8"
    found = mpi_script_command(("mpirun", *options.split(), "./a.out", "-np", "3"))
    assert found is not None and found.env == {}
    assert found.overridden == ("-np", "-H", "--oversubscribe", "-mca btl_tcp_if_include", "-mca plm_rsh_agent")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("mpirun",), "found mpirun without a program"),
        (("mpirun", "-n"), "found mpirun without a program"),
        (("mpirun", "-mca", "btl"), "found mpirun without a program"),
        (("mpirun", "-n", "1", "./a", ":", "-n", "2", "./b"), "found several programs after mpirun"),
        (("mpirun", "--wdir", "/a", "./a"), "found the option --wdir of mpirun"),
        (("mpirun", "--tag-output=yes", "./a"), "found the option --tag-output=yes of mpirun"),
        (("horovodrun", "--min-np", "2", "python", "a.py"), "found the option --min-np of horovodrun"),
        (("sh", "-c", "cd /app && mpirun -n 4 ./a"), "found mpirun inside a shell command"),
        (("/bin/bash", "-ec", "/usr/bin/horovodrun -np 4 python a.py"), "found horovodrun inside a shell command"),
    ],
)
def test_launcher_that_cannot_be_replaced_is_refused(command: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.command: found") as refusal:
        mpi_script_command(command)
    assert words in str(refusal.value)


def plan(framework: str, *command: str, **changes: object) -> Plan:
    ranks = tuple(
        Rank(rank=i, pod="p-0", host="h", group="cpu", device="cpu", local_rank=i, gpu=False, share=4) for i in range(2)
    )
    given = {"job": "j", "namespace": "n", "uid": "u-1", "number": 1, "ranks": ranks, "global_batch": 8, "epochs": 1}
    model = ModelRef.model_validate({"command": command, "framework": framework})
    return Plan.model_validate({**given, "model": model, "dataset": {"name": "iris"}, **changes})


def test_launcher_inside_mpirun_is_replaced_too() -> None:
    found = commands.rank_command(
        plan("MPI", *["mpirun", "-n", "2", "-x", "A=b", "torchrun", "--nnodes", "2", "--no-python", "./a"])
    )
    assert (found.command, found.env, found.overridden) == (("./a",), {"A": "b"}, ("-n", "--nnodes"))


def test_mpirun_needs_a_framework_with_mpi() -> None:
    assert commands.rank_command(plan("DLTrain", "mpirun", "-n", "2", "./a")).command == ("./a",)
    with pytest.raises(ValueError, match=r"trainer\.framework: MPI"):
        commands.rank_command(plan("Torchrun", "mpirun", "-n", "2", "./a"))


def test_mpi_programs_get_settings_of_mpi_and_of_the_plan() -> None:
    known, base = plan("MPI", "./a"), {"PATH": "/bin", "LD_LIBRARY_PATH": "/opt/lib", "OMPI_MCA_smsc": "xpmem"}
    found = rank_environment.framework_environment(known, known.ranks[0], "1.1", base, Path("/run"))
    assert found.pop("LD_LIBRARY_PATH") == f"/opt/lib:{commands.bin_dir().parent / 'lib'}"
    assert found == {
        "PATH": "/run/refused-launchers:/bin",
        MPI_PROGRAM_ENV: str(commands.bin_dir().parent / "lib/libmpi.so.40"),
        "MPI4PY_MPIABI": "openmpi",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "DLJOB_LOCAL_BATCH_SIZE": "4",
        "DLJOB_GLOBAL_BATCH_SIZE": "8",
        "DLJOB_CHECKPOINT_DIR": "/var/lib/dljob/checkpoints/j-u-1",
        "DLTRAIN_OBSERVE": "on",
        "PYTHONPATH": str(rank_environment.STARTUP),
    }


def test_scripts_with_the_dltrain_api_get_no_variables_of_other_frameworks() -> None:
    known = plan("DLTrain", "./a")
    assert rank_environment.framework_environment(known, known.ranks[0], "1.1", {}, Path("/run")) == {}
