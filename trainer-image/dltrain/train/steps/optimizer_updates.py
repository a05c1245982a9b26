"""The updates of each optimizer of a script: what happens before and after them, and with a GradScaler."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from dltrain.optim.combined import parts_of
from dltrain.optim.grad_scaler import Found, LossScale
from dltrain.parallel.placement import Strategy
from dltrain.train.steps.batches import skip_partial_updates
from dltrain.train.steps.step import Step
from dltrain.train.steps.update_hooks import UpdateHooks


class _Selected:
    """The current step, as a GradScaler sees it for one of the optimizers. See ``grad_scaler.Steps``."""

    def __init__(self, step: Step, number: int) -> None:
        self._step, self._number = step, number

    @property
    def open(self) -> bool:
        return self._step.open

    @property
    def partial(self) -> bool:
        return self._step.partial

    @property
    def left_out(self) -> bool:
        self._step.select(self._number)
        return self._step.left_out

    def unscale(self, divide: Callable[[], Found], nothing: Found, scale: float, inverse: float) -> Found:
        self._step.select(self._number)
        return self._step.unscale(divide, nothing, scale, inverse)


def watch_updates(
    model: nn.Module,
    optimizer: Optimizer,
    step: Step,
    updated: Callable[[], None],
    loss_scale: LossScale,
    parallel: Callable[[], Strategy],
) -> None:
    """Reduce gradients before each update of ``optimizer``, or of each optimizer of a combined one.

    ``step``: the current step. ``updated``: called after each update, and after each that a GradScaler skips.
    ``parallel``: returns the parallelism strategy.
    """
    optimizers = parts_of(optimizer)
    step.expect(len(optimizers))
    for number, each in enumerate(optimizers):

        def before(number: int = number) -> None:
            step.select(number)
            step.sum()

        own = model.parameters() if len(optimizers) == 1 else ()
        UpdateHooks(own, each, before, updated, lambda p: parallel().stands_in(p))
        loss_scale.watch(each, _Selected(step, number), updated)


def skip_partial(optimizer: Optimizer, step: Step, parallel: Callable[[], Strategy]) -> None:
    """Let each optimizer update the model only in the last micro-batch of a step, and add up gradients before."""
    for number, each in enumerate(parts_of(optimizer)):
        skip_partial_updates(each, step, lambda number=number: parallel().skip_update(number))  # type: ignore[misc]
