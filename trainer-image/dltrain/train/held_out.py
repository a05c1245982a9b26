"""Split held-out data over the ranks, and report what the model predicts for them."""

from collections.abc import Iterator, Sequence
from typing import Any

from dlcontract import Plan
from dltrain.analysis.result import Analysis
from dltrain.batch.micro_batches import MicroBatches
from dltrain.batch.sampling import Part, once, once_together
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import Loader, check_loader
from dltrain.elastic.ranks import Ranks
from dltrain.protocol.errors import MisuseError
from dltrain.train.progress import Progress
from dltrain.train.sharded_data import check_held_out


class HeldOut(Ranks):
    """The part of ``Trainer`` with which a script evaluates its model on held-out data."""

    plan: Plan
    rank: int
    progress: Progress

    def held_out(self, loader: Loader) -> Iterator[Any]:
        """Yield this rank's part of the held-out data once, in batches of its local batch size.

        Each sample is on exactly one rank or, if ranks split the model, on the ranks of one replica, which call
        ``predict`` together. Ranks may get different numbers of batches, or no batch, so call ``sum``
        only after the loop. With parallelism.strategy Sharded, all ranks get equally many batches, because each forward
        pass needs all ranks. ``dltrain.evaluate`` analyses the predictions of all ranks.
        """
        return self.progress.evaluating(held_out_batches(loader, self.shares, self.rank, self.plan))

    def analyzed(self, analysis: Analysis) -> None:
        """Report the analysis that ``dltrain.evaluate`` has made of all workers' predictions. Only the first worker
        reports.
        """
        if self._team.worker_group.rank == 0:
            self.progress.analyzed(self.step, analysis)


def held_out_batches(loader: Loader, shares: Sequence[int], rank: int, plan: Plan) -> Iterator[Any]:
    """Yield batches that cover this rank's part of the held-out data once, on its device.

    ``loader``: the held-out data. ``shares``: local batch size of each rank; the ranks' parts are in proportion to
    them. A batch has at most as many samples as a batch or micro-batch of the training.
    """
    check_loader("t.held_out", loader)
    check_held_out(loader)
    micro_batches = MicroBatches(plan)
    if plan.splits_model:  # ranks of a replica get the same batches
        shares, rank = shares[:: plan.split_over], rank // plan.split_over
        parts = once(loader.samples, shares, rank, -(-shares[rank] // plan.micro_batches))
    elif plan.shards_model:
        parts = _together(loader.samples, [micro_batches.largest(shares, each) for each in range(len(shares))], rank)
    else:
        parts = once(loader.samples, shares, rank, micro_batches.largest(shares, rank))
    if not parts:
        return
    with Feed(loader, lambda number: parts[number], plan.seed, len(parts)) as feed:
        for number, part in enumerate(parts):
            yield feed.take(number, part)


def _together(samples: int, largest: Sequence[int], rank: int) -> list[Part]:
    try:
        return once_together(samples, largest, rank)
    except ValueError as error:
        remedy = "because each forward pass with parallelism.strategy Sharded needs all ranks. Hold out more samples"
        raise MisuseError(f"t.held_out: {error}, {remedy}") from None
