"""Tests of launchers that only a Python of a rank can see: real interpreters, shells and torchrun, as in a pod.

Accelerate is no part of the test environment. A small package stands in for it, and starts processes as version 1.15.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlcontract import ModelRef
from dltrain.launch.rank_environment import STARTUP, framework_environment
from dltrain.startup.launchers import ACCELERATE_SCRIPT, script_command
from dltrain.startup.nested_launcher import EXIT_BAD_INPUT, launcher_command
from support.trainer.observed_scripts import variables
from support.trainer.plans import make_plan
from support.trainer.ranks import run_apart

WITHIN_S = 300
RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "pod-0", "MASTER_PORT": "29411"}
SCRIPT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
others = {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_"))}
print(json.dumps({"argv": sys.argv[1:], "rank": {k: os.environ.get(k) for k in names}, "others": others}))
"""
ACCELERATE = """
import argparse, os, subprocess

def launch_command_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config_file")
    for name in ("use_fsdp", "tpu", "module", "no_python"):
        parser.add_argument("--" + name, action="store_true")
    for name in ("num_processes", "num_machines"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser

def simple_launcher(args):
    env = {**os.environ, "ACCELERATE_USE_CPU": "False", "MASTER_ADDR": args.main_process_ip, "MASTER_PORT": "29500"}
    process = subprocess.Popen(["python", args.training_script], env=env)
    process.wait()

def multi_gpu_launcher(args):
    import torch.distributed.run as distrib_run
    os.environ.update({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "MASTER_PORT": "29500"})
    try:
        distrib_run.run(args)
    except Exception:
        raise SystemExit("caught")

def tpu_launcher(args):
    raise SystemExit("tpu")

def launch_command(args):
    if args.config_file and not os.path.isfile(args.config_file):
        raise FileNotFoundError(f"The passed configuration file `{args.config_file}` does not exist.")
    assert (args.num_processes, args.num_machines) == (2, 1) and "mpirun_hostfile" in args.nondefault
    {"tpu": tpu_launcher, "fsdp": multi_gpu_launcher, "": simple_launcher}[
        "tpu" if args.tpu else "fsdp" if args.use_fsdp else ""](args)

if __name__ == "__main__":
    raise SystemExit("accelerate launch runs")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a script, a shell script that starts it with torchrun, and a stand-in for Accelerate."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.sh").write_text("torchrun --nproc-per-node 2 --nnodes=1 train.py --lr 1\n")
    (tmp_path / "accelerate/commands").mkdir(parents=True)
    (tmp_path / "accelerate/__init__.py").touch()
    (tmp_path / "accelerate/commands/__init__.py").touch()
    (tmp_path / "accelerate/commands/launch.py").write_text(ACCELERATE)
    return tmp_path


def started(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    given = variables(None, PATH=path, **({"PYTHONPATH": f"{STARTUP}:{folder}"} | RANK | env))
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=WITHIN_S, check=False)


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "run.sh"],
        ["sh", "-c", "cd . && torchrun --nproc-per-node=2 train.py --lr 1"],
        ["sh", "-c", "python -W ignore -m torch.distributed.run --nproc-per-node=2 train.py --lr 1"],
        ["sh", "-c", "python -um torch.distributed.run train.py --lr 1"],
        [
            sys.executable,
            "-c",
            "import subprocess, sys; sys.exit(subprocess.call(['torchrun', 'train.py', '--lr', '1']))",
        ],
        ["sh", "-c", "python -m accelerate.commands.launch --num_processes 2 train.py --lr 1"],
    ],
)
def test_launcher_in_a_rank_runs_its_script_once(command: list[str], folder: Path) -> None:
    """Fixed bug: torchrun in a shell script started all ranks in each rank."""
    ended = started(command, folder)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    found = json.loads(line)
    assert (found["argv"], found["rank"], found["others"]) == (["--lr", "1"], RANK, {})


def test_launcher_is_replaced_although_the_job_has_a_sitecustomize_of_its_own(folder: Path) -> None:
    """Fixed bug: a sitecustomize in the job's PYTHONPATH replaced that of dljob, so that torchrun started all ranks."""
    (folder / "own").mkdir()
    (folder / "own/sitecustomize.py").write_text("import builtins\nbuiltins.own = 1\n")
    script = folder / "train.py"
    script.write_text(script.read_text() + "print(own)\n")
    job = make_plan(2, model=ModelRef(command=("sh", "run.sh"), framework="Torchrun"))
    base = {"PYTHONPATH": f"{folder}/own:{folder}"}
    env = framework_environment(job, job.ranks[1], "1.1", base, folder)
    ended = started(["sh", "run.sh"], folder, PYTHONPATH=env["PYTHONPATH"])
    first, second = ended.stdout.splitlines()
    assert json.loads(first)["rank"] == RANK and second == "1"


LAUNCHES = """
import sys
from torch.distributed.run import main
main(["--nproc-per-node", "2", *sys.argv[1:]])
"""
LOOKS_FIRST = """
import importlib.util
assert importlib.util.find_spec("torch.distributed.run") is not None
"""
AS_MAIN = """
import runpy, sys
sys.argv[1:1] = ["--nproc-per-node", "2"]
runpy.run_module("torch.distributed.run", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "fork"),
    [(LAUNCHES, False), (LAUNCHES, True), (LOOKS_FIRST + LAUNCHES, False), (LOOKS_FIRST + AS_MAIN, False)],
    ids=["interpreter", "fork", "looks for it first", "runs it as a program"],
)
def test_program_that_calls_torchrun_itself_runs_its_script_once(program: str, fork: bool, folder: Path) -> None:
    """Fixed bug: ``tune run`` and ``fabric run`` started all ranks in each rank, and these trained independently."""
    (folder / "launch.py").write_text(program)
    command = ["launch.py", "train.py", "--lr", "1"]
    if fork:
        env = variables(None, PYTHONPATH=str(STARTUP), **(RANK | {"RANK": "0"}))
        ended = run_apart(*command, env=env, cwd=folder)
    else:
        ended = started(["python", *command], folder, RANK="0")
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    found = json.loads(line)
    assert (found["argv"], found["rank"], found["others"]) == (["--lr", "1"], RANK | {"RANK": "0"}, {})
    assert "options about processes have no effect" in ended.stderr


def test_program_that_calls_distributed_launch_itself_passes_the_local_rank(folder: Path) -> None:
    """Fixed bug: its script got no argument, so that each rank took itself for local rank 0, or ended."""
    (folder / "launch.py").write_text(LAUNCHES.replace(".run import", ".launch import"))
    for options, expected in (([], ["--local-rank=1"]), (["--use-env"], [])):
        ended = started(["python", "launch.py", *options, "train.py", "--lr", "1"], folder, LOCAL_RANK="1")
        assert json.loads(ended.stdout)["argv"] == [*expected, "--lr", "1"], ended.stderr


def test_launcher_whose_file_a_fork_of_the_zygote_runs_is_replaced_too(folder: Path) -> None:
    env = variables(None, PYTHONPATH=str(STARTUP), **RANK)
    ended = run_apart("/opt/bin/torchrun", "--nproc-per-node", "2", "train.py", env=env, cwd=folder)
    (line,) = ended.stdout.splitlines()
    assert json.loads(line)["rank"] == RANK


@pytest.mark.parametrize(("release", "name"), [("2.13.0", "--local-rank"), ("1.13.1+cu117", "--local_rank")])
def test_distributed_launch_passes_the_local_rank_as_the_installed_torch_does(
    release: str, name: str, folder: Path
) -> None:
    (folder / f"torch-{release}.dist-info").mkdir()
    (folder / f"torch-{release}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {release}\n")
    ended = started(
        ["sh", "-c", "python -m torch.distributed.launch --nproc_per_node=8 train.py --lr 1"], folder, LOCAL_RANK="1"
    )
    assert json.loads(ended.stdout)["argv"] == [f"{name}=1", "--lr", "1"], ended.stderr


def test_options_without_effect_are_named_by_the_first_rank(folder: Path) -> None:
    ended = started(["sh", "run.sh"], folder, RANK="0")
    assert ended.stderr == (
        "trainer.command: found --nproc-per-node, --nnodes; these options have no effect, because the plan sets them\n"
    )


@pytest.mark.parametrize(("line", "words"), [("torchrun --new 1 a.py", "option --new of torchrun")])
def test_launcher_that_cannot_be_replaced_ends_the_rank(line: str, words: str, folder: Path) -> None:
    ended = started(["sh", "-c", f"{line} || exit $?"], folder)
    assert ended.returncode == EXIT_BAD_INPUT and words in ended.stderr and "Traceback" not in ended.stderr


def test_launcher_outside_a_rank_stays_itself(folder: Path) -> None:
    env = variables(None, PYTHONPATH=f"{STARTUP}:{folder}")
    command = [sys.executable, "-m", "accelerate.commands.launch", "train.py"]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert ended.stderr == "accelerate launch runs\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python train.py --launcher torchrun", None),
        ("python -m pytest torchrun", ("-m", "pytest", "torchrun")),
        ("python /opt/bin/torchrun a.py", ("-m", "torch.distributed.run", "a.py")),
        ("python -X dev -W ignore -u /opt/bin/accelerate-launch a.py", ("-m", "accelerate.commands.launch", "a.py")),
        ("python /bin/accelerate launch a.py", ("-m", "accelerate.commands.launch", "a.py")),
        ("python /bin/accelerate env", None),
        ("python -c accelerate", None),
        ("python", None),
    ],
)
def test_launchers_are_found_in_the_command_line_of_a_process(words: str, expected: tuple[str, ...] | None) -> None:
    found = launcher_command(words.split())
    assert found == (None if expected is None else (sys.executable, *expected))
    if found is not None and "pytest" in found:
        assert script_command(found).command == found


def test_deepspeed_in_a_shell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Use 'torchrun train\.py'"):
        script_command(launcher_command(["python", "/bin/deepspeed", "--num_gpus", "8", "train.py"]) or ())


def accelerate(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return started(
        [*script_command((sys.executable, "-m", "accelerate.commands.launch", *arguments)).command], folder, **env
    )


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        (["--use_fsdp"], {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
        (["--num_machines=3", "--config_file", "train.py"], {"ACCELERATE_USE_CPU": "False"}),
    ],
)
def test_script_gets_the_variables_of_accelerate_and_the_rank_of_the_plan(
    arguments: list[str], others: dict[str, str], folder: Path
) -> None:
    ended = accelerate(folder, *arguments, "train.py", "--lr", "1")
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert json.loads(line) == {"argv": ["--lr", "1"], "rank": RANK, "others": others}


def test_accelerate_is_asked_in_a_fork_of_the_zygote_too(folder: Path) -> None:
    env = variables(None, PYTHONPATH=f"{STARTUP}:{folder}", **RANK)
    ended = run_apart("-u", ACCELERATE_SCRIPT, "--use_fsdp", "train.py", "--lr", "1", env=env, cwd=folder)
    (line,) = ended.stdout.splitlines()
    found = json.loads(line)
    assert (found["argv"], found["rank"]) == (["--lr", "1"], RANK) and found["others"]["ACCELERATE_USE_FSDP"] == "true"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--unknown", "train.py"], "found options that the installed version does not have"),
        (["--config_file", "none.yaml", "train.py"], "none.yaml` does not exist"),
        (["--config_file", "train.py", "--tpu", "train.py"], "found a TPU or Amazon SageMaker"),
    ],
)
def test_command_that_accelerate_refuses_is_bad_input(arguments: list[str], words: str, folder: Path) -> None:
    ended = accelerate(folder, *arguments)
    assert ended.returncode == EXIT_BAD_INPUT and words in ended.stderr and "Traceback" not in ended.stderr


def test_image_without_accelerate_is_bad_input(folder: Path, tmp_path: Path) -> None:
    (folder / "accelerate/commands/launch.py").unlink()
    ended = accelerate(folder, "--use_fsdp", "train.py")
    assert ended.returncode == EXIT_BAD_INPUT and "found no Accelerate in the image" in ended.stderr
