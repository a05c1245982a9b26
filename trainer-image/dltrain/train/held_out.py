"""Split held-out data over the ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

from dlcontract import Plan
from dltrain.batch.micro_batches import MicroBatches
from dltrain.batch.sampling import once
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import Loader, check_loader


def held_out_batches(loader: Loader, shares: Sequence[int], rank: int, plan: Plan) -> Iterator[Any]:
    """Yield batches that cover this rank's part of the held-out data once, on its device.

    ``loader``: the held-out data. ``shares``: local batch size of each rank; the ranks' parts are in proportion to
    them. A batch has at most as many samples as a batch or micro-batch of the training.
    """
    check_loader("t.held_out", loader)
    parts = once(loader.samples, shares, rank, MicroBatches(plan).largest(shares, rank))
    if not parts:
        return
    with Feed(loader, lambda number: parts[number], plan.seed, len(parts)) as feed:
        for number, part in enumerate(parts):
            yield feed.take(number, part)
