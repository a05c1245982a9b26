"""Calls of torch's learning-rate schedulers, and their state in checkpoints.

A scheduler counts how often it is called. If a script called it, a repeated step would count twice, and a restart would
reset the count. The trainer therefore calls schedulers after each completed step or epoch, and checkpoints contain
their state.
"""

from collections import Counter
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dltrain.optim.options import like, numbers
from dltrain.optim.scheduler_lengths import functions_differ, lengths_differ, set_rates, without_lengths
from dltrain.protocol.errors import MisuseError

_CHANGED = ("lr", "momentum", "betas")
"""Options of an optimizer that a scheduler or the script may change, and a scheduler's constructor sets anew."""
_OPTIONS = "optimizer options"
"""Key of these options in the state of a scheduler, for each group of parameters."""
_PLAIN = (str, int, float, bool, type(None))
_LEFT_OUT = object()


class Schedules:
    """The schedulers of a run, in the order in which the script added them."""

    def __init__(self) -> None:
        self._registered: list[tuple[LRScheduler, bool]] = []
        self._saved_states: list[dict[str, Any]] = []
        self._lengths_differ = False
        """True if a length or function is not that of the checkpoint. The rates are then computed anew."""

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Store the states from a checkpoint. Schedulers get these states, in order, when the script adds them."""
        self._saved_states = saved

    def add(self, scheduler: LRScheduler, each_epoch: bool) -> None:
        """Add a scheduler and restore its state from the checkpoint, if any. ``each_epoch``: step it once per epoch.

        Raise MisuseError if dltrain does not support this kind of scheduler.
        """
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            found, remedy = type(scheduler).__name__, "set the rate in optimizer.param_groups yourself"
            if isinstance(scheduler, ReduceLROnPlateau):
                remedy = "pass it to t.keep, and call its step(metric) after opt.step(), with one value on all ranks"
            raise MisuseError(
                f"t.schedule: scheduler: found {found}; expected a torch.optim.lr_scheduler whose step() needs no "
                f"argument. Otherwise, {remedy}"
            )
        if len(self._registered) < len(self._saved_states):
            saved = self._saved_states[len(self._registered)]
            self._lengths_differ |= lengths_differ(_plain(scheduler.state_dict()), saved)
            self._lengths_differ |= functions_differ(scheduler, saved)
            scheduler.load_state_dict(_merged(scheduler.state_dict(), without_lengths(saved)))
            # The scheduler's constructor has overwritten the learning rates and other options of the checkpoint. Its
            # own last rate is not the present one if other schedulers have changed the rate since, or the script has.
            # It is used only for checkpoints of versions that did not save the rate.
            groups = scheduler.optimizer.param_groups
            for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = like(group["lr"], rate)
            for group, options in zip(groups, saved.get(_OPTIONS, [{}] * len(groups)), strict=True):
                group.update({name: like(group.get(name), option) for name, option in options.items()})
        self._registered.append((scheduler, each_epoch))
        if self._lengths_differ:
            set_rates([each for each, _ in self._registered])

    def step(self, *, end_of_epoch: bool) -> None:
        """Call the ``step`` methods of the schedulers after a completed training step.

        ``end_of_epoch``: True if the step is the last one of an epoch. Only then, schedulers that were added with
        ``each_epoch`` are called as well.
        """
        for scheduler, each_epoch in self._registered:
            if end_of_epoch or not each_epoch:
                scheduler.step()

    def state(self) -> list[dict[str, Any]]:
        """Return the states of all schedulers for a checkpoint, as JSON types."""
        states = (scheduler.state_dict() | {_OPTIONS: _options(scheduler)} for scheduler, _ in self._registered)
        return [_plain(state) for state in states]


def _options(scheduler: LRScheduler) -> list[dict[str, Any]]:
    return [{name: group[name] for name in _CHANGED if name in group} for group in scheduler.optimizer.param_groups]


def _plain(value: Any) -> Any:
    """Return the part of a scheduler's state that JSON supports, or ``_LEFT_OUT`` if JSON cannot represent ``value``.

    The other parts (functions) never change, and the script creates them again.
    """
    if isinstance(value, Counter):  # the milestones of a MultiStepLR
        return sorted(value.elements())
    if isinstance(value, dict):
        saved = {key: _plain(part) for key, part in value.items() if isinstance(key, str)}
        return {key: part for key, part in saved.items() if part is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return _LEFT_OUT if any(part is _LEFT_OUT for part in parts) else parts
    value = numbers(value)
    return value if isinstance(value, _PLAIN) else _LEFT_OUT


def _merged(own: Any, saved: Any) -> Any:
    """Return a scheduler's ``own`` state, in which ``saved`` values from a checkpoint replace the values of same name.

    Values without a saved one, such as functions, which a checkpoint cannot contain, remain.
    """
    if isinstance(own, dict) and isinstance(saved, dict):
        return {key: _merged(part, saved[key]) if key in saved else part for key, part in own.items()} if saved else own
    if isinstance(own, list) and isinstance(saved, list) and any(isinstance(part, dict) for part in saved):
        return [_merged(a, b) for a, b in zip(own, saved, strict=True)]
    return saved
