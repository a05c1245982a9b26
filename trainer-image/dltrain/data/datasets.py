"""Datasets by name or path, split into a training part and a held-out part.

The bundled datasets are small files beside this module, made by hack/make_datasets.py. Synthetic samples are computed
from the seed and the number of the sample. The dataset python-source is the text of Python's standard library. A path
names an ``.npz`` file with the arrays x, y, x_test and y_test, or an ``.npy`` or ``.bin`` file of tokens. The ``.npz``
file may also have an array labels with the names of the classes.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlcontract import DatasetRef
from dltrain.data.files import KEYS, labels_in, read_arrays, scale_in
from dltrain.data.synthetic import SyntheticImages, SyntheticTokens
from dltrain.data.tokens import python_source, read_tokens
from dltrain.models import InputShape
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import PLAN_ENV, AttemptPlan

FOLDER = Path(__file__).parent
BUNDLED = ("digits", "breast-cancer", "wine", "iris")
LABELS = {"breast-cancer": ("malignant", "benign"), "iris": ("setosa", "versicolor", "virginica")}
"""Names of the classes of bundled datasets, as in scikit-learn. The classes of the others are numbers."""
ENLARGED = {"digits-32": ("digits", 4)}
"""Name of a dataset → (bundled dataset, integer factor by which its images are enlarged by nearest neighbour).

Some networks need larger images than the bundled ones.
"""
SYNTHETIC = {"synthetic-images": SyntheticImages, "synthetic-tokens": SyntheticTokens}
PYTHON_SOURCE = "python-source"
NAMES = (*BUNDLED, *ENLARGED, PYTHON_SOURCE, *SYNTHETIC)
_TOKENS = (".npy", ".bin")


class Dataset(Protocol):
    """Training and held-out samples, as pairs (inputs, targets).

    Inputs are images or tables of floats, with class numbers as targets, or tokens, with the next tokens as targets.
    """

    train_samples: int
    test_samples: int

    scale: float | None
    """Factor by which inputs of type uint8 were multiplied; None: the inputs are of another type."""
    labels: tuple[str, ...]
    """Names of the classes, by class number; empty if unknown, and for tokens."""

    @property
    def shape(self) -> InputShape: ...

    def train(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]: ...

    def test(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]: ...


class ArrayDataset:
    """A dataset of arrays in memory: training samples x with targets y, held-out samples x_test with targets y_test.

    ``labels``: names of the classes, if they are known.

    If x has two dimensions and contains integers, and y has the same shape, the samples are sequences of tokens.
    Otherwise, a uint8 x contains images, whose values are multiplied by ``scale``.
    """

    def __init__(
        self, arrays: dict[str, NDArray[np.generic]], scale: float = 1 / 255, labels: tuple[str, ...] = ()
    ) -> None:
        x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(arrays[key])) for key in KEYS)
        tokens = x.dim() == 2 and not x.is_floating_point() and y.shape == x.shape
        self._train, self._test = (self._prepare(a, b, tokens, scale) for a, b in ((x, y), (x_test, y_test)))
        self.train_samples, self.test_samples = len(x), len(x_test)
        top = max(int(part.max()) for pair in (self._train, self._test) for part in pair[1 - tokens :])
        self.shape = InputShape(tuple(x.shape[1:]), top + 1, tokens)
        self.scale = scale if x.dtype is torch.uint8 and not tokens else None
        self.labels = labels

    @staticmethod
    def _prepare(x: Tensor, y: Tensor, tokens: bool, scale: float) -> tuple[Tensor, Tensor]:
        if tokens:
            return x.long(), y.long()
        return (x.float() * scale if x.dtype is torch.uint8 else x.float()), y.long()

    def train(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices)
        return self._train[0][chosen], self._train[1][chosen]

    def test(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices)
        return self._test[0][chosen], self._test[1][chosen]


def load_by_name(dataset: str, seed: int = 0) -> Dataset:
    """Load the built-in dataset with the name ``dataset`` or, if there is none, the file with the path ``dataset``.

    Raise BadInputError if the file cannot be used.
    """
    return load(reference(dataset), seed)


def some_samples(data: Dataset, count: int) -> NDArray[np.int64]:
    """Return ``count`` numbers of training samples that this node has, for measurements. They may repeat."""
    own: Callable[[int], NDArray[np.int64]] | None = getattr(data, "own_samples", None)
    return np.arange(count) % data.train_samples if own is None else own(count)


def reference(dataset: str) -> DatasetRef:
    """Return the reference to a dataset for a plan. ``dataset``: the name of a built-in dataset, or a path."""
    if dataset in NAMES:
        return DatasetRef(name=dataset)
    planned = _planned()
    return planned if planned is not None and planned.sharded and planned.path == dataset else DatasetRef(path=dataset)


def _planned() -> DatasetRef | None:
    """Return the dataset of the plan that the agent has written for this rank, or None without an agent."""
    path = os.environ.get(PLAN_ENV)
    try:
        return AttemptPlan.parse(Path(path).read_bytes()).dataset if path else None
    except (OSError, ValueError):
        return None  # dltrain.init reports it


def load(ref: DatasetRef, seed: int = 0) -> Dataset:
    """Load the dataset to which ``ref`` in a plan refers. ``seed``: seed of synthetic data.

    Raise BadInputError if there is no such dataset or its file is invalid, VolumeError if the file cannot be read, and
    ShardError if a sharded one cannot be fetched.
    """
    if ref.sharded:
        from dltrain.data.sharded.dataset import open_sharded  # imports aiohttp, which other datasets do not need

        return open_sharded(ref)
    if ref.name in SYNTHETIC:
        return SYNTHETIC[ref.name](seed)
    if ref.name in (*BUNDLED, *ENLARGED):
        source, times = ENLARGED.get(ref.name, (ref.name, 1))
        with np.load(FOLDER / f"{source}.npz") as arrays:
            found, scale = dict(arrays), float(arrays["scale"]) if "scale" in arrays else 1.0
        if times > 1:
            found |= {key: found[key].repeat(times, axis=-2).repeat(times, axis=-1) for key in ("x", "x_test")}
        return ArrayDataset(found, scale, LABELS.get(ref.name) or labels_in(ref.name, found))
    if ref.name == PYTHON_SOURCE:
        return python_source()
    if ref.path is None:
        known = ", ".join(NAMES)
        raise BadInputError(
            "spec.dataset.name", f"'{ref.name}'", f"one of {known}", "choose one of these, or set spec.dataset.uri"
        )
    path = Path(ref.path)
    if not path.suffix and path.name == ref.path and not path.exists():
        raise BadInputError(
            "dataset",
            f"'{ref.path}'",
            f"one of {', '.join(NAMES)}, or the path of an .npz, .npy or .bin file",
            "correct the name or the path",
        )
    if path.suffix in _TOKENS:
        return read_tokens(path)
    arrays = read_arrays(path)
    return ArrayDataset(arrays, scale_in(str(path), arrays), labels_in(str(path), arrays))
