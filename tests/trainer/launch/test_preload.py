"""Tests of what the zygote imports ahead (``launch.preload``), in one new interpreter for all of them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from support.trainer.ranks import environment

PRELOADED = """
import json, sys, threading
import torch

def fail(*_, **__):
    raise SystemExit("CUDA was touched before the fork")

places = [(torch.cuda, name) for name in (
    "is_available", "device_count", "_lazy_init", "init", "current_device", "get_device_properties")]
places += [(torch.accelerator, name) for name in ("is_available", "current_accelerator")]
own = [getattr(*place) for place in places]
for place in places:
    setattr(*place, fail)
from dltrain.launch.preload import preload
preload()
for place, function in zip(places, own):
    setattr(*place, function)
import mpi4py.MPI as MPI
found = {"mpi": MPI.Is_initialized(), "threads": threading.active_count()}

from dlcontract import OptimizerRef
from dltrain.optim.optimizers import make_optimizer
for name in ("SGD", "Adam", "AdamW"):
    model = torch.nn.Linear(3, 3)
    optimizer = make_optimizer(OptimizerRef(name=name), model)
    optimizer.register_step_pre_hook(lambda *_: None)
    for _ in range(2):
        optimizer.zero_grad(); model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
print(json.dumps(found | {"compiler": "torch._dynamo" in sys.modules}))
"""


@pytest.fixture(scope="module")
def preloaded() -> dict[str, Any]:
    """Return what an interpreter has started after the import ahead, and what its first steps have imported.

    It ends with an error if the import touches CUDA, because a fork could not use CUDA then.
    """
    command = [sys.executable, "-c", PRELOADED]
    env = environment(MPI4PY_MPIABI="openmpi")
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_preloading_does_not_initialize_cuda_before_fork(preloaded: dict[str, Any]) -> None:
    assert preloaded


def test_preloading_starts_neither_mpi_nor_threads(preloaded: dict[str, Any]) -> None:
    assert (preloaded["mpi"], preloaded["threads"]) == (False, 1)


def test_first_step_does_not_import_the_compiler(preloaded: dict[str, Any]) -> None:
    """The import would take 1.5 s of CPU time before the first step. See ``dltrain.optim.optimizers``."""
    assert preloaded["compiler"] is False
