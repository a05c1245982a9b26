"""Tests of the observer with what DeepSpeed's ZeRO does: unused compiled functions, and ZeRO-3's empty parameters.

DeepSpeed is not part of the test environment. ``hack/test programs`` runs ``examples/programs/zero.py`` with it.
"""

from pathlib import Path

import pytest

from support.trainer.observed_scripts import MLP, loop, observed

PARTITIONED = f"""
{MLP}
whole = {{}}
def release():
    for p in model.parameters():
        p.data, p.grad = torch.empty(0), None
def gather(module, _):
    for p in module.parameters(recurse=False):
        p.data = whole[p]
for p in model.parameters():
    p.ds_numel, whole[p] = p.numel(), p.data
for layer in model:
    layer.register_forward_pre_hook(gather)
release()
shard = nn.Parameter(torch.zeros(100))
"""
"""Each layer gathers its parameters before it runs. The optimizer updates a part of all of them."""


def test_partitioned_parameters_count_as_a_whole(tmp_path: Path) -> None:
    """Fixed bug: the parameters were those of the rank's part, and no outer module seemed to be trained."""
    found, _ = observed(tmp_path, loop(model=PARTITIONED, optimizer="Adam([shard])", after="release()"))
    alone, _ = observed(tmp_path, loop())
    assert found[0].parameters == alone[0].parameters == 20 * 64 + 64 + 64 * 2 + 2
    assert found[0].samples == 32 and found[0].flops == pytest.approx(alone[0].flops)


def test_functions_that_deepspeed_compiles_for_another_optimizer_do_not_count(tmp_path: Path) -> None:
    """Fixed bug: no script with ZeRO was observed, because of functions that it never calls."""
    unused = f"""
{MLP}
import sys, types
library = types.ModuleType("deepspeed.runtime.zero.muon.original_muon")
library.first, library.second = (torch.compile(lambda x: x, backend=lambda graph, _: graph) for _ in range(2))
sys.modules[library.__name__] = library
"""
    found, _ = observed(tmp_path, loop(model=unused))
    assert found[0].samples == 32
    own = unused + "own = torch.compile(lambda x: x, backend=lambda graph, _: graph)"
    found, ended = observed(tmp_path, loop(model=own))
    assert not found and "uses torch.compile" in ended.stderr
