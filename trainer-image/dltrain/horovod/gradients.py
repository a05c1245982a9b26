"""Gradients through collectives of a Horovod script.

As in Horovod, the gradient of a collective is a collective: if one rank's tensor requires a gradient, the tensors of
all ranks must, and all ranks must call ``backward``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Collective = Callable[[torch.Tensor], torch.Tensor]


class _Carried(torch.autograd.Function):
    """Applies one collective to values, and another one to the gradients of the result."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, collective: Collective, back: Collective) -> torch.Tensor:
        context.back = back
        return collective(tensor)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return context.back(gradient), None, None


def carried(tensor: torch.Tensor, collective: Collective, back: Collective) -> torch.Tensor:
    """Return ``collective(tensor)``, through which gradients flow if the tensor requires one.

    ``back``: returns the gradient of ``tensor`` from that of the result. It is called by all ranks.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return collective(tensor)
    result: torch.Tensor = _Carried.apply(tensor, collective, back)  # type: ignore[no-untyped-call]
    return result
