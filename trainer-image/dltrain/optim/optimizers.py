"""torch's optimizers for the built-in trainer, without the import of torch's compiler.

``torch.optim`` imports torch's compiler when the first optimizer is created and in ``step``, to exclude some methods
from ``torch.compile``. The import loads 800 modules and takes 1.5 s of CPU time: 8 s in a pod with a fifth of a core.
The trainer compiles nothing, so it calls the methods of optimizers without the wrappers that import the compiler. If
another version of torch wraps the methods differently, the compiler is imported, and nothing else changes.
"""

import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dlcontract import OptimizerRef

_KEPT = "__dynamo_disable"
"""Attribute of an optimizer's method in which torch's wrapper ``torch._disable_dynamo`` looks up the function to call.

If the attribute exists, the wrapper does not import torch's compiler, which would take 1.5 s of CPU time.
"""


def make_optimizer(ref: OptimizerRef, model: nn.Module) -> Optimizer:
    """Return a new optimizer for the parameters of ``model``, as ``ref``, a part of the plan, describes it."""
    extra: dict[str, Any] = {"momentum": ref.momentum} if ref.name == "SGD" else {}
    kind = _plain({"SGD": SGD, "Adam": Adam, "AdamW": AdamW}[ref.name])
    made: Optimizer = kind(model.parameters(), lr=ref.learning_rate, weight_decay=ref.weight_decay, **extra)
    return made


def _plain(kind: type[Optimizer]) -> type[Any]:
    """Return a subclass of the optimizer class ``kind`` whose methods do not import torch's compiler.

    The import takes 1.5 s of CPU time. The subclass computes the same.
    """
    for member in vars(Optimizer).values():
        inner = getattr(member, "__wrapped__", None)
        if inspect.isfunction(member) and "_disable_dynamo" in member.__code__.co_qualname:
            setattr(inner, _KEPT, inner)
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(inspect.unwrap(kind.step))})
