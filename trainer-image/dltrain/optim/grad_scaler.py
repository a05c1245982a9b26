"""torch's GradScaler in a script whose gradients are summed over ranks: float16 on devices without bfloat16.

A script scales its loss, so that float16 gradients do not vanish, and the scaler divides them again before the update;
where one is not finite it leaves the update out and halves the scale. That has to be decided from the whole batch's
gradients, alike on all ranks, and the trainer has to know of it: a step whose update is left out is done all the same.

The scaler calls ``optimizer.step()`` only where it updates, so hooks of the optimizer see too little. Three of its
methods are therefore replaced, for every optimizer that is not a trainer's by what they were: ``scale``, by which the
scaler becomes known; ``_unscale_grads_``, where every way to use it comes by (``unscale_``, ``step``, a fused
optimizer's), and which torch's own sharded scaler overrides; ``_maybe_opt_step``, which updates or does not.
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
"""The smallest number of float16: losses scaled by less have no gradients in it."""
Found = dict[torch.device, Tensor]
"""By device: not 0 where a gradient on it is not finite."""


class Steps(Protocol):
    """What a scaler's methods need of the step under way (``step.Step``)."""

    open: bool
    left_out: bool

    def unscale(self, divide: Callable[[], Found], nothing: Found, scale: float, inverse: float) -> Found:
        """Divide the whole batch's gradients; what was found, on any rank."""
        ...


class LossScale:
    """The scaler of one run, as far as there is one. ``state`` goes into checkpoints."""

    def __init__(self) -> None:
        self._scaler: GradScaler | None = None
        self._saved_scaler: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        self.skipped = 0
        """Updates left out in this run."""

    @property
    def scale(self) -> float | None:
        """What losses are multiplied by; None without a scaler."""
        return self._scaler.get_scale() if self._scaler is not None else None

    def watch(self, optimizer: Optimizer, steps: Steps, skipped: Callable[[], None]) -> None:
        """From now on ``steps`` are told what scalers do for ``optimizer``; ``skipped``: called in its step's place."""
        global _newest
        _replace_methods()
        self.steps, self.skip = steps, skipped
        _newest = _runs[optimizer] = ref(self)

    def meet(self, scaler: GradScaler) -> None:
        """A script's scaler is about to scale: the run's goes on where the checkpoint left it."""
        if self._scaler is scaler:
            return
        self._scaler = scaler
        if self._saved_scaler is not None:
            scaler.load_state_dict(self._saved_scaler)
            self._saved_scaler = None
        self._before = scaler.state_dict()  # met in a step that was given up before

    def freeze(self) -> None:
        """The step under way was given up: what its body does to the scaler from now on is undone by ``restore``."""
        self._before = self._scaler.state_dict() if self._scaler is not None else None

    def restore(self) -> None:
        """Undo, before the step is computed again."""
        if self._scaler is not None and self._before is not None:
            self._scaler.load_state_dict(self._before)

    def state(self) -> dict[str, Any] | None:
        """As JSON; None without a scaler."""
        scaler = self._scaler.state_dict() if self._scaler is not None else self._saved_scaler
        return {"scaler": scaler, "skipped": self.skipped} if scaler is not None else None

    def load(self, state: dict[str, Any] | None) -> None:
        """What ``state`` was, for the scaler to come."""
        if state is not None:
            self._saved_scaler, self.skipped = state["scaler"], state["skipped"]


_runs: "WeakKeyDictionary[Optimizer, ReferenceType[LossScale]]" = WeakKeyDictionary()
_newest: "ReferenceType[LossScale] | None" = None
"""Of the newest trainer: ``scale`` is told no optimizer."""
_replaced = False


def _run_of(optimizer: Optimizer) -> LossScale | None:
    """Whose step under way ``optimizer`` is to update, if it is a trainer's."""
    found = _runs.get(optimizer)
    run = found() if found is not None else None
    return run if run is not None and run.steps.open else None


def _replace_methods() -> None:
    """Once in a process."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    # Sums of gradients that are not finite are looked at below. numpy.errstate would cost 0.9 µs a segment.
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
