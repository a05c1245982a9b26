"""Tests of models whose parameters have no memory at first: their values are those of a model in main memory."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

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
    expected = dict(whole.named_parameters())
    for name, parameter in reversed(list(model.named_parameters())):
        found = torch.full(parameter.shape, torch.nan)
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


def test_models_that_cannot_be_deferred_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"found buffers running_mean, .*; expected only parameters"):
        deferred(lambda: nn.BatchNorm1d(3))

    def tied_values() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with torch.no_grad():
            model[1].weight.copy_(model[0].weight)  # type: ignore[union-attr, operator, arg-type]
        return model

    with pytest.raises(ValueError, match="found an argument of shape"):
        deferred(tied_values)


def test_a_model_in_main_memory_has_no_deferred_values() -> None:
    assert initial_values(nn.Linear(2, 2)) is None
