"""Tests of commands that begin with a launcher: the agent starts their script itself."""

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from dlcontract import ModelRef, Plan, Rank
from dltrain.launch import rank_environment
from dltrain.launch.commands import rank_command
from dltrain.startup.launchers import (
    ACCELERATE_SCRIPT,
    TORCHRUN_FLAGS,
    TORCHRUN_VALUES,
    accelerate_configs,
    script_command,
)

SCRIPT = ("python", "-u", "train.py", "--epochs", "3")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py", ("python", "train.py")),
        ("python -m train --rank 0", ("python", "-m", "train", "--rank", "0")),
        ("torchrun train.py --epochs 3", SCRIPT),
        ("torchrun --standalone --nproc_per_node=gpu train.py --epochs 3", SCRIPT),
        ("torchrun --nnodes 1:4 --rdzv-endpoint=a:29500 --rdzv_backend c10d train.py --epochs 3", SCRIPT),
        ("torchrun -r 3 --tee 3 train.py --epochs 3", SCRIPT),
        ("torchrun -m pack.train --nnodes 3", ("python", "-u", "-m", "pack.train", "--nnodes", "3")),
        ("torchrun --no-python ./run.sh a", ("./run.sh", "a")),
        ("/opt/conda/bin/torchrun train.py", ("/opt/conda/bin/python", "-u", "train.py")),
        ("python3 -m torch.distributed.run --nnodes=2 train.py", ("python3", "-u", "train.py")),
        ("/usr/bin/python3 -u -m torch.distributed.run train.py", ("/usr/bin/python3", "-u", "train.py")),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=8 train.py --epochs 3", SCRIPT),
        ("torchrun --nproc_per_node=auto --rdzv-conf=a=b -- train.py --epochs 3", SCRIPT),
        ("accelerate launch train.py --epochs 3", SCRIPT),
        ("accelerate-launch train.py --epochs 3", SCRIPT),
        ("accelerate launch --num_cpu_threads_per_process 2 -- train.py --epochs 3", SCRIPT),
        ("accelerate launch --multi_gpu --num_processes 8 --main_process_ip a train.py --epochs 3", SCRIPT),
        ("python -m accelerate.commands.launch --num_machines=2 train.py --epochs 3", SCRIPT),
        ("python -m accelerate.commands.accelerate_cli launch --same_network train.py --epochs 3", SCRIPT),
        ("accelerate launch -m pack.train", ("python", "-u", "-m", "pack.train")),
        ("accelerate config", ("accelerate", "config")),
    ],
)
def test_script_is_started_without_its_launcher(command: str, expected: tuple[str, ...]) -> None:
    assert script_command(tuple(command.split())).command == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--nproc_per_node=2 train.py --epochs 3", "train.py --local-rank=1 --epochs 3"),
        ("--nnodes 2 -m pack.train --lr 1", "-m pack.train --local-rank=1 --lr 1"),
        ("--use-env train.py", "train.py"),
    ],
)
def test_distributed_launch_passes_the_local_rank_as_an_argument(options: str, expected: str) -> None:
    """Fixed bug: each rank of a script that reads this argument took itself for local rank 0.

    The agent leaves the command as it is, because the argument depends on the PyTorch of the image.
    """
    command = ("python", "-m", "torch.distributed.launch", *options.split())
    assert script_command(command, local_rank=lambda: "--local-rank=1").command == ("python", "-u", *expected.split())
    assert script_command(command).command == (("python", "-u", "train.py") if "env" in options else command)


def test_interpreter_is_that_of_the_launcher() -> None:
    assert script_command(("torchrun", "a.py"), lambda name: f"/venv/bin/{name}").command[0] == "/venv/bin/python"


def test_options_that_the_plan_overrides_are_named() -> None:
    found = script_command(("torchrun", "--nnodes=2", "--tee", "3", "--rdzv_id", "7", "a.py", "--master-port", "1"))
    assert found.overridden == ("--nnodes", "--rdzv-id")


def test_usual_options_of_accelerate_become_variables() -> None:
    options = ("--mixed_precision", "bf16", "--num-cpu-threads-per-process=3", "--cpu", "--dynamo_backend", "inductor")
    found = script_command(("accelerate", "launch", *options, "a.py"))
    assert found.env == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "3",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        "--use_fsdp train.py",
        "--config_file a.yaml train.py",
        "--mixed_precision fp8 train.py",
        "--num_processes 2 --use_deepspeed --zero_stage 2 train.py --lr 1",
        # Fixed bug: this became a variable, which accelerate launch sets for DeepSpeed only.
        "--gradient_accumulation_steps 4 train.py",
        "--unknown train.py",
        "--num_processes",
    ],
)
def test_accelerate_itself_is_asked_about_other_options(arguments: str) -> None:
    found = script_command(("/venv/bin/accelerate", "launch", *arguments.split()))
    assert found.command == ("/venv/bin/python", "-u", str(ACCELERATE_SCRIPT), *arguments.split())
    assert (found.env, found.overridden) == ({}, ())


def test_accelerate_is_asked_about_its_default_configuration_file(tmp_path: Path) -> None:
    """Fixed bug: the file was not read, so that a job trained without the FSDP that it asks for."""
    for command in (["accelerate", "launch", "a.py"], ["python", "-m", "accelerate.commands.launch", "a.py"]):
        plain = script_command(tuple(command), has_accelerate_config=lambda: False)
        asked = script_command(tuple(command), has_accelerate_config=lambda: True)
        assert (plain.command, asked.command[2:]) == (("python", "-u", "a.py"), (str(ACCELERATE_SCRIPT), "a.py"))
    on_cpus = script_command(("accelerate", "launch", "--cpu", "a.py"), has_accelerate_config=lambda: True)
    assert on_cpus.command == ("python", "-u", "a.py"), "accelerate launch --cpu does not read the file"
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").touch()
    job = plan(model=ModelRef(command=("accelerate", "launch", "a.py"), framework="Torchrun"))
    assert str(ACCELERATE_SCRIPT) in rank_command(job, {"HF_HOME": str(tmp_path)}).command
    assert str(ACCELERATE_SCRIPT) not in rank_command(job, {"HF_HOME": str(tmp_path / "other")}).command


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/hf"),
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/cache/huggingface"),
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface"),
    ],
)
def test_default_configuration_file_is_where_accelerate_looks(env: dict[str, str], folder: str) -> None:
    expected = tuple(f"{folder}/accelerate/default_config.{suffix}" for suffix in ("yaml", "json"))
    assert accelerate_configs(env) == expected


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("deepspeed --num_gpus 8 --no_ssh train.py --deepspeed", "Use 'torchrun train.py --deepspeed'"),
        ("/opt/bin/deepspeed --include=a:0 train.py", "Use 'torchrun train.py'"),
        ("torchrun", "found torchrun without a script"),
        ("torchrun --nnodes", "found torchrun without a script"),
        ("torchrun --new-option 3 train.py", "found the option --new-option of torchrun"),
        ("torchrun --use_env train.py", "found the option --use_env of torchrun"),
        ("python -m torch.distributed.launch --new 3 train.py", "found the option --new of torch.distributed.launch"),
        ("python -m torch.distributed.launch --no-python ./train.sh", "found --no-python without --use-env"),
    ],
)
def test_launcher_that_cannot_be_replaced_is_refused(command: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.command: found") as refusal:
        script_command(tuple(command.split()))
    assert words in str(refusal.value)


def test_options_of_the_installed_torchrun_are_known() -> None:
    values, flags = set(), set()
    for action in get_args_parser()._actions:
        names = {name.replace("_", "-") for name in action.option_strings} - {"-h", "--help", "--virtual-local-rank"}
        (flags if action.nargs == 0 or isinstance(action, argparse._StoreTrueAction) else values).update(names)
    assert values <= set(TORCHRUN_VALUES) and flags <= set(TORCHRUN_FLAGS)


def plan(**changes: object) -> Plan:
    ranks = tuple(
        Rank(rank=i, pod="p-0", host="h", group="cpu", device="cpu", local_rank=i, gpu=False, share=4) for i in range(2)
    )
    given = {"job": "j", "namespace": "n", "uid": "u-1", "number": 1, "ranks": ranks, "global_batch": 8, "epochs": 1}
    model, data = ModelRef(command=("a",), framework="Torchrun"), {"name": "iris"}
    return Plan.model_validate({**given, "model": model, "dataset": data, "backoff_limit": 2, **changes})


def test_scripts_get_what_torchrun_and_the_plan_say() -> None:
    known = plan()
    assert rank_environment.framework_environment(known, known.ranks[1], "1.3", {}, Path("/run")) == {
        "TORCHELASTIC_RUN_ID": "u-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "DLJOB_LOCAL_BATCH_SIZE": "4",
        "DLJOB_GLOBAL_BATCH_SIZE": "8",
        "DLJOB_CHECKPOINT_DIR": "/var/lib/dljob/checkpoints/j-u-1",
        "PYTHONPATH": str(rank_environment.STARTUP),
    }
    unknown = plan(batch_known=False, checkpoint={"enabled": False})
    assert set(rank_environment.framework_environment(unknown, unknown.ranks[0], "1.1", {}, Path("/run"))) == {
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "DLTRAIN_OBSERVE", "PYTHONPATH",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["off", "False", "no", "0"])
def test_user_switches_the_observer_of_rank_0_off(value: str) -> None:
    known, base = plan(), {"PYTHONPATH": "/mine"}
    observed = rank_environment.framework_environment(known, known.ranks[0], "1.1", base, Path("/run"))
    assert observed["PYTHONPATH"] == f"{rank_environment.STARTUP}:/mine" and observed["DLTRAIN_OBSERVE"] == "on"
    assert (rank_environment.STARTUP / "sitecustomize.py").is_file()
    base |= {"DLJOB_OBSERVE": value}
    found = rank_environment.framework_environment(known, known.ranks[0], "1.1", base, Path("/run"))
    assert "DLTRAIN_OBSERVE" not in found and found["PYTHONPATH"] == observed["PYTHONPATH"]


def test_plan_with_a_known_batch_is_written_as_before() -> None:
    assert "batch_known" not in plan().to_json()
    assert '"batch_known":false' in plan(batch_known=False).to_json()
