"""What a script asks of all ranks: sums, the whole batch, held-out data in parts."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from dlcontract import Plan
from dltrain.batch.sampling import once
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import Loader, check_loader
from dltrain.elastic.team import Team
from dltrain.train import usage_checks
from dltrain.train.gathering import Among, among, averaged, gathered, unlike_buffers
from dltrain.train.step import Step


class Together:
    """Of a ``Trainer``. Every rank calls the same in the same order."""

    plan: Plan
    rank: int
    step: int
    model: nn.Module
    _team: Team
    _step: Step

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of the batch for each rank, by the plan's numbers."""
        return self._team.shares

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over the ranks that compute, such as of correct answers.

        When ranks are lost meanwhile: over those that are left.
        """
        given = usage_checks.numbers(values)
        return self._team.together(self.step, lambda: self._team.among_workers.sum(given))

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows, in the order of the whole batch: for a loss that compares each sample with all others.

        Shape (n, …) on a rank with n samples to (N, …) on every rank, for autograd, too: compute the loss of the whole
        batch from it, the same on every rank. On all ranks, as often.
        """
        return gathered(rows, self._among())

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the whole batch of what ``value``, of any shape, is over this rank's samples; no gradients. For
        statistics that ``forward`` keeps in a buffer. On all ranks, as often.

        Ranks count by samples, or as ``weigh`` says; between steps all alike.
        """
        return averaged(value, self._among())

    def _among(self) -> Among:
        return among(self._team, self._step, self.step)

    def _unlike_buffers(self) -> list[str]:
        return unlike_buffers(self.model, self._among())

    def held_out(self, loader: Loader) -> Iterator[Any]:
        """This rank's part of held-out data, once, in batches of its share: each sample on one rank, none twice.

        Ranks may get unlike numbers of batches, or none: sum over ranks after the loop.
        """
        check_loader("t.held_out", loader)
        parts = once(loader.samples, self.shares, self.rank)
        if not parts:
            return
        with Feed(loader, lambda number: parts[number], self.plan.seed, len(parts)) as feed:
            for number, part in enumerate(parts):
                yield feed.take(number, part)
