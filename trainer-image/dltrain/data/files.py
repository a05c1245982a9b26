"""Read and validate the ``.npz`` file of a dataset."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dltrain.host.volume_access import is_transient, retry
from dltrain.protocol.errors import BadInputError, VolumeError

KEYS = ("x", "y", "x_test", "y_test")
FIELD = "spec.dataset.uri"
MAX_CLASSES = 2**20
"""Upper limit of class numbers and tokens, which must be below it.

Larger numbers are considered mistakes, because a model has one output per class and would not fit into memory.
"""


def read_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of an ``.npz`` file by name. Raise BadInputError if an array is missing or invalid.

    Raise VolumeError if the file cannot be read, even after repetitions.
    """
    expected = f"an .npz file with arrays {', '.join(KEYS)}"

    def read() -> dict[str, NDArray[np.generic]]:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files} if isinstance(file, np.lib.npyio.NpzFile) else {}

    try:
        arrays = retry(read, str(path))
    except FileNotFoundError:
        raise BadInputError(FIELD, f"no file {path}", expected, "correct the path, or put the file there") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, OSError) and is_transient(error):
            raise VolumeError(FIELD, path, error) from None
        raise BadInputError(FIELD, f"{path}: {error}", expected, "save it with numpy.savez") from None
    if missing := [key for key in KEYS if key not in arrays]:
        found = f"{path} with arrays {', '.join(sorted(arrays)) or 'none'}"
        raise BadInputError(FIELD, found, expected, f"add {', '.join(missing)}")
    for x, y in (("x", "y"), ("x_test", "y_test")):
        _check(path, x, arrays[x], y, arrays[y])
    if arrays["x"].shape[1:] != arrays["x_test"].shape[1:]:
        found = f"{path} with samples of shape {arrays['x'].shape[1:]} in x and {arrays['x_test'].shape[1:]} in x_test"
        raise BadInputError(FIELD, found, "one shape", "correct the file")
    return arrays


def _check(path: Path, x: str, inputs: NDArray[np.generic], y: str, targets: NDArray[np.generic]) -> None:
    check_targets(str(path), x, inputs.dtype, inputs.shape, y, targets)
    if inputs.dtype.kind == "f" and not (np.isfinite(inputs.min()) and np.isfinite(inputs.max())):  # NaN is both
        raise _wrong(str(path), f"values in {x} that are not finite", "finite numbers")
    tokens = inputs.ndim == 2 and inputs.dtype.kind in "iu" and targets.shape == inputs.shape
    if tokens and not 0 <= inputs.min() <= inputs.max() < MAX_CLASSES:
        found = f"tokens from {inputs.min()} to {inputs.max()} in {x}"
        raise _wrong(str(path), found, f"tokens from 0 and below {MAX_CLASSES}")


def check_targets(
    path: str, x: str, dtype: np.dtype[Any], shape: tuple[int, ...], y: str, targets: NDArray[np.generic]
) -> None:
    """Raise BadInputError if the targets are invalid, or do not match inputs of this type and shape.

    ``path``: the file. ``x``, ``y``: the names of the arrays in the file.
    """
    if not shape or not targets.ndim or not shape[0] or shape[0] != len(targets):
        counts = [f"{size[0]} samples" if size else "a single number" for size in (shape, targets.shape)]
        expected = "as many targets as inputs, at least one"
        raise _wrong(path, f"{counts[0]} in the array {x} and {counts[1]} in the array {y}", expected)
    if dtype.kind not in "fiub" or dtype == np.longdouble:
        raise _wrong(path, f"{x} of {dtype}", "numbers: floats or integers")
    if not np.issubdtype(targets.dtype, np.integer) or targets.min() < 0:
        raise _wrong(path, f"{y} of {targets.dtype}", "class numbers: integers from 0")
    if targets.max() >= MAX_CLASSES:
        raise _wrong(path, f"class {targets.max()} in {y}", f"class numbers below {MAX_CLASSES}")
    tokens = len(shape) == 2 and dtype.kind in "iu" and targets.shape == shape
    if targets.ndim > 1 and not tokens:
        raise _wrong(path, f"{y} of shape {targets.shape}", f"a class number per sample: shape ({shape[0]},)")


def _wrong(path: str, found: str, expected: str) -> BadInputError:
    return BadInputError(FIELD, f"{path} with {found}", expected, "correct the file")
