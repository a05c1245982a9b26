"""Copies of a model's buffers (such as running statistics) from which an abandoned step is undone.

A forward pass may change buffers in place, but also assign other tensors to them, register new ones, or remove some.
"""

import torch
from torch import Tensor, nn


class BufferCopies:
    """Copies of the buffers of all modules of ``model``, made when the object is created.

    Create it at the beginning of a step. If the step is abandoned, ``restore`` undoes its changes of the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, dict(module._buffers)) for module in model.modules()]
        self._transient = [set(module._non_persistent_buffers_set) for module, _ in self._modules]
        found = {id(b): b for _, buffers in self._modules for b in buffers.values() if b is not None}
        self._copies: list[tuple[Tensor, Tensor]] = [(b, b.detach().clone()) for b in found.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Give every module the tensors and values that its buffers had at the beginning of the step."""
        for (module, buffers), transient in zip(self._modules, self._transient, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(transient)
        for buffer, copy in self._copies:
            buffer.copy_(copy)
