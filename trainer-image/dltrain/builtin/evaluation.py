"""The loss of the built-in trainer, the count of correct predictions, and their analysis."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from dltrain.analysis.collection import Collection
from dltrain.data.datasets import Dataset

_BATCH = 256


def mean_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over samples (for tokens: also over positions)."""
    return cross_entropy(logits.flatten(0, -2), y.flatten())


@torch.no_grad()
def count_correct(
    predict: Callable[[torch.Tensor], torch.Tensor | None],
    data: Dataset,
    chosen: NDArray[np.int64],
    device: torch.device,
) -> tuple[int, int]:
    """Return (number of correct predictions, number of predictions) for the held-out samples with numbers ``chosen``.

    For tokens, there is one prediction per position. ``predict``: maps inputs to logits, or to None if another rank has
    the logits. Samples without logits are not counted.
    """
    right, seen = (
        torch.zeros((), dtype=torch.long, device=device),
        0,
    )  # read only at the end, because each read waits for the GPU
    for begin in range(0, len(chosen), _BATCH):
        x, y = (part.to(device) for part in data.test(chosen[begin : begin + _BATCH]))
        if (logits := predict(x)) is not None:
            right += (logits.argmax(-1) == y).sum()
            seen += y.numel()
    return int(right), seen


@torch.no_grad()
def collect(
    predict: Callable[[torch.Tensor], torch.Tensor | None],
    data: Dataset,
    chosen: NDArray[np.int64],
    device: torch.device,
) -> Collection:
    """Return the predictions for the held-out samples with numbers ``chosen``, for an analysis of all ranks.

    ``predict``: maps inputs to logits, or to None if another rank has the logits.
    """
    found = Collection("language" if data.shape.tokens else "classification")
    for begin in range(0, len(chosen), _BATCH):
        numbers = chosen[begin : begin + _BATCH]
        x, y = (part.to(device) for part in data.test(numbers))
        found.add(predict(x), y, numbers)
    return found
