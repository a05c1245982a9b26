"""Operations of a script over all ranks: sums, gathering the global batch, and splitting held-out data."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from dlcontract import Plan
from dltrain.batch.sampling import once
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import Loader, check_loader
from dltrain.elastic.team import Team
from dltrain.train import usage_checks
from dltrain.train.gathering import Participants, averaged, gathered, participants, unlike_buffers
from dltrain.train.step import Step


class Together:
    """Base class of ``Trainer`` with collective operations. Every rank must call them in the same order."""

    plan: Plan
    rank: int
    step: int
    model: nn.Module
    _team: Team
    _step: Step

    @property
    def shares(self) -> tuple[int, ...]:
        """Return the local batch size of each rank, in the plan's order."""
        return self._team.shares

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over the workers, for example of correct predictions.

        If ranks are lost meanwhile, the sum covers the remaining ones.
        """
        given = usage_checks.numbers(values)
        return self._team.together(self.step, lambda: self._team.worker_group.sum(given))

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of all ranks in the order of the global batch, for a loss that compares all samples.

        The shape is (n, …) on a rank with n samples, and (N, …) in the result. Autograd supports it: compute the loss
        of the global batch from the result on every rank. All ranks must call it equally often.
        """
        return gathered(rows, self._participants())

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the global batch of ``value``, a mean over this rank's samples. It has no gradient.

        Use it for statistics that ``forward`` stores in a buffer. ``value`` has any shape. Ranks are weighted by their
        samples, or by ``weigh``; between steps equally. All ranks must call it equally often.
        """
        return averaged(value, self._participants())

    def _participants(self) -> Participants:
        return participants(self._team, self._step, self.step)

    def _unlike_buffers(self) -> list[str]:
        return unlike_buffers(self.model, self._participants())

    def held_out(self, loader: Loader) -> Iterator[Any]:
        """Yield this rank's part of held-out data once, in batches of its local batch size.

        Each sample is on exactly one rank. Ranks may get different numbers of batches, or no batch, so call ``sum``
        only after the loop.
        """
        check_loader("t.held_out", loader)
        parts = once(loader.samples, self.shares, self.rank)
        if not parts:
            return
        with Feed(loader, lambda number: parts[number], self.plan.seed, len(parts)) as feed:
            for number, part in enumerate(parts):
                yield feed.take(number, part)
