"""The loader of a stream, a dataset that can only be read in its own order: an ``IterableDataset`` or similar."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from dlcontract import Plan
from dltrain.data.feeding.device_copy import DeviceCopier
from dltrain.data.feeding.loader import MAX_BATCHES_AHEAD, AnyLoader
from dltrain.data.feeding.source import Collate
from dltrain.data.streams.reader import StreamReader, seed_of
from dltrain.data.streams.sequence import Position, Readers, Sequence
from dltrain.device import randomness
from dltrain.protocol.errors import BadInputError, MisuseError, SampleError

CHUNKS_AHEAD = 2
"""Number of chunks that each data worker reads in advance, as in torch's DataLoader, unless the script sets it."""


def is_stream(dataset: Any) -> bool:
    """Return True for an IterableDataset, and for an iterable without random access that has a state.

    Hugging Face's ``IterableDataset`` and datasets for torchdata's ``StatefulDataLoader`` have such a state.
    """
    if isinstance(dataset, IterableDataset):
        return True
    methods = ("__iter__", "state_dict", "load_state_dict")
    iterable = all(callable(getattr(dataset, method, None)) for method in methods)
    return iterable and not isinstance(dataset, type) and not hasattr(dataset, "__getitem__")


class StreamLoader(AnyLoader):
    """A stream and the options for reading it. Each rank reads its own stream."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        plan: Plan,
        *,
        workers: int | None = None,
        prefetch: int | None = None,
        collate_fn: Collate | None = None,
        sampler: Any = None,
        worker_init_fn: Callable[[int], Any] | None = None,
    ) -> None:
        """Check the options, which ``Trainer.loader`` describes. Raise MisuseError if one does not suit a stream.

        ``worker_init_fn``: see ``StreamReader``.
        """
        kind = type(dataset).__name__
        if sampler is not None:
            raise MisuseError(
                f"sampler: found {type(sampler).__name__} for {kind}, a stream; expected none, because a stream has "
                "its own order. Omit it, and draw the samples in the dataset"
            )
        for name, value in (("workers", workers), ("prefetch", prefetch)):
            if value is not None and value < 0:
                raise MisuseError(f"{name}: found {value}; expected 0 or more")
        if prefetch is not None and not (workers or 0) <= prefetch <= MAX_BATCHES_AHEAD:
            raise MisuseError(
                f"prefetch: found {prefetch} batches for {workers or 0} workers; expected at least one per worker and "
                f"at most {MAX_BATCHES_AHEAD}"
            )
        if not workers and prefetch:
            raise MisuseError(
                f"prefetch: found {prefetch} without workers; expected workers that read the stream in advance. Pass "
                "workers=1 or more, or omit prefetch"
            )
        self.kind, self.workers = kind, workers or 0
        self._ahead = CHUNKS_AHEAD if prefetch is None else prefetch // max(1, self.workers)
        self._collate = default_collate if collate_fn is None else collate_fn
        self._plan, self._mover = plan, DeviceCopier(device)
        # Apart from each other, because a script may evaluate in the middle of an epoch of the same stream.
        self._reader, self._reader_once = (StreamReader(dataset, plan.seed, worker_init_fn) for _ in range(2))

    def __len__(self) -> int:
        raise MisuseError(
            f"len(loader): found a loader of {self.kind}, a stream; expected a dataset with a length. The epochs of a "
            "stream end when a rank has no complete batch left. Use spec.steps to know the number of steps before"
        )

    @property
    def total_steps(self) -> int:
        """Return the plan's number of steps. Raise MisuseError if the plan has epochs, whose length is unknown."""
        if self._plan.steps is None:
            raise MisuseError(
                f"loader.total_steps: found {self._plan.epochs} epochs of {self.kind}, a stream; expected spec.steps, "
                "because the number of steps in an epoch of a stream is unknown"
            )
        return self._plan.steps

    def readers(self, *, once: bool = False) -> Readers:
        """Start the data workers and return them, or this rank as the only reader. Raise the errors of ``Workers``.

        ``once``: True for an evaluation.
        """
        try:
            return Readers(self._reader_once if once else self._reader, self.workers)
        except ValueError as error:
            raise MisuseError(str(error)) from error

    def sequence(self, readers: Readers, rank: int, position: Position, chunk: int) -> Sequence:
        """Return the samples of ``rank`` from ``position`` on. ``chunk``: the local batch size."""
        return Sequence(readers, rank, position, chunk, self._ahead)

    def batch(self, samples: list[Any], number: str) -> Any:
        """Return the batch of ``samples`` on the device. Random generators stay as they are.

        ``number``: identifies the batch in the training, for the random numbers of ``collate_fn``. Raise SampleError
        if ``collate_fn`` fails.
        """
        with randomness.undisturbed():
            randomness.seed(seed_of(f"{self._plan.seed} {number} collate"), everywhere=True)
            return self._mover.now(self._collated(samples))

    def _collated(self, samples: list[Any]) -> Any:
        if torch.get_default_device() != randomness.CPU:
            with randomness.CPU:
                return self._collated(samples)
        try:
            return self._collate(samples)
        except (BadInputError, MemoryError):
            raise
        except Exception as error:
            raise SampleError(
                f"collate_fn: found an error for a batch of {len(samples)} samples of the stream: "
                f"{type(error).__name__}: {error}"
            ) from error

    def once(self, rank: int, largest: int) -> Iterator[Any]:
        """Yield the batches of this rank's stream once, with at most ``largest`` samples each, as for an evaluation."""
        with closing(self.readers(once=True)) as readers:
            sequence, number = self.sequence(readers, rank, Position(0), largest), 0
            while count := sequence.available(largest):
                yield self.batch(sequence.take(count), f"held out {rank} {number}")
                number += 1
