"""The order of the samples of a training: which samples this rank processes in a step, and how they are loaded."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from dltrain.batch.sampling import Part
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import Loader


class BatchFeed(Protocol):
    """What loads the batches of all steps, in order. See ``Feed``."""

    spent_s: float
    steps: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def take(self, step: int, part: Part) -> Any: ...


class Order(Protocol):
    """The order of the samples of a training, as this rank sees it.

    ``planned_steps``: number of steps of the whole training; 0 if it is unknown, because epochs have unknown lengths.
    ``ending``: True if this rank has only one complete batch after that of the present step, so that the epoch ends.
    """

    planned_steps: int
    ending: bool

    def part(self, step: int) -> Part:
        """Return this rank's samples of the batch of ``step``, counted from 0, with the present local batch sizes."""

    def feed(self, part_of: Callable[[int], Part], steps: int) -> BatchFeed:
        """Return what loads the batches. ``part_of``, ``steps``: see ``Feed``."""

    def is_last(self, part: Part) -> bool:
        """Return True if the training ends with the step of ``part``, although ``planned_steps`` is 0."""

    def conclude(self, *, ending: bool) -> None:
        """Finish a step. ``ending``: True if ``ending`` of any rank was True in it. All ranks pass the same value."""


class IndexedOrder:
    """The order of a dataset with random access: a function of the step (``Sampler``)."""

    ending = False

    def __init__(self, loader: Loader, part_of: Callable[[int], Part], seed: int, planned_steps: int) -> None:
        """``part_of``: returns this rank's samples of a step. ``seed``: the plan's seed."""
        self.planned_steps = planned_steps
        self._loader, self._part_of, self._seed = loader, part_of, seed

    def part(self, step: int) -> Part:
        return self._part_of(step)

    def feed(self, part_of: Callable[[int], Part], steps: int) -> Feed:
        return Feed(self._loader, part_of, self._seed, steps)

    def is_last(self, part: Part) -> bool:
        return False

    def conclude(self, *, ending: bool) -> None:
        pass
