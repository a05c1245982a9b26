"""Tests of the memory that resuming needs, and of loading tensors one at a time."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dlcontract.checkpoint.parts import REAL_VIEWS
from dltrain.checkpoint.state import WeightLoader
from dltrain.checkpoint.tensor_file import NAMES, TensorFile
from support.trainer.ranks import BODIES, run_ranks

BODY = BODIES / "training/resume_memory.py"


def peaks(output: str) -> dict[tuple[str, int], float]:
    found = re.findall(r"(train|resume) rank (\d) peak ([\d.]+) bytes", output)
    return {(phase, int(rank)): float(peak) for phase, rank, peak in found}


@pytest.mark.mpi(2)
@pytest.mark.parametrize("strategy", ["Data", pytest.param("Optimizer", marks=pytest.mark.long)])
def test_resuming_needs_no_more_memory_than_training(strategy: str, tmp_path: Path) -> None:
    found: dict[tuple[str, int], float] = {}
    for _ in range(2):
        found |= peaks(run_ranks(2, BODY, "2", tmp_path, strategy, timeout_s=60).output)
    assert len(found) == 4, "both ranks have trained and resumed"
    # Pods of one device type have the same memory limit, so the rank that needs most decides.
    trained, resumed = (max(found[phase, rank] for rank in range(2)) for phase in ("train", "resume"))
    largest = 4 / 10  # bytes per parameter of the largest tensor, one of ten
    assert resumed <= trained + 2 * largest, found
    assert resumed <= 30, f"weights, gradients, their buffer and Adam's state need 20 bytes per parameter: {found}"


def test_tensors_of_a_file_are_read_one_at_a_time(tmp_path: Path) -> None:
    tensors = {str(d): torch.arange(6).reshape(2, 3).to(d) for d, name in NAMES.items() if name not in REAL_VIEWS}
    tensors |= {"none": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "t", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "t")
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = file.read(name)
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        assert back.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist(), name


class Doubled(nn.Linear):
    """A layer whose state dict holds twice its weight."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        return {name: 2 * tensor for name, tensor in state.items()}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            getattr(self, name).data.copy_(state_dict[prefix + name] / 2)


@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
def test_weights_are_loaded_in_place_unless_the_model_converts_them(kind: type[nn.Linear]) -> None:
    source, target = kind(3, 2), kind(3, 2)
    load, at = WeightLoader(target), target.weight.data_ptr()
    for name, tensor in source.state_dict().items():
        load(name, tensor.clone())
    assert torch.equal(target.weight, source.weight) is (kind is nn.Linear)
    load.finish()
    assert torch.equal(target.weight, source.weight) and torch.equal(target.bias, source.bias)
    assert target.weight.data_ptr() == at
