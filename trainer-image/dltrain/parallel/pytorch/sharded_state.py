"""The rows of a model's tensors that a rank has under ``fully_shard``, and those of its optimizer's state.

Ranks divide a tensor along the first dimension, as ``torch.chunk`` does, so the last ranks may have no rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dltrain.parallel.placement import Extents

State = Mapping[str, Tensor]


def part_of(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the rows of ``rank`` of a whole tensor."""
    parts = torch.chunk(whole, ranks)
    return parts[rank] if rank < len(parts) else whole[:0]


def first_row(rows: int, rank: int, ranks: int) -> int:
    """Return the index of the first row of ``rank``, of a tensor with ``rows`` rows."""
    return min(rank * -(-rows // ranks), rows)


def like(parameter: Any, part: Tensor) -> DTensor:
    """Return a tensor that is distributed over ranks as ``parameter``, with the part ``part`` on this rank."""
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def own_rows(tensors: State, rank: int, ranks: int) -> tuple[dict[str, Tensor], Extents]:
    """Return (the rows of each tensor that this rank stores in a checkpoint, where they are in the whole tensors).

    Tensors that are not divided are those of rank 0 as a whole. All ranks must call it.
    """
    own: dict[str, Tensor] = {}
    extents: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.placements == (Shard(0),):
            own[name] = tensor.to_local()
            extents[name] = first_row(tensor.shape[0], rank, ranks), tuple(tensor.shape)
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if rank == 0:
            own[name] = whole
    return own, extents


def by_owner(state: Mapping[Any, Any]) -> tuple[dict[int, dict[str, Any]], dict[Any, Any]]:
    """Return (the states of parameters by their index, the state that belongs to no parameter and has no tensors).

    ``state``: the entry ``state`` of an optimizer's ``state_dict()``.
    """
    entries = {index: entry for index, entry in state.items() if isinstance(index, int)}
    return entries, {key: value for key, value in state.items() if key not in entries}
