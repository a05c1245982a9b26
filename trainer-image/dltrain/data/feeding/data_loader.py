"""Take over the dataset and the options of a script's torch ``DataLoader``, or of torchdata's ``StatefulDataLoader``.

dltrain does not iterate over the DataLoader: ranks could then neither divide a batch unevenly nor repeat a step. It
makes the same batches from the DataLoader's dataset, sampler and ``collate_fn`` instead. An option that it cannot take
over is an error if it affects the batches. Options that only affect speed may be left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from dltrain.data.feeding.source import Collate
from dltrain.protocol.errors import MisuseError

_OF_TORCH = ("torch", "torchdata")
"""Packages whose samplers and DataLoaders are known here. A subclass in another package may behave differently."""


@dataclass(frozen=True)
class TakenOver:
    """The dataset of a DataLoader, and those of its options that apply to ``t.loader``.

    ``workers`` and ``prefetch`` are None if the DataLoader leaves the choice to dltrain. ``sampler`` is None if each
    sample is drawn once in random order. ``batch_size`` is that of the DataLoader, and None if the script did not
    choose one. ``worker_init_fn``: a function that each worker of a stream calls first.
    """

    dataset: Any
    collate_fn: Collate | None = None
    workers: int | None = None
    prefetch: int | None = None
    drop_last: bool = False
    sampler: Iterable[int] | None = None
    batch_size: int | None = None
    worker_init_fn: Callable[[int], Any] | None = None


def take_over(loader: "DataLoader[Any]") -> TakenOver:
    """Return the dataset and the options of ``loader``. Raise MisuseError for an option that cannot be taken over."""
    kind = type(loader).__name__
    if not _of_torch(_owner(type(loader), "__iter__")):
        raise MisuseError(
            f"dataset: found {kind}, a DataLoader with an __iter__ of its own; expected one of torch, because dltrain "
            "makes the batches. Do the work of __iter__ in the dataset or in collate_fn"
        )
    stream = isinstance(loader.dataset, IterableDataset)
    batches, sampler, drop_last = loader.batch_sampler, loader.sampler, loader.drop_last
    batch_size = loader.batch_size
    if batches is None:
        raise MisuseError(
            f"dataset: found a {kind} with batch_size None, whose dataset makes batches; expected samples, because the "
            "job sets the batch size and splits it among ranks. Let the dataset return single samples"
        )
    if not (isinstance(batches, BatchSampler) and _of_torch(type(batches))):
        raise MisuseError(
            f"dataset: found a {kind} with the batch sampler {type(batches).__name__}; expected a sampler of single "
            "samples, because the job sets the batch size and splits it among ranks. Pass DataLoader(…, sampler=…) if "
            "the order of single samples matters"
        )
    if batch_size is None:  # the script has passed a BatchSampler of torch, whose options count
        sampler, drop_last, batch_size = batches.sampler, batches.drop_last, batches.batch_size
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    in_memory = type(loader.dataset) is TensorDataset and collate is None
    workers = None if in_memory or not loader.num_workers else loader.num_workers
    if loader.worker_init_fn is not None and workers and not stream:
        raise MisuseError(
            f"dataset: found a {kind} with a worker_init_fn; expected none, because the data workers of dltrain do not "
            "call it. Remove it: dltrain seeds torch, numpy and random before each sample. Open files in __getitem__"
        )
    return TakenOver(
        dataset=loader.dataset,
        collate_fn=collate,
        workers=workers,
        prefetch=workers * (loader.prefetch_factor or 1) if workers else None,
        drop_last=drop_last,
        sampler=None if stream else _single_samples(sampler),
        batch_size=batch_size if batch_size != 1 else None,  # the default of a DataLoader
        worker_init_fn=loader.worker_init_fn if workers else None,
    )


def _single_samples(sampler: Any) -> Iterable[int] | None:
    """Return the sampler for ``t.loader``; None if each sample is drawn once in random order.

    A DistributedSampler divides the samples among ranks, which dltrain does itself, so only its order counts.
    """
    if isinstance(sampler, DistributedSampler) and _of_torch(type(sampler)):
        dataset: Any = sampler.dataset
        return None if sampler.shuffle else SequentialSampler(dataset)
    if isinstance(sampler, RandomSampler) and _of_torch(type(sampler)):
        whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return None if whole else sampler
    found: Iterable[int] = sampler
    return found


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OF_TORCH


def _owner(kind: type, method: str) -> type:
    """Return the class that defines ``method`` for objects of class ``kind``."""
    return next(each for each in kind.__mro__ if method in vars(each))
