"""Tests of the end of gloo's threads: real scripts in interpreters of their own, as a shell in a pod starts them.

Gloo's threads need a turn of the interpreter after each collective. The scripts here give them none before their end,
so that the threads meet an exiting interpreter in every run, and not only in some.
"""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dltrain.launch.rank_environment import STARTUP
from support.trainer.observed_scripts import variables

ROOT = Path(__file__).resolve().parents[3]
WITHIN_S = 300
TRIES = 10
"""Runs of which one aborts at least. On a busy machine, threads may have a turn before the interpreter ends."""
LATE = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)
for _ in range(100):
    dist.all_reduce(torch.ones(1), async_op=True)
"""
"""The threads still have to drop tensors when this script ends."""
DESTROYED = "kept = dist.group.WORLD\ndist.destroy_process_group()\n"
"""A model with DistributedDataParallel refers to its group in the same way."""
ELSEWHERE = "sys.kept = dist.group.WORLD\ndist.destroy_process_group()\n"
ENDS = {"group": "", "destroyed group": DESTROYED, "group of another module": ELSEWHERE}


def run(script: str, path: str = str(STARTUP)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    env = variables(None, PYTHONPATH=path)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=WITHIN_S, check=False)


def test_script_aborts_without_the_startup_folder() -> None:
    """If this fails, PyTorch or Python has corrected the fault, and newer versions do not need ``gloo_threads``."""
    for _ in range(TRIES):
        ended = run(LATE, path="")
        if ended.returncode == -signal.SIGABRT:
            break
    assert "terminate called without an active exception" in ended.stderr, ended.returncode


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_script_ends_as_it_should(end: str) -> None:
    ended = run(LATE + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_exit_code_and_error_of_the_script_stay() -> None:
    assert run(LATE + "sys.exit(3)").returncode == 3
    ended = run(LATE + "raise ValueError('wrong')")
    assert ended.returncode == 1 and ended.stderr.endswith("ValueError: wrong\n"), ended.stderr


FAKE = """
import sys, types
class Distributed(types.ModuleType):
    initialized = True
    def is_initialized(self):
        return self.initialized
    def get_backend{config}(self):
        return {backends!r}
    def destroy_process_group(self):
        self.initialized = False
        print("destroyed")
sys.modules["torch.distributed"] = Distributed("torch.distributed")
"""


@pytest.mark.parametrize(
    ("config", "backends", "ends"),
    [
        ("_config", "cpu:gloo,cuda:gloo", True),
        ("", "gloo", True),
        ("_config", "cpu:gloo,cuda:nccl", False),
        ("", "nccl", False),
    ],
)
def test_only_groups_over_gloo_alone_are_destroyed(config: str, backends: str, ends: bool) -> None:
    """PyTorch before 2.0 has no ``get_backend_config``."""
    ended = run(FAKE.format(config=config, backends=backends))
    assert (ended.returncode, ended.stderr, "destroyed" in ended.stdout) == (0, "", ends)


def test_fork_of_a_script_does_not_wait_for_threads_that_it_does_not_have() -> None:
    fork = "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n"
    ended = run(FAKE.format(config="", backends="gloo") + fork)
    assert (ended.returncode, ended.stdout) == (0, "destroyed\n"), ended.stderr


def test_script_without_gloo_keeps_its_variables() -> None:
    script = "import torch\nfrom dltrain.startup import gloo_threads\nkept = [1]\ngloo_threads.end_gloo_threads()\nprint(kept)"
    ended = run(script, path=str(ROOT / "trainer-image"))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[1]\n", "")


@pytest.mark.parametrize("package", ["startup", "observation"])
def test_code_for_any_image_is_python_3_8(package: str) -> None:
    for path in (ROOT / "trainer-image/dltrain" / package).rglob("*.py"):
        ast.parse(path.read_text(), str(path), feature_version=(3, 8))
