"""The loss of the built-in trainer, the count of correct predictions, and their analysis."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from dlcontract import Plan
from dltrain.analysis.collection import Collection
from dltrain.batch.micro_batches import MicroBatches
from dltrain.data.datasets import Dataset

MAX_BATCH = 256
"""Maximum number of samples in a batch of an evaluation. Larger ones would hardly be faster."""


def largest_batch(plan: Plan, shares: Sequence[int], rank: int) -> int:
    """Return the maximum number of samples in a batch of an evaluation: at most as many as train at once.

    So the evaluation fits into the memory that the plan predicts for the training, as it keeps no activations for a
    backward pass. ``shares``: local batch sizes. A parameter server, which has no batches, takes the smallest of its
    workers. With model parallelism, all ranks of a replica get the same result.
    """
    if plan.splits_model:
        largest = -(-shares[rank] // plan.micro_batches)
    else:
        sizes = [MicroBatches(plan).largest(shares, each) for each in range(len(shares))]
        largest = sizes[rank] or min(size for size in sizes if size)
    return min(MAX_BATCH, largest)


def mean_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over samples (for tokens: also over positions)."""
    return cross_entropy(logits.flatten(0, -2), y.flatten())


@torch.no_grad()
def count_correct(
    predict: Callable[[torch.Tensor], torch.Tensor | None],
    data: Dataset,
    chosen: NDArray[np.int64],
    device: torch.device,
    largest: int = MAX_BATCH,
) -> tuple[int, int]:
    """Return (number of correct predictions, number of predictions) for the held-out samples with numbers ``chosen``.

    For tokens, there is one prediction per position. ``predict``: maps inputs to logits, or to None if another rank has
    the logits. Samples without logits are not counted. ``largest``: maximum number of samples in a batch.
    """
    right, seen = (
        torch.zeros((), dtype=torch.long, device=device),
        0,
    )  # read only at the end, because each read waits for the GPU
    for begin in range(0, len(chosen), largest):
        x, y = (part.to(device) for part in data.test(chosen[begin : begin + largest]))
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
    largest: int = MAX_BATCH,
) -> Collection:
    """Return the predictions for the held-out samples with numbers ``chosen``, for an analysis of all ranks.

    ``predict``: maps inputs to logits, or to None if another rank has the logits. ``largest``: maximum number of
    samples in a batch.
    """
    found = Collection("language" if data.shape.tokens else "classification")
    for begin in range(0, len(chosen), largest):
        numbers = chosen[begin : begin + largest]
        x, y = (part.to(device) for part in data.test(numbers))
        found.add(predict(x), y, numbers)
    return found
