"""Tests of the units of strategy Sharded, in one process."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dltrain.parallel.pytorch.sharded_units import UnitCommunication, shard

WIDTH, LENGTH = 8, 5


class Positions(nn.Module):
    """Adds a buffer, whose type is float32, before layers of the unit of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.norms = nn.Sequential(nn.LayerNorm(WIDTH), nn.GroupNorm(1, LENGTH), nn.RMSNorm(WIDTH))
        self.register_buffer("places", torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(self.norms(self.enter(x) + self.places))
        return out


class Stem(nn.Module):
    """Has BatchNorm, so that the unit of the whole model is gathered in float32, and a unit in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)
        self.blocks, self.leave = nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.leave(x)
        return out


class Encoder(nn.Module):
    """A layer of PyTorch with attention, and a float32 mask that its forward pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.leave = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        out: Tensor = self.leave(self.layer(x + torch.zeros(LENGTH, 1), mask))
        return out


class Times(nn.Module):
    """Computes high frequencies of its input, such as an embedding of continuous times."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave((1000 * x).sin())
        return out


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield DeviceMesh.from_group(distributed.group.WORLD, "cpu")  # type: ignore[arg-type]
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [Positions, Stem, Encoder, Times])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_with_float32_buffers_train_and_are_evaluated_in_16_bits(
    kind: type[nn.Module], dtype: torch.dtype, mesh: DeviceMesh
) -> None:
    """Fixed bugs: a LayerNorm after a float32 buffer ended the script, and so did evaluations without autocast. The
    inputs of the model were rounded, which autocast does not do.
    """
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, LENGTH, WIDTH)
    model(x)  # BatchNorm then has statistics.
    model.eval()
    exact = model(x).detach()
    shard(model, mesh, UnitCommunication(), 64, dtype)
    for given, has_gradients in ((dtype, True), (dtype, False), (torch.float32, False)):
        with torch.autocast("cpu", dtype) if given == dtype else nullcontext(), torch.set_grad_enabled(has_gradients):
            out = model(x)
        assert out.dtype == given, "outside of autocast, outputs have the type that other strategies give them"
        assert (out.float() - exact).norm() < 0.03 * exact.norm()
        if has_gradients:
            out.float().sum().backward()
    assert not torch.is_autocast_enabled("cpu")
    assert all(p.dtype == torch.float32 and p.grad is not None for p in model.parameters())


def test_outputs_of_units_can_change_in_place(mesh: DeviceMesh) -> None:
    """Fixed bug: the output of Linear for inputs of 3 dimensions is a view. Its change in place dropped the hook that
    gathers the unit in the backward pass, which ended with an error of torch about a storage of size 0.
    """
    torch.manual_seed(0)
    layers = [[nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)] for _ in range(3)]
    layers[-1].pop()
    model, x = nn.Sequential(*(layer for pair in layers for layer in pair)), torch.randn(6, LENGTH, WIDTH)
    model(x).relu_().square().mean().backward()
    exact = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    shard(model, mesh, UnitCommunication(), 64, None)
    model(x).relu_().square().mean().backward()
    for parameter, gradient in zip(model.parameters(), exact, strict=True):
        assert isinstance(parameter.grad, DTensor) and torch.allclose(parameter.grad.to_local(), gradient)
