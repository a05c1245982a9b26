"""The state of an optimizer whose model is split over ranks: what ranks send to rank 0, and what they cannot send."""

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dltrain.comm.core.fault_tolerance import translate
from dltrain.comm.core.waiting import wait_until
from dltrain.comm.process_group import SLICE_NBYTES, ProcessGroup
from dltrain.parallel.optimizer_checks import check_no_common_state
from dltrain.protocol.errors import MisuseError

_KINDS: tuple[type, ...] = (str, int, float)


def check_split_state(optimizer: Optimizer, own: Mapping[str, nn.Parameter], cut: Collection[str]) -> None:
    """Raise MisuseError if the ranks' states of ``optimizer`` cannot be put together to that of the whole model.

    ``own``: this rank's parameters by name. ``cut``: names of those of which the rank has only a part.
    """
    check_no_common_state(optimizer)
    for name in cut:
        shape = tuple(own[name].shape)
        for key, value in optimizer.state.get(own[name], {}).items():
            if not isinstance(value, Tensor) or tuple(value.shape) == shape:
                continue
            if not value.dim() or (value.numel() == 1 and value.dim() != len(shape)):
                continue
            raise MisuseError(
                f"{type(optimizer).__name__}: found a tensor of shape {tuple(value.shape)} in its state of parameter "
                f"{name}[{key!r}]; expected the shape {shape} of this rank's part of the parameter, or a single number "
                "without dimensions, because ranks divide the tensors of linear layers. Use parallelism.strategy Data "
                "or Pipeline, or another optimizer"
            )


def plain(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the state of a parameter without its tensors: numbers, strings, and containers of them.

    ``where``: the optimizer and the parameter, for messages. Raise MisuseError for another type.
    """
    return {key: _plain(value, f"{where}[{key!r}]") for key, value in state.items() if not isinstance(value, Tensor)}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in _KINDS:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(part, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_plain(part, f"{where}[{index}]") for index, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    raise MisuseError(
        f"{where}: found {type(value).__name__}; expected tensors, numbers, strings, and lists, tuples and "
        "dictionaries of numbers and strings, because ranks divide the model. Use parallelism.strategy Data, or "
        "another optimizer"
    )


def gathered_plain(process_group: ProcessGroup, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the states that are no tensors of all ranks' parameters on rank 0, and an empty dictionary elsewhere.

    ``mine``: those of this rank by name of the parameter. Raise PeerLostError if a rank is lost.
    """
    content = io.BytesIO()
    if any(mine.values()):
        torch.save(mine, content)
    found: dict[str, dict[str, Any]] = {}
    for part in collect(process_group, content.getvalue()):
        if part:
            found |= torch.load(io.BytesIO(part), weights_only=True)
    return found


def collect(process_group: ProcessGroup, content: bytes) -> Iterator[bytes]:
    """Yield ``content`` of each rank, in rank order, on rank 0, and nothing on other ranks.

    All ranks must iterate to the end. Rank 0 receives the content of a rank only when it is asked for it. Raise
    PeerLostError if a rank is lost.
    """
    counts = [int(row[0]) for row in process_group.gather([len(content)])]
    if process_group.rank:
        _transfer(np.frombuffer(content, np.uint8), lambda part: process_group.comm.Isend(part, 0))
        return
    yield content
    for rank in range(1, process_group.size):
        yield _received_from(process_group, rank, counts[rank])


def _received_from(process_group: ProcessGroup, rank: int, nbytes: int) -> bytes:
    room = np.empty(nbytes, np.uint8)
    _transfer(room, lambda part: process_group.comm.Irecv(part, rank))
    return room.tobytes()


def _transfer(array: Any, begin: Callable[[Any], Any]) -> None:
    from mpi4py import MPI

    try:
        for start in range(0, len(array), SLICE_NBYTES):
            wait_until(begin(array[start : start + SLICE_NBYTES]).Test)
    except MPI.Exception as error:
        raise translate(error) from error
