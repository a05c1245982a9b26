"""Tests of the collectives that the observer counts in scripts on two ranks over gloo, also those that C++ starts."""

from pathlib import Path

import pytest

from dltrain.observation.host_counting import operator_counts
from support.trainer.observed_scripts import observed

torch = pytest.importorskip("torch")

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)]
{model}
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    loss = model(torch.randn(32, 20)).square().mean()
    opt.zero_grad()
    loss.backward()
    {after}
    opt.step()
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
"""
PARALLEL = "model = DistributedDataParallel(nn.Sequential(*layers))"
UNUSED = (
    "layers.insert(1, nn.BatchNorm1d(64)); "
    "model = DistributedDataParallel(nn.Sequential(*layers), find_unused_parameters=True)"
)
SHARDED = """
mesh = init_device_mesh("cpu", (2,))
for each in (layers[0], layers[2]):
    fully_shard(each, mesh=mesh)
model = nn.Sequential(*layers)
fully_shard(model, mesh=mesh)
"""
LOSS = "dist.all_reduce(loss.detach().reshape(1)); dist.barrier()"
CLIPPED = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
PARAMETERS, NORM, BUFFERS = 20 * 64 + 64 + 64 * 2 + 2, 2 * 64, 4 * 2 * 64 + 8
Counts = dict[str, tuple[int, int]]


@pytest.mark.parametrize(
    ("model", "after", "expected"),
    [
        (PARALLEL, "pass", {"all_reduce": (1, 4 * PARAMETERS)}),
        (PARALLEL, LOSS, {"all_reduce": (2, 4 * PARAMETERS + 4), "barrier": (1, 0)}),
        # The statistics of the norm in one broadcast and its counter in another; a bitmap of six parameters.
        (UNUSED, "pass", {"broadcast": (2, BUFFERS), "all_reduce": (2, 4 * (PARAMETERS + NORM) + 4 * 6)}),
        # Each layer is gathered for both passes. Clipping reduces the norms of four gradients.
        (SHARDED, CLIPPED, {"all_gather": (4, 8 * PARAMETERS), "reduce_scatter": (2, 4 * PARAMETERS), "all_reduce": (1, 4 * 4)}),
    ],
    ids=["gradients", "and a loss", "buffers and unused parameters", "FSDP"],
)  # fmt: skip
def test_collectives_of_a_step_are_counted_by_kind(tmp_path: Path, model: str, after: str, expected: Counts) -> None:
    script = SCRIPT.format(store=tmp_path / "store", model=model, after=after)
    found, _ = observed(tmp_path, script, WORLD_SIZE="2")
    seen = found[0].collectives
    assert seen is not None and {each.kind: (each.count, each.nbytes) for each in seen} == expected
    assert found[0].host is not None and found[0].host.messages == sum(count for count, _ in expected.values())
    assert (found[0].host.distributed > 0) == (model is SHARDED)


def test_script_without_a_process_group_has_no_collectives(tmp_path: Path) -> None:
    counts = operator_counts()
    torch.ones(2).relu()
    assert counts.end() and counts.collectives == {}


def test_random_numbers_are_counted_as_elements() -> None:
    counts = operator_counts()
    torch.nn.functional.dropout(torch.ones(10, 7), 0.5)
    torch.rand(5)
    torch.empty(3).normal_()
    assert counts.end() and counts.counts is not None and counts.counts["drawn"] == 70 + 5 + 3
