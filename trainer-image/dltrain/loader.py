"""From sample numbers to a batch on the device. Users: ``loop``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Loader:
    """Batches of ``dataset``: one of ``dltrain.data``, a tuple of tensors, or a torch map-style dataset."""

    def __init__(self, dataset: Any, device: torch.device) -> None:
        """Raises ValueError when the dataset is none of these, or empty."""
        self.dataset = dataset
        self.device = device
        if hasattr(dataset, "train_samples"):
            self.samples: int = dataset.train_samples
        elif isinstance(dataset, tuple) and all(isinstance(part, Tensor) for part in dataset):
            lengths = {len(part) for part in dataset}
            if len(lengths) != 1:
                raise ValueError(f"dataset: found tensors of {sorted(lengths)} samples, expected equally many")
            (self.samples,) = lengths
        elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            self.samples = len(dataset)
        else:
            raise ValueError(
                f"dataset: found {type(dataset).__name__}, expected a map-style dataset (with len and []) or a tuple "
                "of tensors; sampling by step needs random access"
            )
        if not self.samples:
            raise ValueError("dataset: found no samples, expected at least one")

    def fetch(self, indices: NDArray[np.int64]) -> Any:
        """The samples as one batch, on the device."""
        if hasattr(self.dataset, "train_samples"):
            return self._move(self.dataset.train(indices))
        if isinstance(self.dataset, tuple):
            chosen = torch.from_numpy(indices)
            return self._move([part[chosen] for part in self.dataset])
        from torch.utils.data import default_collate

        return self._move(default_collate([self.dataset[int(index)] for index in indices]))

    def _move(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch.to(self.device)
        if isinstance(batch, dict):
            return {key: self._move(value) for key, value in batch.items()}
        if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
            return [self._move(value) for value in batch]
        return batch
