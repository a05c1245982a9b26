"""Checks of a script's optimizer: what it trains, and how it is stepped. Each error says where the script is wrong."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dltrain.protocol.errors import MisuseError


def check_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises MisuseError for an optimizer of parameters that are not the model's, whose gradients no rank would sum."""
    known = set(model.parameters())
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if strange := [tuple(p.shape) for p in trained if p not in known]:
        raise MisuseError(
            f"optimizer: found parameters {strange} that are not the model's, expected its alone: put all that is "
            "trained into one nn.Module"
        )


def check_late(strange: Sequence[nn.Parameter]) -> None:
    """Of what an optimizer got after ``t.wrap``, what is not the model's. Raises MisuseError when there is some."""
    if strange:
        raise MisuseError(
            f"optimizer: found parameters {[tuple(p.shape) for p in strange]} that the model had not in t.wrap, whose "
            "gradients no rank sums: make the whole model before t.wrap, and freeze what is to be trained later"
        )


def without_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook of ``optimizer.step()``. Raises MisuseError: gradients that it computes itself are not summed."""
    if any(given is not None for given in (*args[1:], kwargs.get("closure"))):  # args[0]: the optimizer
        raise MisuseError(
            f"{type(optimizer).__name__}.step: found a closure, expected none: gradients are summed over ranks before "
            "a step, and not within it; call backward() first and choose an optimizer that needs no closure"
        )
