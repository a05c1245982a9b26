"""Synthetic, learnable data for benchmarks. Each sample depends only on the seed and its number."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dltrain.models import InputShape

TRAIN_SAMPLES, TEST_SAMPLES = 10_000, 1_000


class _Synthetic:
    shape: InputShape
    train_samples, test_samples = TRAIN_SAMPLES, TEST_SAMPLES
    labels: tuple[str, ...] = ()
    scale: float | None = None

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([self.seed, index], dtype=np.uint64)))

    def _make(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def train(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return self._make(indices)

    def test(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return self._make(indices + TRAIN_SAMPLES)


class SyntheticImages(_Synthetic):
    """Images of shape (3, 32, 32) in 10 classes. Each image is the random pattern of its class plus noise.

    The standard deviation of the noise is twice that of the pattern.
    """

    shape = InputShape((3, 32, 32), 10)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._patterns = self._generator(2**32).standard_normal((10, 3, 32, 32), dtype=np.float32)

    def _make(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        noise = [self._generator(int(i)).standard_normal((3, 32, 32), dtype=np.float32) for i in indices]
        y = indices % 10
        return torch.from_numpy(2 * np.stack(noise) + self._patterns[y]), torch.from_numpy(y)


class SyntheticTokens(_Synthetic):
    """Sequences of 128 tokens from a vocabulary of 256.

    The token t is followed by 5 t + 17 + k modulo 256, where k is 0, 1, 2 or 3 at random. The minimum loss is therefore
    ln 4.
    """

    shape = InputShape((128,), 256, tokens=True)

    def _make(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        draws = np.stack([self._generator(int(i)).integers(0, 256, 129) for i in indices])
        tokens = draws.copy()
        for position in range(1, 129):
            tokens[:, position] = (5 * tokens[:, position - 1] + 17 + draws[:, position] % 4) % 256
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
