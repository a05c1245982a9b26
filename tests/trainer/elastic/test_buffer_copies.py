"""Tests of undoing changes of a model's buffers after an abandoned step."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dltrain.elastic.buffer_copies import BufferCopies


class Net(nn.Module):
    """A model with a persistent, a transient, an empty and a shared buffer."""

    mask: torch.Tensor
    cache: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(2, 2), persistent=False)
        self.register_buffer("cache", None)
        self.twin = nn.Module()
        self.twin.register_buffer("mean", self.norm.running_mean)


def in_place(net: Net) -> None:
    net.norm(torch.randn(5, 3))


def other_shape(net: Net) -> None:
    net.register_buffer("mask", torch.zeros(4, 4))


def other_tensor(net: Net) -> None:
    net.norm.running_mean = torch.full((3,), 7.0)


def with_graph(net: Net) -> None:
    net.mask = net.mask * nn.Parameter(torch.ones(2, 2))


def new_buffer(net: Net) -> None:
    net.register_buffer("rotary", torch.zeros(8))
    net.cache = torch.zeros(3)


def removed(net: Net) -> None:
    del net.mask


@pytest.mark.parametrize("change", [in_place, other_shape, other_tensor, with_graph, new_buffer, removed])
def test_any_change_of_buffers_is_undone(change: Callable[[Net], None]) -> None:
    net = Net()
    before, names = dict(net.named_buffers()), list(net.state_dict())
    values = {name: buffer.clone() for name, buffer in before.items()}
    copies = BufferCopies(net)
    change(net)
    copies.restore()
    after = dict(net.named_buffers())
    assert list(net.state_dict()) == names and after.keys() == before.keys() and net.cache is None
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)
    assert net.twin.mean is net.norm.running_mean
