"""Support for torch's GradScaler (float16 on devices without bfloat16) with gradients that are reduced over ranks.

A script multiplies its loss by a scale, so that float16 gradients do not become 0. The scaler divides the gradients by
the scale before the update. If a gradient is not finite, the scaler skips the update and halves the scale. All ranks
must make this decision from the gradients of the global batch. The trainer must know the decision, because a step with
a skipped update still counts.

Optimizer hooks do not suffice, because the scaler does not call ``optimizer.step()`` if it skips the update. So
this module replaces four methods of GradScaler. For an optimizer without a trainer, the methods behave as before.
``scale`` also registers the scaler with the trainer. ``_unscale_grads_`` is called for ``unscale_``, ``step`` and fused
optimizers; torch's own sharded scaler overrides this method, too. ``_maybe_opt_step`` updates or skips. ``update``
changes the scale, but not between the micro-batches of a step, whose gradients must have the same scale.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.optim import Optimizer

LEAST = 2.0**-24
"""The smallest positive float16 number. With a smaller loss scale, all gradients would be 0 in float16."""
Found = dict[torch.device, Tensor]
"""Maps each device to a flag, a tensor that is not 0 if a gradient on this device is not finite."""


class Steps(Protocol):
    """The part of ``train.step.Step``, the current training step, that the replaced GradScaler methods use.

    ``open``: True while the step is in progress. ``left_out``: True if ranks skip the update of this step, because a
    gradient is not finite. ``partial``: True if a further micro-batch of the step follows the current one.
    """

    @property
    def open(self) -> bool: ...

    @property
    def left_out(self) -> bool: ...

    @property
    def partial(self) -> bool: ...

    def unscale(self, divide: Callable[[], Found], nothing: Found, scale: float, inverse: float) -> Found:
        """Divide the gradients of the global batch by the loss scale. Return flags (see ``Found``) for all ranks.

        A flag is not 0 if any gradient is not finite. ``divide``: multiplies this rank's gradients by ``inverse`` and
        returns its flags. ``nothing``: flags to return if there are no gradients. ``scale``: the loss scale.
        """
        ...


class LossScale:
    """The GradScaler of one run, if the script uses one. Checkpoints contain its ``state``."""

    def __init__(self) -> None:
        self._scaler: GradScaler | None = None
        self._saved_scaler: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        self._updates: WeakKeyDictionary[Optimizer, tuple[Steps, Callable[[], None]]] = WeakKeyDictionary()
        self.skipped = 0
        """Number of skipped updates in this run."""

    @property
    def scale(self) -> float | None:
        """Return the factor by which the script multiplies its losses; None without a scaler."""
        return self._scaler.get_scale() if self._scaler is not None else None

    def watch(self, optimizer: Optimizer, steps: Steps, skipped: Callable[[], None]) -> None:
        """Let all ranks skip the same updates of ``optimizer`` if the script uses a GradScaler.

        From then on, ``steps`` (the current training step) decides for the GradScaler whether an update is skipped.
        ``skipped``: called at each update that is skipped.
        """
        global _newest
        _replace_methods()
        self._updates[optimizer] = steps, skipped
        _newest = _runs[optimizer] = ref(self)

    def of(self, optimizer: Optimizer) -> tuple[Steps, Callable[[], None]]:
        """Return the arguments of ``watch`` for ``optimizer``: the current step, and the function for skipped ones."""
        return self._updates[optimizer]

    @property
    def partial(self) -> bool:
        """True if a further micro-batch of the current step follows."""
        return any(steps.open and steps.partial for steps, _ in self._updates.values())

    def meet(self, scaler: GradScaler) -> None:
        """Register the script's scaler when it first scales a loss, and restore its saved state."""
        if self._scaler is scaler:
            return
        self._scaler = scaler
        if self._saved_scaler is not None:
            scaler.load_state_dict(self._saved_scaler)
            self._saved_scaler = None
        self._before = scaler.state_dict()  # ``restore`` needs it if the current step is already abandoned

    def watches(self, scaler: GradScaler) -> bool:
        """Return True if ``scaler`` is the script's scaler."""
        return self._scaler is scaler

    def freeze(self) -> None:
        """Remember the scaler's state when a step is abandoned, such as after the loss of a rank.

        The script does not know this, and may still change the scaler. ``restore`` undoes these changes.
        """
        self._before = self._scaler.state_dict() if self._scaler is not None else None

    def restore(self) -> None:
        """Restore the scaler's state before an abandoned step is computed again."""
        if self._scaler is not None and self._before is not None:
            self._scaler.load_state_dict(self._before)

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, as JSON types; None without a scaler."""
        scaler = self._scaler.state_dict() if self._scaler is not None else self._saved_scaler
        return {"scaler": scaler, "skipped": self.skipped} if scaler is not None else None

    def load(self, state: dict[str, Any] | None) -> None:
        """Store a state from a checkpoint. The script's scaler gets this state when it is first used."""
        if state is not None:
            self._saved_scaler, self.skipped = state["scaler"], state["skipped"]


_runs: "WeakKeyDictionary[Optimizer, ReferenceType[LossScale]]" = WeakKeyDictionary()
_newest: "ReferenceType[LossScale] | None" = None
"""The loss scale of the newest trainer. ``GradScaler.scale`` needs it, because no argument leads to a trainer."""
_replaced = False


def _update_of(optimizer: Optimizer) -> tuple[Steps, Callable[[], None]] | None:
    """Return what ``watch`` got for ``optimizer``; None without a trainer or if no step is in progress."""
    found = _runs.get(optimizer)
    run = found() if found is not None else None
    return run.of(optimizer) if run is not None and run.of(optimizer)[0].open else None


def _replace_methods() -> None:
    """Replace the methods of GradScaler. Later calls in the same process do nothing."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    # The scaler checks for non-finite gradients, so numpy's warnings about these are not needed. numpy.errstate around
    # each addition would cost 0.9 µs per segment of a message.
    warnings.filterwarnings("ignore", r"(invalid value|overflow) encountered in add", RuntimeWarning, r"dltrain\.comm")
    scale, unscale, step = GradScaler.scale, GradScaler._unscale_grads_, GradScaler._maybe_opt_step
    update = GradScaler.update

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
        if (update := _update_of(optimizer)) is None:
            return divide()
        nothing = {found_inf.device: found_inf.clone()}
        return update[0].unscale(divide, nothing, self.get_scale(), float(inv_scale))

    @wraps(step)
    def step_(
        self: GradScaler, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if (update := _update_of(optimizer)) is not None and update[0].left_out:
            update[1]()
            return None
        return step(self, optimizer, optimizer_state, *args, **kwargs)

    @wraps(update)
    def update_(self: GradScaler, *args: Any, **kwargs: Any) -> None:
        run = _newest() if _newest is not None else None
        if run is not None and run.watches(self) and run.partial:
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)  # so that ``step`` may come again
            return
        update(self, *args, **kwargs)

    GradScaler.scale = scale_  # type: ignore[method-assign]
    GradScaler._unscale_grads_ = unscale_  # type: ignore[method-assign]
    GradScaler._maybe_opt_step = step_  # type: ignore[method-assign]
    GradScaler.update = update_  # type: ignore[method-assign]
