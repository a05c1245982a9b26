"""Options of an optimizer's parameter groups in checkpoints: JSON has numbers where the optimizer may have tensors.

A learning rate is a tensor in scripts that compile the update of the optimizer, so that a new rate needs no new code.
"""

import inspect
from collections.abc import Container, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dltrain.optim.combined import CombinedOptimizer


def numbers(options: Any) -> Any:
    """Return the options of a parameter group, or one of them, with numbers in place of tensors."""
    if isinstance(options, dict):
        return {name: numbers(option) for name, option in options.items()}
    if isinstance(options, list | tuple):
        return [numbers(option) for option in options]
    return options.tolist() if isinstance(options, Tensor | np.generic) else options


def constant(option: Any) -> bool:
    """Return True for a function, class, dtype or device. It never changes, and the script sets it again at a restart.

    Checkpoints do not contain such options.
    """
    return inspect.isroutine(option) or isinstance(option, type | torch.dtype | torch.device)


def like(own: Any, saved: Any) -> Any:
    """Return ``saved``, options from a checkpoint, with tensors and tuples where an optimizer's ``own`` are such."""
    if isinstance(own, dict):
        return {name: like(own.get(name), option) for name, option in saved.items()}
    if isinstance(own, tuple) and isinstance(saved, list) and len(own) == len(saved):
        return tuple(like(*each) for each in zip(own, saved, strict=True))
    return own.new_tensor(saved) if isinstance(own, Tensor) else saved


def load_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load ``saved``, a ``state_dict()``, into ``optimizer``.

    torch takes each string in the state of a parameter for a container, and replaces it by the text of a generator
    object. This function restores these strings.
    """
    if isinstance(optimizer, CombinedOptimizer):
        for one, part in zip(optimizer.optimizers, optimizer.parts(saved), strict=True):
            load_state(one, part)
        return
    optimizer.load_state_dict(saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        if index in saved["state"]:
            optimizer.state[parameter] = _with_strings(optimizer.state[parameter], saved["state"][index])


def load_own_state(
    optimizer: Optimizer, whole: dict[str, Any], groups: Sequence[Sequence[Hashable]], own: Container[Hashable]
) -> None:
    """Load the part of ``whole`` into ``optimizer`` that belongs to this rank's parameters, or to no parameter.

    ``whole``: a ``state_dict()`` with the groups and parameter indices of an optimizer for the whole model.
    ``groups``: the keys of the parameters in each of its groups. ``own``: the keys of the optimizer's parameters.
    """
    kept = [[key for key in members if key in own] for members in groups]
    members = [key for keys in groups for key in keys]
    local = {key: i for i, key in enumerate(key for keys in kept for key in keys)}
    states: dict[Any, Any] = {}
    for index, state in whole["state"].items():
        if not isinstance(index, int):
            states[index] = state  # belongs to no parameter
        elif members[index] in local:
            states[local[members[index]]] = state
    own_groups = [
        group | {"params": [local[key] for key in keys]}
        for group, keys in zip(whole["param_groups"], kept, strict=True)
    ]
    load_state(optimizer, {"state": states, "param_groups": own_groups})


def _with_strings(loaded: Any, saved: Any) -> Any:
    """Return ``loaded`` with the strings of ``saved`` in place of those that torch has replaced."""
    if isinstance(loaded, str) and isinstance(saved, str):
        return saved if loaded.startswith("<generator object ") else loaded
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _with_strings(loaded[key], saved[key])
    elif isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_with_strings(*each) for each in zip(loaded, saved, strict=True))
    return loaded
