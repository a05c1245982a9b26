"""Datasets by name or path, for training scripts: ``dltrain.data.load("digits")``. The import is fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dltrain.data.datasets import Dataset

__all__ = ["load"]


def load(dataset: str | Path, seed: int = 0) -> Dataset:
    """Load a dataset that is split into a training part and a held-out part.

    ``dataset``: the name of a built-in dataset (digits, breast-cancer, wine, iris, digits-32, python-source,
    synthetic-images, synthetic-tokens), or the path of an ``.npz`` file with x, y, x_test and y_test, or of an ``.npy``
    or ``.bin`` file of tokens. ``seed``: seed of synthetic data. With ``t.dataset_path`` of a job with distribution
    Sharded, each node fetches only its part. Raise BadInputError if the file is missing or invalid, VolumeError if it
    cannot be read, and ShardError if a part of it cannot be fetched.
    """
    from dltrain.data.datasets import load_by_name

    return load_by_name(str(dataset), seed)
