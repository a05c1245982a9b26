"""Make the loader that suits what a script passes to ``t.loader``: a dataset, a stream or a torch ``DataLoader``."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from dlcontract import Plan
from dltrain.data.feeding.data_loader import TakenOver, take_over
from dltrain.data.feeding.loader import MAX_BATCHES_AHEAD, AnyLoader, Loader
from dltrain.data.feeding.source import Collate
from dltrain.data.streams.loader import StreamLoader, is_stream


def make_loader(
    given: Any,
    device: torch.device,
    plan: Plan,
    *,
    workers: int | None = None,
    prefetch: int | None = None,
    collate_fn: Collate | None = None,
    drop_last: bool = False,
    sampler: Iterable[int] | None = None,
    max_workers: int = 0,
    ranks_here: int = 1,
) -> AnyLoader:
    """Return the loader for ``given``: a dataset, a stream, or a DataLoader, whose options the arguments override.

    The arguments are those of ``Loader``. Raise MisuseError if an option or the dataset is not supported.
    """
    found = take_over(given) if isinstance(given, DataLoader) else TakenOver(given)
    if workers is None:
        workers = found.workers
        if prefetch is None and found.prefetch is not None:
            prefetch = min(found.prefetch, MAX_BATCHES_AHEAD)
    collate_fn, sampler = collate_fn or found.collate_fn, found.sampler if sampler is None else sampler
    made: AnyLoader
    if is_stream(found.dataset):
        made = StreamLoader(
            found.dataset,
            device,
            plan,
            workers=workers,
            prefetch=prefetch,
            collate_fn=collate_fn,
            sampler=sampler,
            worker_init_fn=found.worker_init_fn,
        )
    else:
        made = Loader(
            found.dataset,
            device,
            workers=workers,
            prefetch=prefetch,
            collate_fn=collate_fn,
            drop_last=drop_last or found.drop_last,
            sampler=sampler,
            max_workers=max_workers,
            ranks_here=ranks_here,
            plan=plan,
        )
    made.batch_size = found.batch_size
    return made
