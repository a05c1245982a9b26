"""The precision of the plan: autocast for forward pass and loss, and loss scaling with float16.

Parameters, their gradients and the optimizer's state are float32 in every precision, so ranks exchange the same
gradients, and checkpoints fit all precisions. With strategy Sharded, ranks also gather parameters in 16 bits
(``parallel.pytorch.sharded_units``).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from dlcontract import Plan
from dltrain.device.precision import TYPES
from dltrain.optim.grad_scaler import LossScale
from dltrain.protocol.errors import MisuseError
from dltrain.train.steps.step import Step


class MixedPrecision:
    """The part of ``Trainer`` with which a training loop computes in the precision of the plan."""

    plan: Plan
    device: torch.device
    _loss_scale: LossScale
    _step: Step
    _casts = False
    """True if the training loop has called ``autocast``."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute the forward pass and the loss in the precision of the plan, with torch's autocast.

        Use this context manager around both, but not around ``backward()``. It does nothing if the plan's precision is
        float32 (``spec.precision``).
        """
        self._casts = True
        if self.plan.precision == "FP32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=TYPES[self.plan.precision])

    def grad_scaler(self, **options: Any) -> GradScaler:
        """Return a new GradScaler of torch, which scales losses if the plan's precision is float16.

        ``options``: arguments of ``torch.amp.GradScaler``, such as init_scale. Use it as in plain PyTorch:
        ``scaler.scale(loss).backward()``, ``scaler.step(opt)``, ``scaler.update()``. In other precisions, it does
        nothing but call ``backward`` and ``opt.step()``. Checkpoints contain its state.
        """
        return GradScaler(self.device.type, enabled=self.plan.precision == "FP16", **options)

    def _check_precision(self) -> None:
        """Raise MisuseError if the loop's first step was not computed in the precision of the plan."""
        precision = self.plan.precision
        if precision == "FP32":
            return
        field = f"with a plan in {precision} (spec.precision)"
        if not self._casts:
            raise MisuseError(
                f"t.steps: found no t.autocast() {field}; expected 'with t.autocast():' around forward pass and loss. "
                "Add it, or remove spec.precision"
            )
        if precision == "FP16" and not (self._loss_scale.scale is not None and self._step.unscaled):
            raise MisuseError(
                f"t.steps: found an update without a GradScaler {field}; expected scaler = t.grad_scaler() before the "
                "loop, scaler.scale(loss).backward(), scaler.step(opt) and scaler.update(). Add them, or choose "
                "another spec.precision"
            )
