"""Calls with which a training script gets its data: the loader, held-out data, and reports of predictions for them."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dlcontract import Plan
from dltrain.analysis.result import Analysis
from dltrain.batch.micro_batches import MicroBatches
from dltrain.batch.sampling import Part, once, once_together
from dltrain.checkpoint.writer import CheckpointManager
from dltrain.comm.process_group import ProcessGroup
from dltrain.data.feeding.feed import Feed
from dltrain.data.feeding.loader import AnyLoader, Loader, check_loader
from dltrain.data.feeding.source import Collate
from dltrain.data.loaders import make_loader
from dltrain.data.streams.loader import StreamLoader
from dltrain.elastic.ranks import Ranks
from dltrain.host.cgroup import cpus
from dltrain.protocol.errors import MisuseError
from dltrain.train import usage_checks
from dltrain.train.progress import Progress
from dltrain.train.sharded_data import check_held_out, ensure_divided
from dltrain.train.steps.order import IndexedOrder, Order
from dltrain.train.steps.streams import Streams


class DataCalls(Ranks):
    """The part of ``Trainer`` that loads training data and held-out data, and reports what the model predicts."""

    plan: Plan
    rank: int
    progress: Progress
    process_group: ProcessGroup
    checkpoint_manager: CheckpointManager
    device: torch.device
    _streams: Streams

    def loader(
        self,
        dataset: Any,
        *,
        workers: int | None = None,
        prefetch: int | None = None,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
    ) -> AnyLoader:
        """Return a loader for a dataset: a map-style torch ``Dataset``, a tuple of tensors, or a stream.

        A stream is an ``IterableDataset``, or an iterable with ``state_dict`` and ``load_state_dict``. Each rank reads
        its own stream, and workers read it only if ``workers`` is given. A torch ``DataLoader`` may stand for its
        dataset and its options; the arguments override these.

        ``workers``: number of processes that load batches while steps compute; 0: load batches between steps. By
        default, the loader starts as many processes as the training needs: none if loading is fast, and at most one per
        spare CPU of this rank. ``prefetch``: number of batches to load in advance (default: two per worker; 0: none).
        ``collate_fn``: function that makes a batch from a list of samples (default: torch's function). ``drop_last``:
        leave out the last batch of an epoch if it is smaller than the global batch, for example because BatchNorm
        layers reject a batch in which a rank has one sample. ``sampler``: a torch sampler of single samples, such as a
        WeightedRandomSampler, which draws the samples of each epoch for all ranks together (default: each sample once,
        in random order). ``workers`` and ``prefetch`` do not affect the result of the training. Raise ValueError for
        invalid arguments.
        """
        return make_loader(
            dataset,
            self.device,
            self.plan,
            workers=workers,
            prefetch=prefetch,
            collate_fn=collate_fn,
            drop_last=drop_last,
            sampler=sampler,
            max_workers=max(0, int(cpus(self.process_group.local_size)) - 1),
            ranks_here=self.process_group.local_size,
        )

    @property
    def dataset_path(self) -> Path:
        """Return the path of spec.dataset.uri or, without a manifest, of $DLJOB_DATASET.

        Raise BadInputError if there is no dataset.
        """
        return usage_checks.dataset_path(self.plan)

    def held_out(self, loader: AnyLoader) -> Iterator[Any]:
        """Yield this rank's part of the held-out data once, in batches of its local batch size.

        Each sample is on exactly one rank or, if ranks split the model, on the ranks of one replica, which call
        ``predict`` together. Ranks may get different numbers of batches, or no batch, so call ``sum``
        only after the loop. With parallelism.strategy Sharded, all ranks get equally many batches, because each forward
        pass needs all ranks. With a stream, each rank gets the whole of its own stream. ``dltrain.evaluate`` analyses
        the predictions of all ranks.
        """
        return self.progress.evaluating(held_out_batches(loader, self.shares, self.rank, self.plan))

    def analyzed(self, analysis: Analysis) -> None:
        """Report the analysis that ``dltrain.evaluate`` has made of all workers' predictions. Only the first worker
        reports.
        """
        if self._team.worker_group.rank == 0:
            self.progress.analyzed(self.step, analysis)

    def _order(self, loader: AnyLoader) -> Order:
        """Return the order in which the training processes the samples of ``loader``. All ranks must call it together.

        Raise MisuseError or BadInputError if the samples do not suit the plan, the other ranks or the checkpoint.
        """
        usage_checks.check_batch_size(loader.batch_size, self.plan)
        if isinstance(loader, StreamLoader):
            return self._streams.open(loader, self.step)
        assert isinstance(loader, Loader), "there is no other loader"
        self._streams.leave()
        rows = self._team.together(self.step, lambda: self._team.worker_group.gather(loader.identity(self.plan)))
        usage_checks.check_samples(rows)
        self.checkpoint_manager.use_samples(loader.samples)
        ensure_divided(self._team, self.progress, loader, self.step)
        sampler = loader.sampler(self.plan)
        return IndexedOrder(loader, partial(self._part, sampler), self.plan.seed, sampler.steps(self.plan))


def held_out_batches(loader: AnyLoader, shares: Sequence[int], rank: int, plan: Plan) -> Iterator[Any]:
    """Yield batches that cover this rank's part of the held-out data once, on its device.

    ``loader``: the held-out data. ``shares``: local batch size of each rank; the ranks' parts are in proportion to
    them. A batch has at most as many samples as a batch or micro-batch of the training.
    """
    check_loader("t.held_out", loader)
    micro_batches = MicroBatches(plan)
    if isinstance(loader, StreamLoader):
        yield from _stream_once(loader, micro_batches.largest(shares, rank), rank, plan)
        return
    assert isinstance(loader, Loader), "there is no other loader"
    check_held_out(loader)
    if plan.splits_model:  # ranks of a replica get the same batches
        shares, rank = shares[:: plan.split_over], rank // plan.split_over
        parts = once(loader.samples, shares, rank, -(-shares[rank] // plan.micro_batches))
    elif plan.shards_model:
        parts = _together(loader.samples, [micro_batches.largest(shares, each) for each in range(len(shares))], rank)
    else:
        parts = once(loader.samples, shares, rank, micro_batches.largest(shares, rank))
    if not (parts := [loader.once(part, plan.seed) for part in parts]):
        return
    with Feed(loader, lambda number: parts[number], plan.seed, len(parts)) as feed:
        for number, part in enumerate(parts):
            yield feed.take(number, part)


def _stream_once(loader: StreamLoader, largest: int, rank: int, plan: Plan) -> Iterator[Any]:
    if plan.splits_model or plan.shards_model:
        raise MisuseError(
            f"t.held_out: found {loader.kind}, a stream, with parallelism.strategy {plan.parallelism}; expected a "
            "dataset with len and [], because ranks need equally many batches. Use such a dataset for held-out samples"
        )
    return loader.once(rank, largest) if largest else iter(())


def _together(samples: int, largest: Sequence[int], rank: int) -> list[Part]:
    try:
        return once_together(samples, largest, rank)
    except ValueError as error:
        remedy = "because each forward pass with parallelism.strategy Sharded needs all ranks. Hold out more samples"
        raise MisuseError(f"t.held_out: {error}, {remedy}") from None
