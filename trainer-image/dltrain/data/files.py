"""Read and validate the ``.npz`` file of a dataset."""

import zipfile
import zlib
from collections.abc import Mapping
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
            # PyTorch reads only numbers in the byte order of the processor.
            found = {key: file[key] for key in file.files} if isinstance(file, np.lib.npyio.NpzFile) else {}
            return {key: array.astype(array.dtype.newbyteorder("="), copy=False) for key, array in found.items()}

    try:
        arrays = retry(read, str(path))
    except FileNotFoundError:
        raise BadInputError(FIELD, f"no file {path}", expected, "correct the path, or put the file there") from None
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, OSError) and is_transient(error):
            raise VolumeError(FIELD, path, error) from None
        raise BadInputError(FIELD, f"{path}: {error}", expected, "save it with numpy.savez") from None
    if missing := [key for key in KEYS if key not in arrays]:
        found = f"{path} with arrays {', '.join(sorted(arrays)) or 'none'}"
        raise BadInputError(FIELD, found, expected, f"add {', '.join(missing)}")
    for x, y in (("x", "y"), ("x_test", "y_test")):
        _check(path, x, arrays[x], y, arrays[y])
    train, held_out = arrays["x"], arrays["x_test"]
    tokens = _are_tokens(train, arrays["y"])
    check_samples(str(path), train.shape, train.dtype, held_out.shape, held_out.dtype, tokens=tokens)
    return arrays


def check_samples(
    path: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    held_out_shape: tuple[int, ...],
    held_out_dtype: np.dtype[Any],
    *,
    tokens: bool,
) -> None:
    """Raise BadInputError if training and held-out samples differ in their shape or scale, or have no values.

    ``path``: the file. ``tokens``: True if the samples are sequences of tokens, which have no scale.
    """
    if shape[1:] != held_out_shape[1:]:
        found = f"{path} with samples of shape {shape[1:]} in x and {held_out_shape[1:]} in x_test"
        raise BadInputError(FIELD, found, "one shape", "correct the file")
    if 0 in shape[1:]:
        raise _wrong(path, f"samples of shape {shape[1:]} in x", "at least one value per sample")
    if not tokens and (dtype == np.uint8) != (held_out_dtype == np.uint8):
        found = f"{path} with x of {dtype} and x_test of {held_out_dtype}"
        expected = "uint8 in both or in none, because uint8 values are multiplied by the scale and others are not"
        raise BadInputError(FIELD, found, expected, "save both with the same type")


def labels_in(path: str, arrays: Mapping[str, NDArray[np.generic]]) -> tuple[str, ...]:
    """Return the names of the classes in the array ``labels``; none without it. Raise BadInputError if it is bad."""
    if (found := arrays.get("labels")) is None:
        return ()
    if found.ndim != 1 or found.dtype.kind not in "USiub":
        raise _wrong(path, f"labels of {found.dtype} with shape {found.shape}", "a list of names, one for each class")
    return tuple(name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in found)


def scale_in(path: str, arrays: Mapping[str, NDArray[np.generic]]) -> float:
    """Return the factor for uint8 values in the array ``scale``; 1/255 without it. Raise BadInputError if it is bad."""
    if (found := arrays.get("scale")) is None:
        return 1 / 255
    if found.size != 1 or found.dtype.kind not in "fiu" or not np.isfinite(found).all():
        raise _wrong(path, f"scale of {found.dtype} with shape {found.shape}", "a single finite number")
    return float(found.reshape(()))


def _are_tokens(inputs: NDArray[np.generic], targets: NDArray[np.generic]) -> bool:
    return inputs.ndim == 2 and inputs.dtype.kind in "iu" and targets.shape == inputs.shape


def _check(path: Path, x: str, inputs: NDArray[np.generic], y: str, targets: NDArray[np.generic]) -> None:
    check_targets(str(path), x, inputs.dtype, inputs.shape, y, targets)
    if inputs.dtype.kind == "f" and inputs.size:
        extremes = np.array([inputs.min(), inputs.max()], np.float64)  # NaN is both
        if not np.isfinite(extremes).all():
            raise _wrong(str(path), f"values in {x} that are not finite", "finite numbers")
        if np.abs(extremes).max() > np.finfo(np.float32).max:
            found = f"values from {extremes[0]:g} to {extremes[1]:g} in {x}"
            raise _wrong(str(path), found, f"values up to {np.finfo(np.float32).max:g}, as models compute in float32")
    if inputs.size and _are_tokens(inputs, targets) and not 0 <= inputs.min() <= inputs.max() < MAX_CLASSES:
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
