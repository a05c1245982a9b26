"""Tests of models whose parameters have no memory at first: their values are those of a model in main memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.init import orthogonal_ as imported_by_name

from dltrain.models import NAMES, InputShape, build
from dltrain.models.deferred import deferred, initial_values

IMAGES, TOKENS = InputShape((3, 32, 32), 10), InputShape((128,), 256, tokens=True)
SHAPES = {name: TOKENS if name == "gpt-mini" else IMAGES for name in NAMES}


def with_views() -> nn.Module:
    """Return a model that fills a view of a parameter, and one in several steps."""
    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.Linear(3, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_().mul_(0.1).clamp_(-0.1, 0.1)
        model[1].weight[1:3].uniform_()  # type: ignore[index, operator, union-attr]
    return model


def assert_equal_values(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    whole, after = make(), torch.rand(1)
    torch.manual_seed(3)
    model = deferred(make)
    values = initial_values(model)
    assert values is not None and all(parameter.is_meta for parameter in model.parameters())
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    for name, tensor in reversed([*model.named_parameters(), *model.named_buffers()]):
        found = torch.full(tensor.shape, torch.nan).to(tensor.dtype)
        values.fill(name, found)
        assert torch.equal(found, expected[name]), name
    assert torch.equal(torch.rand(1), after), "the random generator is as after the creation in main memory"


@pytest.mark.parametrize("name", SHAPES)
def test_values_of_a_deferred_model_are_bit_identical(name: str) -> None:
    assert_equal_values(lambda: build(name, SHAPES[name]))


def test_a_deferred_model_may_fill_views_and_fill_twice() -> None:
    assert_equal_values(with_views)


def test_values_follow_the_dtype_of_the_model() -> None:
    torch.manual_seed(3)
    whole = build("mlp", IMAGES).double()
    torch.manual_seed(3)
    model = deferred(lambda: build("mlp", IMAGES)).double()
    values = initial_values(model)
    assert values is not None
    for name, parameter in model.named_parameters():
        found = torch.empty(parameter.shape, dtype=parameter.dtype)
        values.fill(name, found)
        assert torch.equal(found, dict(whole.named_parameters())[name])


class OwnValues(nn.Module):
    """A module with parameters that are computed in all ways that scripts use, and buffers outside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 5, 4) * 0.02)
        self.zeros, self.ones = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(()))
        self.rows = nn.Parameter(torch.arange(12.0).view(3, 4)[1:].t())
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()
        self.truncated, self.square = nn.Parameter(torch.empty(6, 4)), nn.Parameter(torch.empty(4, 4))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.5, b=0.5)
        nn.init.trunc_normal_(self.position, std=0.02)
        nn.init.orthogonal_(self.square)
        self.drawn = nn.Parameter(torch.empty(3, 3).uniform_(generator=torch.Generator().manual_seed(5)))
        with torch.no_grad():
            self.first.weight.copy_(self.square * 2 + self.truncated[:4])
            self.truncated[2:4] += self.first.weight[:2]
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)), persistent=False)


def test_values_may_depend_on_other_tensors() -> None:
    assert_equal_values(OwnValues)


class Constants(nn.Module):
    """A module whose tensors are computed from numbers of Python, and by a function that is imported by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.alone = nn.Parameter(torch.tensor([1.0, 2.0]) * 3), nn.Parameter(torch.tensor([4.0, 5.0]))
        self.stacked = nn.Parameter(torch.stack([torch.as_tensor(float(i)) for i in range(3)]))
        self.temperature = nn.Parameter(torch.ones(2).new_tensor([0.07, 0.1]).log())
        self.chosen = nn.Parameter(torch.randn(4, 3)[[3, 0], 1:][:, [1, 0]])
        self.square = nn.Parameter(torch.zeros(3, 3))
        imported_by_name(self.square)
        with torch.no_grad():
            self.square[[0, 2]] = 7.0
            self.square[torch.tensor([1])] *= 2
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1), persistent=False)


def test_values_may_be_numbers() -> None:
    """Fixed bug: tensors computed from ``torch.tensor`` and lists of indices were 0, and imported functions did nothing."""
    assert_equal_values(Constants)
    assert imported_by_name is nn.init.orthogonal_


def test_changes_after_the_creation_are_found() -> None:
    """Fixed bug: they had no effect and no message."""
    model = deferred(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    values = initial_values(model)
    assert values is not None and not values.changed(model.double().requires_grad_(False))
    nn.init.zeros_(model[1].weight)  # type: ignore[arg-type]
    assert values.changed(model) == ["1.weight"]
    model.append(nn.Linear(2, 2))  # in memory
    assert values.changed(model) == ["1.weight"]
    first: Any = model[0]
    first.start = first.bias.detach()
    assert values.changed(model) == ["1.weight", "0.start"]
    del first.start
    model[1].to_empty(device="cpu")  # type: ignore[operator]
    assert values.changed(model) == ["1.weight", "1.bias"]
    nn.utils.parametrizations.weight_norm(model[0])
    assert values.changed(model)[0] == "0.parametrizations.weight.original0"


def test_weights_may_be_tied_after_the_creation() -> None:
    """Fixed bug: the values were those of the layer whose name comes first."""
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))[1].weight  # type: ignore[union-attr]
    torch.manual_seed(3)
    model = deferred(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[0].weight = model[1].weight  # type: ignore[assignment]
    values, found = initial_values(model), torch.empty(2, 2)
    assert values is not None and not values.changed(model)
    (name,) = (name for name, each in model.named_parameters() if each is model[1].weight)
    values.fill(name, found, model[1].weight)  # type: ignore[arg-type]
    assert torch.equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.BatchNorm1d(3), r"found buffers running_mean, .*; expected only parameters"),
        (lambda: nn.ParameterList([torch.empty(3)]), "found no initial values of 0"),
        (lambda: nn.Linear(int(torch.tensor(3)), 2), "found RuntimeError: .*; expected a function that creates"),
        (lambda: nn.Linear(*torch.ones(2).numpy()), "found TypeError: .*; expected a function that creates"),
    ],
)
def test_models_that_cannot_be_deferred_are_rejected(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        deferred(make)


def test_a_model_in_main_memory_has_no_deferred_values() -> None:
    assert initial_values(nn.Linear(2, 2)) is None
