"""``dltrain.evaluate``: analyse predictions on held-out data over all ranks, and put the result into the run report.

Importing this module needs the standard library only. ``evaluate`` needs numpy, and torch only for tensors.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dltrain.reporting import script_reports

if TYPE_CHECKING:
    from dltrain.analysis.collection import Collection
    from dltrain.analysis.result import Analysis, OtherModel, Task


def evaluate(
    predictions: Any,
    targets: Any = None,
    *,
    labels: Sequence[str] | Mapping[int, str] = (),
    index: Any = None,
    task: Task | None = None,
    step: int | None = None,
    other_models: Mapping[str, float] = MappingProxyType({}),
) -> Analysis | None:
    """Analyse a model's predictions on held-out data, and show the analysis in the run report and the job's status.

    Call it on every rank, each with its part of the held-out data. Parts may differ in size and may be empty. All ranks
    get the same analysis, which covers all parts; None if there are no samples. The last analysis of a run counts.

    ``predictions``, ``targets``: arrays, tensors or lists of numbers. For a classifier: logits or probabilities of
    shape (n, classes), or class numbers of shape (n,), with class numbers as targets. For a regression: numbers of any
    shape, and targets of the same shape. For a language model: logits of shape (n, t, vocabulary) with targets of shape
    (n, t). Targets of -100 do not count, nor do predictions that are NaN or infinite, which the analysis counts.

    Without ``targets``, ``predictions`` is an iterable of batches, each a tuple (predictions, targets) or (predictions,
    targets, index). Only sums are stored, so held-out data of any size fit into memory:

        dltrain.evaluate((model(x), y) for x, y in t.held_out(loader))

    ``labels``: names of the classes, as a list or by class number. ``index``: the number of each sample in the held-out
    data, for the list of the most-wrong examples; by default, samples are numbered in the order of the ranks. ``task``:
    classification, regression or language, if the shapes do not show it. ``step``: number of completed steps, for
    scripts that do not call ``dltrain.init``; default: that of the last ``dltrain.report``. ``other_models``: names of
    up to 5 other models, such as a linear one, and what they reach on the same data: accuracy, R² or perplexity. The
    report compares the model with them.

    Raise ValueError for shapes, batches, class numbers, labels or values of other models that do not fit.
    """
    from dltrain.analysis.collection import Collection

    others, names = _other_models(other_models), _by_number(labels)
    collection = Collection(task)
    if targets is None:
        for batch in predictions:
            collection.add(*_checked(batch))
            del batch  # Its graph, if it has one, would else be in memory beside that of the next batch.
    else:
        collection.add(predictions, targets, index)
    if collection.seems_classification and script_reports.is_rank_0():
        warnings.warn(
            "dltrain.evaluate: task: found floating-point targets that are all 0 or 1, analysed as a regression; "
            "expected the task. Pass task='classification' for two classes, or task='regression'",
            stacklevel=2,
        )
    return share(collection, names, script_reports.trainer(), step, others)


def _by_number(labels: Sequence[str] | Mapping[int, str]) -> Sequence[str]:
    """Return the names of the classes in the order of their numbers. A class without a name is its number.

    Raise ValueError for a mapping of anything but class numbers.
    """
    if not isinstance(labels, Mapping):
        return labels
    names = {int(number): name for number, name in labels.items() if str(number).isdecimal()}
    if len(names) < len(labels):
        odd = next(key for key in labels if not str(key).isdecimal())
        raise ValueError(
            f"labels: found the class {odd!r} in a mapping; expected names by class number, such as {{0: 'cat'}}. Swap "
            "keys and values, or pass a list"
        )
    return [names.get(number, str(number)) for number in range(max(names, default=-1) + 1)]


def _checked(batch: Any) -> Sequence[Any]:
    """Return a batch of ``evaluate``. Raise ValueError unless it has two or three parts."""
    if isinstance(batch, tuple | list) and len(batch) in (2, 3):
        return batch
    parts = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise ValueError(
        f"predictions: found a batch of type {type(batch).__name__}{parts}, and no targets; expected batches "
        "(predictions, targets) or (predictions, targets, index). Pass the targets as second argument, or such batches"
    )


def share(
    collection: Collection,
    labels: Sequence[str],
    trainer: script_reports.Trainer | None,
    step: int | None = None,
    others: tuple[OtherModel, ...] = (),
) -> Analysis | None:
    """Merge the collections of all ranks, and report the analysis to the agent. Return the analysis, on every rank.

    ``trainer``: the trainer whose workers have collections; None: the script has no trainer.
    """
    from dltrain.analysis.collection import merged

    parts = trainer.collect(collection.packed()) if trainer is not None else _collect(collection.packed())
    found = merged(parts, [str(label) for label in labels])
    if found is None:
        return None
    if found.metric[0] != "RMSE":  # Without an R² there is nothing to compare.
        found = replace(found, other_models=others)
    if trainer is not None:
        trainer.analyzed(found)
    else:
        script_reports.send_analysis(found, step)
    return found


def _other_models(given: Mapping[str, float]) -> tuple[OtherModel, ...]:
    from dltrain.analysis.result import MAX_NAME, MAX_OTHER_MODELS, OtherModel

    if len(given) > MAX_OTHER_MODELS:
        raise ValueError(f"other_models: found {len(given)}; expected at most {MAX_OTHER_MODELS}. Name the best ones")
    found = tuple(OtherModel(str(name)[:MAX_NAME], float(value)) for name, value in given.items())
    if invalid := [each for each in found if not math.isfinite(each.value)]:
        raise ValueError(
            f"other_models: found {invalid[0].value} for {invalid[0].name}; expected a finite number. Leave it out"
        )
    return found


def _collect(data: bytes) -> list[bytes]:
    """Return the ``data`` of every rank of a script without a trainer, over torch.distributed or MPI.

    A script that uses neither has one rank.
    """
    torch = sys.modules.get("torch")
    group = getattr(torch, "distributed", None)
    if group is not None and group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        found: list[Any] = [None] * group.get_world_size()
        group.all_gather_object(found, data)
        return found
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        everyone: list[bytes] = mpi.COMM_WORLD.allgather(data)
        return everyone
    return [data]
