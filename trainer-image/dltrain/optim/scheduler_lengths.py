"""The lengths of learning-rate schedulers after a restart.

A length, such as ``T_max`` of CosineAnnealingLR, follows from the number of steps or epochs. This number may change
while a job is stopped, so the lengths are those of the script, not of the checkpoint. Most schedulers compute each rate
from the last one. If a length has changed, the rate is therefore computed anew from the position in the schedule, as if
the training had had the new length from its start.
"""

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

_LENGTHS = frozenset(["T_0", "T_max", "T_mult", "total_iters", "total_steps", "_schedule_phases", "step_size"])
_LENGTHS |= {"total_size", "step_ratio", "milestones", "_milestones"}
"""Attributes of schedulers that are lengths, or follow from them."""
_PARTS = "_schedulers"
"""Key of the states of the schedulers that a scheduler combines."""


def without_lengths(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state ``saved`` of a scheduler without lengths, its own and those of schedulers that it combines."""
    left = {name: value for name, value in saved.items() if name not in _LENGTHS}
    if _PARTS in left:
        left[_PARTS] = [without_lengths(part) for part in left[_PARTS]]
    return left


def lengths_differ(own: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return True if a length in a scheduler's ``own`` state is not that of the ``saved`` one. Both are JSON types.

    A milestone of a checkpoint of an older version is unknown, and counts as equal.
    """
    names = [name for name in _LENGTHS if name in own and saved.get(name)]
    if any(own[name] != saved[name] for name in names):
        return True
    return any(lengths_differ(*each) for each in zip(own.get(_PARTS, ()), saved.get(_PARTS, ()), strict=False))


def functions_differ(scheduler: LRScheduler, saved: Mapping[str, Any]) -> bool:
    """Return True if the functions of a LambdaLR do not lead to the last rates in its ``saved`` state.

    Checkpoints have no functions. A function may depend on the number of steps, too, as in linear decay.
    """
    if (parts := _parts(scheduler)) is not None:
        return any(functions_differ(*each) for each in zip(parts, saved.get(_PARTS, ()), strict=False))
    known = {"last_epoch", "base_lrs", "_last_lr"} <= saved.keys()
    if not isinstance(scheduler, LambdaLR) or not known or saved["last_epoch"] < 0:
        return False
    factors = [function(saved["last_epoch"]) for function in scheduler.lr_lambdas]
    rates = [base * factor for base, factor in zip(saved["base_lrs"], factors, strict=True)]
    # A rate that is a tensor has 32 bits.
    return not all(isclose(*each, rel_tol=1e-5) for each in zip(rates, saved["_last_lr"], strict=True))


def set_rates(schedulers: Sequence[LRScheduler]) -> None:
    """Set the learning rates to those of the ``schedulers`` of one optimizer at their positions.

    Each scheduler after the first takes the rates of those before it for its initial ones. If a scheduler has no
    formula for the rate at a position, do nothing: the rates continue from the present ones.
    """
    if not all(_has_formula(scheduler) for scheduler in schedulers):
        return
    groups = schedulers[0].optimizer.param_groups
    rates = [float(group["initial_lr"]) for group in groups]
    for scheduler in schedulers:
        _set_rates(scheduler, None, rates)
        rates = [float(group["lr"]) for group in groups]


def _has_formula(scheduler: LRScheduler) -> bool:
    if (parts := _parts(scheduler)) is not None:
        return all(_has_formula(part) for part in parts)
    kinds = (LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)
    return hasattr(scheduler, "_get_closed_form_lr") or isinstance(scheduler, kinds)


def _parts(scheduler: LRScheduler) -> Iterable[LRScheduler] | None:
    return scheduler._schedulers if isinstance(scheduler, SequentialLR | ChainedScheduler) else None


def _set_rates(scheduler: LRScheduler, position: int | None, initial: list[float]) -> None:
    """Set the learning rates to those of ``scheduler``.

    ``position``: number of calls of its ``step``; None: as many as it knows. ``initial``: the rates at position 0.
    """
    if isinstance(scheduler, SequentialLR):
        position = scheduler.last_epoch if position is None else position
        scheduler.last_epoch, index = position, bisect_right(scheduler._milestones, position)
        begin = scheduler._milestones[index - 1] if index else 0
        _set_rates(scheduler._schedulers[index], position - begin, initial)
        scheduler._last_lr = scheduler._schedulers[index].get_last_lr()
    elif isinstance(scheduler, ChainedScheduler):
        for part in scheduler._schedulers:
            _set_rates(part, position, initial)
            initial = [float(group["lr"]) for group in part.optimizer.param_groups]
        scheduler._last_lr = part.get_last_lr()
    else:
        _set_position(scheduler, scheduler.last_epoch if position is None else position, initial)


def _set_position(scheduler: LRScheduler, position: int, initial: list[float]) -> None:
    if isinstance(scheduler, OneCycleLR) and position > scheduler.total_steps:
        return  # it would raise ValueError, but the training has no further step
    bases = scheduler.base_lrs
    if not isinstance(scheduler, CyclicLR):  # its rates do not depend on the optimizer's
        scheduler.base_lrs = list(initial)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against steps to a position, and offers nothing else
        scheduler.step(position)
    scheduler.base_lrs = bases
