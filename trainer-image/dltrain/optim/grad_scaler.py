"""Support for torch's GradScaler (float16 on devices without bfloat16) with gradients that are reduced over ranks.

A script scales its loss, so that float16 gradients do not vanish, and the scaler unscales them before the update. If a
gradient is not finite, the scaler skips the update and halves the scale. All ranks must decide this from the global
batch's gradients. The trainer must know the decision, because a step with a skipped update still counts.

The scaler calls ``optimizer.step()`` only if it updates, so optimizer hooks do not suffice. Three of its methods are
therefore replaced. For an optimizer without a trainer they behave as before. ``scale`` registers the scaler.
``_unscale_grads_`` is on every path (``unscale_``, ``step``, a fused optimizer); torch's own sharded scaler overrides
it, too. ``_maybe_opt_step`` updates or skips.
"""

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

LEAST = 2.0**-24
"""The smallest positive float16. Losses with a smaller scale have no gradients in float16."""
Found = dict[torch.device, Tensor]
"""Flag of each device. It is not 0 if a gradient on the device is not finite."""


class Steps(Protocol):
    """The interface of the current step (``step.Step``) to a scaler's methods."""

    open: bool
    left_out: bool

    def unscale(self, divide: Callable[[], Found], nothing: Found, scale: float, inverse: float) -> Found:
        """Unscale the global batch's gradients. Return flags that are not 0 if any rank found non-finite ones."""
        ...


class LossScale:
    """The scaler of one run, if the script uses one. Checkpoints hold its ``state``."""

    def __init__(self) -> None:
        self._scaler: GradScaler | None = None
        self._saved_scaler: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        self.skipped = 0
        """Number of skipped updates in this run."""

    @property
    def scale(self) -> float | None:
        """Return the factor that losses are multiplied by, None without a scaler."""
        return self._scaler.get_scale() if self._scaler is not None else None

    def watch(self, optimizer: Optimizer, steps: Steps, skipped: Callable[[], None]) -> None:
        """Connect scalers of ``optimizer`` to ``steps``. ``skipped``: called instead of a skipped update."""
        global _newest
        _replace_methods()
        self.steps, self.skip = steps, skipped
        _newest = _runs[optimizer] = ref(self)

    def meet(self, scaler: GradScaler) -> None:
        """Register the script's scaler when it first scales a loss, and restore its saved state."""
        if self._scaler is scaler:
            return
        self._scaler = scaler
        if self._saved_scaler is not None:
            scaler.load_state_dict(self._saved_scaler)
            self._saved_scaler = None
        self._before = scaler.state_dict()  # for a first use in a step that was abandoned before

    def freeze(self) -> None:
        """Save the scaler's state in an abandoned step. ``restore`` undoes later changes by the loop body."""
        self._before = self._scaler.state_dict() if self._scaler is not None else None

    def restore(self) -> None:
        """Restore the scaler's state before the step is computed again."""
        if self._scaler is not None and self._before is not None:
            self._scaler.load_state_dict(self._before)

    def state(self) -> dict[str, Any] | None:
        """Return the state for JSON, None without a scaler."""
        scaler = self._scaler.state_dict() if self._scaler is not None else self._saved_scaler
        return {"scaler": scaler, "skipped": self.skipped} if scaler is not None else None

    def load(self, state: dict[str, Any] | None) -> None:
        """Set the saved state for a scaler that is used later."""
        if state is not None:
            self._saved_scaler, self.skipped = state["scaler"], state["skipped"]


_runs: "WeakKeyDictionary[Optimizer, ReferenceType[LossScale]]" = WeakKeyDictionary()
_newest: "ReferenceType[LossScale] | None" = None
"""The loss scale of the newest trainer. ``scale`` needs it, because it gets no optimizer."""
_replaced = False


def _run_of(optimizer: Optimizer) -> LossScale | None:
    """Return the loss scale of the trainer whose open step uses ``optimizer``, or None."""
    found = _runs.get(optimizer)
    run = found() if found is not None else None
    return run if run is not None and run.steps.open else None


def _replace_methods() -> None:
    """Replace the scaler's methods, once per process."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    # Non-finite gradients are checked below, so numpy's warnings are not needed. numpy.errstate would cost 0.9 µs per
    # segment.
    warnings.filterwarnings("ignore", r"(invalid value|overflow) encountered in add", RuntimeWarning, r"dltrain\.comm")
    scale, unscale, update = GradScaler.scale, GradScaler._unscale_grads_, GradScaler._maybe_opt_step

    @wraps(scale)
    def scale_(self: GradScaler, outputs: Any) -> Any:
        run = _newest() if _newest is not None else None
        if run is not None and self.is_enabled():
            run.meet(self)
        return scale(self, outputs)

    @wraps(unscale)
    def unscale_(
        self: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Found:
        divide = partial(unscale, self, optimizer, inv_scale, found_inf, allow_fp16)
        if (run := _run_of(optimizer)) is None:
            return divide()
        nothing = {found_inf.device: found_inf.clone()}
        return run.steps.unscale(divide, nothing, self.get_scale(), float(inv_scale))

    @wraps(update)
    def update_(
        self: GradScaler, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if (run := _run_of(optimizer)) is not None and run.steps.left_out:
            run.skip()
            return None
        return update(self, optimizer, optimizer_state, *args, **kwargs)

    GradScaler.scale = scale_  # type: ignore[method-assign]
    GradScaler._unscale_grads_ = unscale_  # type: ignore[method-assign]
    GradScaler._maybe_opt_step = update_  # type: ignore[method-assign]
