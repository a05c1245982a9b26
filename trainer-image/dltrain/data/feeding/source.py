"""From sample numbers to a batch in main memory, the same in every process.

A user's dataset may draw random numbers (augmentation). Before each sample torch, numpy and ``random`` are seeded by
(seed, epoch, sample): what a sample looks like depends neither on who makes it, nor on the rank or the split.
"""

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from dltrain.batch.sampling import Part
from dltrain.device import randomness
from dltrain.protocol.errors import BadInputError, MisuseError, SampleError

Collate = Callable[[list[Any]], Any]
"""Samples to a batch."""
_ODD, _MIX, _STIR = (np.array(v, np.uint64) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, eq=False)
class Request:
    """What a rank computes in a step. ``seed``: the plan's."""

    indices: NDArray[np.int64]
    epoch: int
    seed: int

    @classmethod
    def of(cls, part: Part, seed: int) -> "Request | None":
        """None: this rank computes nothing in the step."""
        return cls(part.indices, part.epoch, seed) if len(part.indices) else None

    def same(self, other: "Request") -> bool:
        return (self.epoch, self.seed) == (other.epoch, other.seed) and np.array_equal(self.indices, other.indices)

    def __str__(self) -> str:
        return ", ".join(map(str, self.indices[:4])) + (", …" if len(self.indices) > 4 else "")

    @property
    def sample_seeds(self) -> list[int]:
        """One for each sample: SplitMix64 (Steele, Lea and Flood 2014) at the sample's number, keyed by the epoch."""
        key = hashlib.blake2b(f"{self.seed} {self.epoch} samples".encode(), digest_size=8).digest()
        z = np.frombuffer(key, np.uint64) + (self.indices.astype(np.uint64) + np.array([1], np.uint64)) * _ODD
        z = (z ^ (z >> np.uint64(30))) * _MIX
        z = (z ^ (z >> np.uint64(27))) * _STIR
        return [int(value) for value in z ^ (z >> np.uint64(31))]


def _as_tensors(arrays: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Sharing their memory. Raises MisuseError for what is not numbers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a file mapped for reading: batches are copies
            return tuple(torch.as_tensor(part) for part in arrays)
    except (TypeError, ValueError) as error:
        raise MisuseError(f"dataset: found {error}, expected a tuple of tensors or arrays of numbers") from None


class Source:
    """Makes batches of a dataset: one of ``dltrain.data``, a tuple of tensors, or a map-style dataset of the user's."""

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        """Raises MisuseError when the dataset is none of these, or empty, or ``collate`` is not for it."""
        if isinstance(dataset, DataLoader):
            raise MisuseError(
                "dataset: found a DataLoader, expected the dataset in it: pass t.loader(loader.dataset), with its "
                "collate_fn if that is your own; the batch is the job's, divided among the ranks"
            )
        if isinstance(dataset, IterableDataset):
            raise MisuseError(
                f"dataset: found {type(dataset).__name__}, an IterableDataset, expected a map-style dataset (with len "
                "and []) or a tuple of tensors: which samples a step takes must be known before"
            )
        if type(dataset) is TensorDataset and collate is None:
            dataset = dataset.tensors
        elif isinstance(dataset, tuple) and any(isinstance(part, np.ndarray) for part in dataset):
            dataset = _as_tensors(dataset)
        self.dataset = dataset
        self.ours = hasattr(dataset, "train_samples") and not hasattr(dataset, "__getitem__")
        if self.ours:
            self.samples: int = dataset.train_samples
        elif isinstance(dataset, tuple) and all(isinstance(part, Tensor) for part in dataset):
            lengths = {len(part) for part in dataset}
            if len(lengths) != 1:
                raise MisuseError(f"dataset: found tensors of {sorted(lengths)} samples, expected equally many")
            (self.samples,) = lengths
        elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            self.samples = len(dataset)
        else:
            raise MisuseError(
                f"dataset: found {type(dataset).__name__}, expected a map-style dataset (with len and []) or a tuple "
                "of tensors; sampling by step needs random access"
            )
        if not self.samples:
            raise MisuseError("dataset: found no samples, expected at least one")
        if collate is not None and not self.foreign:
            raise MisuseError("collate_fn: found one for tensors, whose batches are slices; expected none")
        self.collate = default_collate if collate is None else collate

    @property
    def foreign(self) -> bool:
        """Whether the user's code makes the samples, which may do anything; else they are slices of memory, or ours."""
        return not self.ours and not isinstance(self.dataset, tuple)

    def make(self, request: Request) -> Any:
        """The batch. Raises SampleError naming the sample that could not be made.

        The process's random generators are elsewhere afterwards if the dataset is ``foreign``: see
        ``randomness.undisturbed``.
        """
        if self.ours:
            return self.dataset.train(request.indices)
        if not self.foreign:
            chosen = torch.from_numpy(request.indices)
            return [part[chosen] for part in self.dataset]
        samples = self._samples(request)
        try:
            return self.collate(samples)
        except (BadInputError, MemoryError):
            raise
        except Exception as error:
            raise SampleError(f"collate_fn of samples {request}: {type(error).__name__}: {error}") from error

    def _samples(self, request: Request) -> list[Any]:
        indices, seeds = request.indices.tolist(), request.sample_seeds
        many = getattr(self.dataset, "__getitems__", None)
        inner = self.dataset
        while type(inner) is Subset:  # random_split's: it may ask for one after the other, and each is to have its seed
            inner = inner.dataset
        many = many if hasattr(inner, "__getitems__") else None
        index: int | str = indices[0]
        try:
            if many is not None:
                index = f"{indices[0]} and {len(indices) - 1} more"
                randomness.seed(seeds[0], everywhere=True)
                return list(many(indices))
            made = []
            for index, seed in zip(indices, seeds, strict=True):
                randomness.seed(seed, everywhere=True)
                made.append(self.dataset[index])
            return made
        except (BadInputError, MemoryError):
            raise
        except Exception as error:
            raise SampleError(f"sample {index} of the dataset: {type(error).__name__}: {error}") from error
