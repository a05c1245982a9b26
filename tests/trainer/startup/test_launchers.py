"""Tests of commands that begin with a launcher: the agent starts their script itself."""

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from dlcontract import ModelRef, Plan, Rank
from dltrain.launch import rank_environment
from dltrain.startup.launchers import TORCHRUN_FLAGS, TORCHRUN_VALUES, script_command

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
        ("accelerate launch train.py --epochs 3", SCRIPT),
        ("accelerate launch --multi_gpu --num_processes 8 --main_process_ip a train.py --epochs 3", SCRIPT),
        ("python -m accelerate.commands.launch --num_machines=2 train.py --epochs 3", SCRIPT),
        ("accelerate config", ("accelerate", "config")),
    ],
)
def test_script_is_started_without_its_launcher(command: str, expected: tuple[str, ...]) -> None:
    assert script_command(tuple(command.split())).command == expected


def test_interpreter_is_that_of_the_launcher() -> None:
    assert script_command(("torchrun", "a.py"), lambda name: f"/venv/bin/{name}").command[0] == "/venv/bin/python"


def test_options_that_the_plan_overrides_are_named() -> None:
    found = script_command(("torchrun", "--nnodes=2", "--tee", "3", "--rdzv_id", "7", "a.py", "--master-port", "1"))
    assert found.overridden == ("--nnodes", "--rdzv-id")


def test_options_of_accelerate_become_variables() -> None:
    options = ("--mixed_precision", "bf16", "--gradient_accumulation_steps=4", "--cpu", "--dynamo_backend", "inductor")
    found = script_command(("accelerate", "launch", *options, "a.py"))
    assert found.env == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_USE_CPU": "true",
    }


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("deepspeed --num_gpus 8 --no_ssh train.py --deepspeed", "Use 'torchrun train.py --deepspeed'"),
        ("/opt/bin/deepspeed --include=a:0 train.py", "Use 'torchrun train.py'"),
        ("torchrun", "found torchrun without a script"),
        ("torchrun --nnodes", "found torchrun without a script"),
        ("torchrun --new-option 3 train.py", "found the option --new-option of torchrun"),
        ("accelerate launch --use_fsdp train.py", "found the option --use_fsdp of accelerate launch"),
        ("accelerate launch --config_file a.yaml train.py", "found the option --config_file of accelerate launch"),
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
    assert observed["PYTHONPATH"] == f"/mine:{rank_environment.STARTUP}" and observed["DLTRAIN_OBSERVE"] == "on"
    assert (rank_environment.STARTUP / "sitecustomize.py").is_file()
    base |= {"DLJOB_OBSERVE": value}
    found = rank_environment.framework_environment(known, known.ranks[0], "1.1", base, Path("/run"))
    assert "DLTRAIN_OBSERVE" not in found and found["PYTHONPATH"] == observed["PYTHONPATH"]


def test_plan_with_a_known_batch_is_written_as_before() -> None:
    assert "batch_known" not in plan().to_json()
    assert '"batch_known":false' in plan(batch_known=False).to_json()
