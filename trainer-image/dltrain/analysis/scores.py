"""Convert predictions and targets, as arrays or tensors of any library, to columns of numpy arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dltrain.analysis.result import Task

IGNORED = -100
"""Target of positions that do not count, such as padding. It is the default of torch's cross entropy."""
_SUM_TOLERANCE = 1e-3
"""Rows of scores that are not negative and sum to 1 within this tolerance are probabilities. Others are logits."""


@dataclass(frozen=True)
class Scored:
    """One batch of class predictions, one entry per sample. ``confidence`` and ``log_p`` are None without scores.

    ``confidence``: probability of ``top``, the predicted class. ``log_p``: log-probability of the target.
    ``classes``: number of scores, or 0 without scores. ``position``: number of the sample in the batch.
    """

    target: NDArray[np.int64]
    top: NDArray[np.int64]
    confidence: NDArray[np.float64] | None
    log_p: NDArray[np.float64] | None
    classes: int
    position: NDArray[np.int64]
    invalid: int


def array(value: Any, name: str = "predictions, targets") -> NDArray[Any]:
    """Return an array, a tensor on any device or a (nested) list of numbers as a numpy array. bfloat16 becomes float32.

    ``name``: the user's word for ``value``. Raise ValueError for anything else.
    """
    if hasattr(value, "detach"):
        value = value.detach()
        if value.is_floating_point() and value.element_size() < 4:  # numpy has no bfloat16.
            value = value.float()
        value = value.cpu().numpy()
    found = np.asarray(value)
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{name}: found values of type {found.dtype}; expected numbers. Convert them")
    return found


def task_of(predictions: Any, targets: NDArray[Any]) -> Task:
    """Return the task that the shapes and types suggest. Raise ValueError if they fit several tasks or none.

    Scores of shape (n, classes) or class numbers with whole targets of shape (n,): classification. Scores of shape (n,
    t, vocabulary) with whole targets of shape (n, t): language. Targets that are fractions: regression.
    """
    shape, whole = tuple(np.shape(predictions)), targets.dtype.kind in "biu"
    if not whole:
        return "regression"
    if shape[:-1] == targets.shape and len(shape) == 3:
        return "language"
    if (shape[:-1] == targets.shape and len(shape) == 2) or (_whole(predictions) and shape == targets.shape):
        return "classification"
    if shape == targets.shape and targets.dtype.kind == "b":
        return "classification"
    if shape == targets.shape:
        raise ValueError(
            f"task: found fractions as predictions and whole numbers as targets, both of shape {shape}; expected the "
            "task, because both a regression and a classifier of two classes fit. Set task='regression' or "
            "task='classification'"
        )
    raise _unlike(shape, targets.shape)


def is_second_class(predictions: Any, targets: NDArray[Any]) -> bool:
    """Return True if ``predictions`` holds one logit or probability of the second of two classes for each target."""
    return tuple(np.shape(predictions)) == targets.shape and not _whole(predictions)


def are_logits(predictions: Any) -> bool:
    """Return True if a value is below 0 or above 1, so that ``predictions`` cannot be probabilities."""
    values = array(predictions)
    return bool(((values < 0) | (values > 1)).any())


def scored(predictions: Any, targets: NDArray[Any], *, logits: bool = False) -> Scored:
    """Return one batch of predictions of classes or tokens. Raise ValueError for shapes that do not fit.

    ``predictions``: logits or probabilities of shape (…, classes); class numbers of the shape of ``targets``; or one
    probability of the second of two classes, of the shape of ``targets``. ``logits``: True: one logit, instead of one
    probability.
    """
    shape = tuple(np.shape(predictions))
    target = targets.astype(np.int64).reshape(-1)
    counted = target != IGNORED
    if shape == targets.shape and _whole(predictions):
        top = array(predictions).astype(np.int64).reshape(-1)
        _check(target[counted], None)
        _check(top[counted], None)
        return Scored(target[counted], top[counted], None, None, 0, np.flatnonzero(counted), 0)
    if shape == targets.shape:
        second = array(predictions).astype(np.float64)
        # These two logits have the same difference, and are never taken for two probabilities, whose sum is 1.
        predictions = np.stack([-second / 2, second / 2] if logits else [1 - second, second], -1)
    elif shape[:-1] != targets.shape or not shape[-1:] or shape[-1] < 2:
        raise _unlike(shape, targets.shape)
    classes = int(predictions.shape[-1])
    _check(target[counted], classes)
    safe = np.where(counted, target, 0)
    log_p, best, confidence = (_of_tensor if hasattr(predictions, "detach") else _of_array)(predictions, safe)
    valid = np.isfinite(confidence) & ~np.isnan(log_p)
    use = counted & valid
    return Scored(
        target[use],
        best[use].astype(np.int64),
        np.clip(confidence[use], 0.0, 1.0),
        np.maximum(log_p[use], -700.0),  # A probability of 0 must not make the mean infinite.
        classes,
        np.flatnonzero(use),
        int((counted & ~valid).sum()),
    )


def _whole(value: Any) -> bool:
    if hasattr(value, "is_floating_point"):
        return not value.is_floating_point()
    return bool(np.asarray(value).dtype.kind in "biu")


def _of_array(scores: Any, target: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    """Return (log-probability of the target, predicted class, its probability) for scores of shape (…, classes)."""
    rows = np.asarray(scores, dtype=np.float64).reshape(-1, np.shape(scores)[-1])
    if not len(rows):
        return np.zeros(0), np.zeros(0, np.int64), np.zeros(0)
    with np.errstate(all="ignore"):
        sums = rows.sum(-1)  # Rows with NaN or infinity say nothing about the others.
        if not (rows < 0).any() and (np.abs(sums - 1) <= _SUM_TOLERANCE)[np.isfinite(sums)].all():
            log = np.log(rows)
        else:
            log = rows - rows.max(-1, keepdims=True)
            log = log - np.log(np.exp(log).sum(-1, keepdims=True))
        top = rows.argmax(-1)
        every = np.arange(len(rows))
        return log[every, target], top, np.exp(log[every, top])


def _of_tensor(scores: Any, target: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    """Return the same as ``_of_array``, computed on the device of the tensor ``scores``, which may be large."""
    rows = scores.detach().reshape(-1, scores.shape[-1]).float()
    if not len(rows):
        return np.zeros(0), np.zeros(0, np.int64), np.zeros(0)
    sums = rows.sum(-1)
    if not bool((rows < 0).any()) and bool((((sums - 1).abs() <= _SUM_TOLERANCE) | ~sums.isfinite()).all()):
        log = rows.log()
    else:
        log = rows.log_softmax(-1)
    top = rows.argmax(-1)
    index = top.new_tensor(target)
    of_target, of_top = (log.gather(-1, each[:, None])[:, 0].double().cpu().numpy() for each in (index, top))
    return of_target, top.cpu().numpy(), np.exp(of_top)


def _check(numbers: NDArray[np.int64], classes: int | None) -> None:
    if not len(numbers):
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or (classes is not None and high >= classes):
        found = low if low < 0 else high
        upper = "" if classes is None else f" to {classes - 1}"
        raise ValueError(
            f"targets: found class {found}; expected class numbers from 0{upper}, or {IGNORED} for positions that do "
            "not count. Correct the targets, or give the scores of every class"
        )


def _unlike(shape: tuple[int, ...], target: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"predictions: found shape {shape} for targets of shape {target}; expected one prediction, or one row of "
        "scores, for each target. Pass logits of shape (n, classes) with targets of shape (n,), tokens of shape (n, t, "
        "vocabulary) with (n, t), or numbers of the targets' shape"
    )
