"""Load the batches of a training's steps, each in one or several micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer

from dltrain.batch.micro_batches import MicroBatches
from dltrain.batch.sampling import Part
from dltrain.protocol.errors import MisuseError
from dltrain.train import usage_checks
from dltrain.train.steps.order import Order
from dltrain.train.steps.step import Step


class StepBatches:
    """This rank's batches of all steps, in order. A step with gradient accumulation has several micro-batches.

    ``spent_s``: seconds spent on loading the last step's micro-batches so far, by this process or by a worker.
    """

    def __init__(
        self, order: Order, micro_batches: MicroBatches, shares: Callable[[], Sequence[int]], steps: int
    ) -> None:
        """Prepare the loading. ``order``: the order of the samples.

        ``shares``: returns the present local batch sizes. ``steps``: number of steps of the training; 0: unknown.
        """
        self.spent_s = 0.0
        self._part_of, self._micro_batches, self._shares, self._steps = order.part, micro_batches, shares, steps
        self._most = micro_batches.most(shares())
        self._feed = order.feed(self._numbered, steps * self._most)
        self._number, self._parts = 0, list[Part]()

    def __enter__(self) -> Self:
        self._feed.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.__exit__(kind, error, trace)

    def begin(self, number: int) -> Part:
        """Begin step ``number``, counted from 0. Return this rank's samples of the whole step."""
        shares, part = self._shares(), self._part_of(number)
        self._most = self._micro_batches.most(shares)
        self._feed.steps = self._steps * self._most
        self._number, self._parts, self.spent_s = number, self._micro_batches.of_step(part, shares), 0.0
        return part

    @property
    def accumulates(self) -> bool:
        """Return True if this rank computes several micro-batches in the current step."""
        return len(self._parts) > 1 and len(self._parts[0].indices) > 0

    def take(self, index: int) -> Any:
        """Return micro-batch ``index`` of the step on the device, or None if this rank has no samples.

        Raise SampleError if the user's dataset fails, and MemoryError or WorkerLostError if a worker fails.
        """
        batch = self._feed.take(self._number * self._most + index, self._parts[index])
        self.spent_s += self._feed.spent_s
        return batch

    def each(self, step: Step, first: Any) -> Iterator[tuple[Any, bool]]:
        """Yield (batch, True if it is the last one of an epoch) for each micro-batch of the step.

        ``first``: the first micro-batch, which is loaded already. Stop early if ranks were lost and the step was
        abandoned. Raise MisuseError if the script has not called ``optimizer.step()`` for a micro-batch.
        """
        for index, part in enumerate(self._parts):
            if index:
                step.watch.computed()
                first = self.take(index)
                step.watch.refetched()
            if len(self._parts) > 1:
                step.begin_micro_batch(part, last=index == len(self._parts) - 1)
            yield first, part.last
            if step.partial and step.given_up:
                step.open = step.partial = False
                return
            if step.partial and not step.skipped_update:
                raise MisuseError(usage_checks.NO_UPDATE)

    def _numbered(self, number: int) -> Part:
        """Return this rank's samples of one micro-batch of the training; none if the step has fewer micro-batches.

        ``number``: index of the micro-batch, counted from 0 over all steps as if each step had a complete batch. The
        last batch of an epoch may be smaller and have fewer micro-batches.
        """
        step, index = divmod(number, self._most)
        parts = self._micro_batches.of_step(self._part_of(step), self._shares())
        return parts[index] if index < len(parts) else Part(0, parts[0].indices[:0], 0.0, 0, False)


def skip_partial_updates(optimizer: Optimizer, step: Step, skip: Callable[[], object]) -> None:
    """Replace ``optimizer.step`` by a function that updates the model only in the last micro-batch of a step.

    In the other micro-batches, the function calls ``skip``. If ``optimizer.step`` has been replaced already, leave it
    unchanged. Optimizer hooks would not be enough, because they cannot prevent an update. Setting the gradients to None
    would not be enough either, because some optimizers still change their state.
    """
    update = optimizer.step
    if hasattr(update, "_skips_partial_updates"):
        return

    @wraps(update)
    def last_update(*args: Any, **kwargs: Any) -> Any:
        if step.open and step.partial:
            step.skipped_update = True
            skip()
            return None
        return update(*args, **kwargs)

    last_update._skips_partial_updates = True  # type: ignore[attr-defined]
    optimizer.step = last_update  # type: ignore[method-assign]
