"""What a script can get wrong with the five lines, said where it is wrong. Users: ``loop``, ``team``."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dltrain.errors import MisuseError


def check_wrapped(model: Any, optimizer: Any, *, again: bool) -> None:
    """What is passed to ``t.wrap``. Raises MisuseError."""
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            found = f"{type(given).__module__}.{type(given).__name__}"
            raise MisuseError(f"t.wrap: {name}: found {found}, expected a torch {kind.__name__}")
    if again:
        raise MisuseError(
            "t.wrap: found a second call, expected one: put what is trained into one nn.Module with one optimizer"
        )


def check_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises MisuseError for an optimizer of parameters that are not the model's, whose gradients no rank would sum."""
    known = set(model.parameters())
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if strange := [tuple(p.shape) for p in trained if p not in known]:
        raise MisuseError(
            f"optimizer: found parameters {strange} that are not the model's, expected its alone: put all that is "
            "trained into one nn.Module"
        )


def without_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook of ``optimizer.step()``. Raises MisuseError: gradients that it computes itself are not summed."""
    if any(given is not None for given in (*args[1:], kwargs.get("closure"))):  # args[0]: the optimizer
        raise MisuseError(
            f"{type(optimizer).__name__}.step: found a closure, expected none: gradients are summed over ranks before "
            "a step, and not within it; call backward() first and choose an optimizer that needs no closure"
        )


def number(loss: Any) -> Tensor:
    """A loss as a tensor of no dimension. Raises MisuseError when it is not one number."""
    try:
        found = torch.as_tensor(loss).detach()
    except (TypeError, ValueError, RuntimeError):
        raise MisuseError(f"t.log: loss: found {type(loss).__name__}, expected a number") from None
    if found.numel() != 1:
        raise MisuseError(f"t.log: loss: found shape {tuple(found.shape)}, expected one number: the mean of the batch")
    return found.reshape(())


def check_samples(counts: Sequence[int]) -> None:
    """Of the dataset on each rank. Raises MisuseError when they differ."""
    if len(set(counts)) > 1:
        raise MisuseError(
            f"t.steps: found {', '.join(map(str, counts))} samples in the dataset on ranks 0, 1, …, expected the whole "
            "dataset on each: dltrain divides it among them"
        )


def warn_of_a_second_pass(step: int) -> None:
    """A loop over epochs around ``t.steps`` goes through it once."""
    warnings.warn(
        f"t.steps goes through all epochs, and all {step} steps are done: leave out a loop over epochs around it, and "
        "look at t.epoch and t.end_of_epoch within",
        stacklevel=3,
    )
