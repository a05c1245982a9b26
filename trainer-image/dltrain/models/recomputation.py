"""Activation checkpointing of a module (Chen et al. 2016): it keeps only its inputs for the backward pass.

Its forward pass runs again when its backward pass begins, with the same random numbers and under the same autocast, so
gradients are the same. torch ends the second forward pass as soon as it has all tensors that the backward pass needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

_RAN, _FORWARD = "_dltrain_recomputed", "_dltrain_forward"
"""Attributes of a block: True if it has run with activation checkpointing, and its former forward, or None."""


def has_run(block: nn.Module) -> bool:
    """Return True if the block has run with activation checkpointing, in a forward pass with gradients."""
    return bool(block.__dict__.get(_RAN))


def recompute(block: nn.Module) -> None:
    """Let the module keep only its inputs for the backward pass, which then runs its forward pass again.

    A bound method replaces the module's forward, so that copies of the model call the forward of their own modules, and
    names of parameters stay the same. Calling this function again has no effect.
    """
    if _RAN not in block.__dict__:
        block.__dict__[_RAN] = False
        block.__dict__[_FORWARD] = block.__dict__.get("forward")
        block.__dict__["forward"] = MethodType(forward, block)


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the block's own forward, and again in the backward pass. Without gradients, run it once.

    pickle finds a bound method by this function's name, so that a model that was saved as a whole loads as it was.
    """
    run = self.__dict__[_FORWARD] or MethodType(type(self).forward, self)
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    self.__dict__[_RAN] = True
    if any(isinstance(module, _BatchNorm) for module in self.modules()):
        run = _Once(self, run)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


class _Once:
    """Run a block's forward twice, but change the running statistics of its BatchNorm layers only once."""

    def __init__(self, block: nn.Module, run: Any) -> None:
        self._block, self._run, self._again = block, run, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again, self._again = self._again, True
        if not again:
            return self._run(*args, **kwargs)
        with _spare_statistics(self._block):
            return self._run(*args, **kwargs)


@contextmanager
def _spare_statistics(block: nn.Module) -> Iterator[None]:
    """Let BatchNorm layers change copies of their running statistics, on which outputs do not depend in training."""
    layers = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    buffers = [dict(layer._buffers) for layer in layers]
    for layer in layers:
        layer._buffers.update({name: None if b is None else b.clone() for name, b in layer._buffers.items()})
    try:
        yield
    finally:  # torch ends a recomputation by an exception when it has all tensors
        for layer, kept in zip(layers, buffers, strict=True):
            layer._buffers.update(kept)
