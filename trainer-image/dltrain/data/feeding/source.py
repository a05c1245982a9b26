"""Load a batch into main memory by its sample numbers, with the same result in every process.

A user's dataset may draw random numbers for augmentation. Before each sample, torch, numpy and ``random`` are therefore
seeded with a number that depends on the plan's seed, the epoch and the sample. A sample then does not depend on the
process or rank that loads it, or on how the batch is split.
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
from torch.utils.data import Subset, TensorDataset, default_collate

from dltrain.batch.sampling import Part
from dltrain.device import randomness
from dltrain.protocol.errors import BadInputError, MisuseError, SampleError

Collate = Callable[[list[Any]], Any]
"""Type of a function that makes one batch from a list of samples."""
MAX_COLUMNS = 4
"""Maximum length of a list of tensors that is refused as ``[x, y]``. The tensors of a longer list count as samples."""
_ODD, _MIX, _STIR = (np.array(v, np.uint64) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, eq=False)
class Request:
    """The samples that a rank processes in one step.

    ``indices``: the samples' indices in the dataset. ``seed``: the plan's seed. ``draws``: see ``Part``.
    """

    indices: NDArray[np.int64]
    epoch: int
    seed: int
    draws: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, part: Part, seed: int) -> "Request | None":
        """Return the request for a part of the batch, or None if the part is empty. ``seed``: the plan's seed."""
        return cls(part.indices, part.epoch, seed, part.draws) if len(part.indices) else None

    def same(self, other: "Request") -> bool:
        if (self.epoch, self.seed) != (other.epoch, other.seed) or not np.array_equal(self.indices, other.indices):
            return False
        return np.array_equal(self._numbers, other._numbers)

    def __str__(self) -> str:
        return ", ".join(map(str, self.indices[:4])) + (", …" if len(self.indices) > 4 else "")

    @property
    def _numbers(self) -> NDArray[np.int64]:
        """Return a number for each sample that no other has in the same epoch."""
        return self.indices if self.draws is None else self.draws

    @property
    def sample_seeds(self) -> list[int]:
        """Return a seed for each sample, which depends only on the plan's seed, the epoch and the sample's index.

        If an epoch may contain a sample several times, it depends on the number in the epoch in place of the index. The
        seeds are SplitMix64 (Steele, Lea and Flood 2014) of this number, with a key per seed and epoch.
        """
        key = hashlib.blake2b(f"{self.seed} {self.epoch} samples".encode(), digest_size=8).digest()
        z = np.frombuffer(key, np.uint64) + (self._numbers.astype(np.uint64) + np.array([1], np.uint64)) * _ODD
        z = (z ^ (z >> np.uint64(30))) * _MIX
        z = (z ^ (z >> np.uint64(27))) * _STIR
        return [int(value) for value in z ^ (z >> np.uint64(31))]


def _as_tensors(arrays: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return tensors that share the memory of ``arrays``. Raise MisuseError for arrays that do not contain numbers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # read-only arrays are safe: batches are copies
            return tuple(part if isinstance(part, Tensor) else torch.as_tensor(part, device="cpu") for part in arrays)
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f"dataset: found an array that torch cannot convert ({error}); expected a tuple of tensors or arrays of "
            "numbers"
        ) from None


def _is_list_of_columns(dataset: Any) -> bool:
    """Return True if ``dataset`` is a list such as ``[x, y]``, whose tensors or arrays have a row for each sample.

    As in torch's DataLoader, the list would count as a dataset of two samples, because its length is 2.
    """
    if not isinstance(dataset, list) or not 0 < len(dataset) <= MAX_COLUMNS:
        return False
    if not all(isinstance(part, Tensor | np.ndarray) and part.ndim for part in dataset):
        return False
    return len({len(part) for part in dataset}) == 1 and len(dataset[0]) > len(dataset)


class Source:
    """A dataset from which batches can be made.

    The dataset is one of ``dltrain.data``, a tuple of tensors or arrays, or a user's map-style dataset.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        """Check the dataset. ``collate``: makes a batch from a list of samples; None: torch's function.

        Raise MisuseError if the dataset is unsupported or empty, or if ``collate`` is given for tensors.
        """
        if _is_list_of_columns(dataset):
            shapes = ", ".join(str(tuple(part.shape)) for part in dataset)
            raise MisuseError(
                f"dataset: found a list of tensors with the shapes {shapes}; expected a tuple of them if each row is a "
                "sample. Call t.loader((x, y)) in place of t.loader([x, y]). If each tensor of the list is one sample, "
                "call t.loader(torch.stack(samples))"
            )
        if type(dataset) is TensorDataset and collate is None:
            dataset = dataset.tensors
        elif isinstance(dataset, tuple) and all(isinstance(part, np.ndarray | Tensor) for part in dataset):
            dataset = _as_tensors(dataset)
        self.dataset = dataset
        self.ours = hasattr(dataset, "train_samples") and not hasattr(dataset, "__getitem__")
        if self.ours:
            self.samples: int = dataset.train_samples
        elif isinstance(dataset, tuple) and all(isinstance(part, Tensor) for part in dataset):
            if any(not part.dim() for part in dataset):
                raise MisuseError(
                    "dataset: found a tensor of shape (); expected a row for each sample in every tensor of the tuple. "
                    "Repeat the value for all samples, or use it in the loop"
                )
            lengths = {len(part) for part in dataset}
            if len(lengths) != 1:
                raise MisuseError(
                    f"dataset: found tensors of {sorted(lengths)} samples; expected equal lengths, with one sample "
                    "per row"
                )
            (self.samples,) = lengths
        elif isinstance(dataset, tuple):
            kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in dataset[:8]))
            raise MisuseError(
                f"dataset: found a tuple of {kinds}; expected a tuple of tensors or arrays with one sample "
                "per row. Convert lists with torch.tensor. If each item is a sample, call t.loader(list(samples))"
            )
        elif isinstance(dataset, dict) and dataset and 0 not in dataset:
            keys = ", ".join(map(repr, list(dataset)[:4])) + (", …" if len(dataset) > 4 else "")
            raise MisuseError(
                f"dataset: found a {type(dataset).__name__} with the keys {keys}; expected a dataset of samples 0, 1, "
                "…. Pass one of its values, such as dataset['train'], or a tuple of its tensors"
            )
        elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, str | bytes):
            self.samples = len(dataset)
        else:
            raise MisuseError(
                f"dataset: found {type(dataset).__name__}; expected a map-style dataset (with len and []), an "
                "IterableDataset, a DataLoader of torch, or a tuple of tensors"
            )
        if not self.samples:
            raise MisuseError("dataset: found no samples; expected at least one")
        if collate is not None and not self.foreign:
            raise MisuseError(
                "collate_fn: found a function with a dataset of tensors; expected None for tensors, which need no "
                "collation. Omit collate_fn"
            )
        self.collate = default_collate if collate is None else collate

    @property
    def foreign(self) -> bool:
        """Return True if user code loads the samples: the dataset is neither tensors nor one of ``dltrain.data``."""
        return not self.ours and not isinstance(self.dataset, tuple)

    def make(self, request: Request) -> Any:
        """Load and return the batch: a list for tensors, and what ``collate`` returns for a ``foreign`` dataset.

        Raise SampleError with the number of the sample that failed.

        New tensors are in main memory, whatever torch's default device is in the script. Otherwise, the rank would draw
        random numbers on another device than its data workers, which use no device.

        Loading from a ``foreign`` dataset changes the state of the process's random generators. The context manager
        ``randomness.undisturbed`` restores this state.
        """
        if torch.get_default_device() != randomness.CPU:
            with randomness.CPU:
                return self.make(request)
        if self.ours:
            return list(self.dataset.train(request.indices))
        if not self.foreign:
            chosen = torch.from_numpy(request.indices)
            return [part[chosen] for part in self.dataset]
        samples = self._samples(request)
        try:
            return self.collate(samples)
        except (BadInputError, MemoryError):
            raise
        except Exception as error:
            raise SampleError(
                f"collate_fn: found an error for the batch of samples {request}: {type(error).__name__}: {error}"
            ) from error

    def _samples(self, request: Request) -> list[Any]:
        indices, seeds = request.indices.tolist(), request.sample_seeds
        many = getattr(self.dataset, "__getitems__", None)
        inner = self.dataset
        # A Subset (from random_split) has __getitems__ even if its dataset does not. In that case, samples are loaded
        # one by one, so that each has its own seed.
        while type(inner) is Subset:
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
