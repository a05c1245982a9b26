"""Copy the parameters of a model and the state of an optimizer from one rank to all others."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dltrain.horovod.collectives import broadcast_, broadcast_object
from dltrain.horovod.optimizer import same_groups
from dltrain.horovod.world import world


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any] | torch.Tensor], root_rank: int = 0, process_set: Any = None
) -> None:
    """Replace the values of parameters by those of rank ``root_rank``, in place.

    ``params``: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``, in the same order on all
    ranks. Entries that are not tensors stay as they are.
    """
    given = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    for entry in given:
        tensor = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor, root_rank, process_set=process_set)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, process_set: Any = None) -> None:
    """Replace the state of ``optimizer`` by that of rank ``root_rank``: learning rates, momentum and other state."""
    state = broadcast_object(
        optimizer.state_dict() if world().rank == root_rank else None, root_rank, process_set=process_set
    )
    if world().rank != root_rank:
        with same_groups(optimizer):
            optimizer.load_state_dict(state)
