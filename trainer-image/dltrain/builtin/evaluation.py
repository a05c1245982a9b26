"""What the built-in trainer minimizes, and how it counts right answers."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from dltrain.data.datasets import Dataset

_BATCH = 256


def mean_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy, mean over samples (and positions, of tokens)."""
    return cross_entropy(logits.flatten(0, -2), y.flatten())


@torch.no_grad()
def count_right(
    predict: Callable[[torch.Tensor], torch.Tensor | None],
    data: Dataset,
    chosen: NDArray[np.int64],
    device: torch.device,
) -> tuple[int, int]:
    """Of the ``chosen`` held-out samples (tokens: positions): how many are told right, and how many there are.

    ``predict``: inputs to logits; None where another rank has them, which counts as none.
    """
    right, seen = torch.zeros((), dtype=torch.long, device=device), 0  # read once: each time waits for a GPU
    for begin in range(0, len(chosen), _BATCH):
        x, y = (part.to(device) for part in data.test(chosen[begin : begin + _BATCH]))
        if (logits := predict(x)) is not None:
            right += (logits.argmax(-1) == y).sum()
            seen += y.numel()
    return int(right), seen
