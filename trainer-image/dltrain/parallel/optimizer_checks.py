"""Checks of a script's optimizer: its parameters, and the arguments of its ``step``."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dltrain.protocol.errors import MisuseError


def check_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise MisuseError if the optimizer has parameters outside the model. Their gradients would not be reduced."""
    known = set(model.parameters())
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if strange := [tuple(p.shape) for p in trained if p not in known]:
        raise MisuseError(
            f"optimizer: found parameters of shapes {strange} that are not the model's; expected only the model's. "
            "Pass all trained modules to t.wrap, as a list"
        )


def check_late(strange: Sequence[nn.Parameter]) -> None:
    """Raise MisuseError if ``strange`` is not empty.

    ``strange``: parameters that the optimizer got after ``t.wrap`` and that do not belong to the model.
    """
    if strange:
        raise MisuseError(
            f"optimizer: found parameters of shapes {[tuple(p.shape) for p in strange]} that the model did not have "
            "in t.wrap (of several optimizers: this one); expected only those, because ranks reduce no other ones. "
            "Create model and optimizers before t.wrap, and freeze the parameters that you train later"
        )


def without_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise MisuseError if the arguments of ``optimizer.step`` contain a closure.

    The gradients that a closure computes would not be reduced over ranks. torch calls this function before ``step`` and
    passes the arguments of ``step``: ``args`` contains the optimizer itself and then the other positional arguments.
    """
    if any(given is not None for given in (*args[1:], kwargs.get("closure"))):  # args[0]: the optimizer
        raise MisuseError(
            f"{type(optimizer).__name__}.step: found a closure; expected none, because ranks reduce gradients before "
            "the step. Call backward() first, and choose an optimizer that needs no closure"
        )


def check_no_common_state(optimizer: Optimizer) -> None:
    """Raise MisuseError for state that belongs to no parameter, which ranks with parts of the model cannot save."""
    if strange := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise MisuseError(
            f"{type(optimizer).__name__}: found state without a parameter, {strange[0]!r}; expected only state of "
            "parameters, because each rank updates only its part of the parameters and the values may differ. Keep it "
            "in the parameter groups or with t.keep, or use parallelism.strategy Data"
        )
