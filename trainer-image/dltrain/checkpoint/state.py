"""Training state as named tensors and JSON, and back: any torch model and optimizer."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dltrain.checkpoint.store import Snapshot
from dltrain.device.rank_device import finish


class Staging:
    """Main memory that snapshots are copied into, one after another. Pinned for copies from a GPU.

    Fresh memory costs a page fault every 4 KiB, which together take several times as long as the copy.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._sources: set[torch.device] = set()

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A contiguous copy; in the memory of the last one of this ``name``, where it fits. One from a GPU is under
        way when this returns: to wait for each takes as long as to copy a small one.
        """
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._held[name] = held
        self._sources.add(tensor.device)
        return held.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Until all copies are made."""
        for device in self._sources:
            finish(device)


def capture(
    step: int,
    model: Mapping[str, Tensor],
    optimizer: dict[str, Any],
    state: dict[str, Any],
    staging: Staging | None = None,
    kept: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """A copy in main memory, which training may not touch any more.

    ``model``, ``optimizer``: their ``state_dict()``. ``state``: JSON to keep beside them, ``kept``: tensors.
    ``staging``: where the copy lies; the snapshot is good until the next one is captured there.
    """
    staging = staging or Staging()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entry in optimizer["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = staging.copy(f"optimizer {index}.{key}", value)
            else:
                scalars.setdefault(str(index), {})[key] = value
    snapshot = Snapshot(
        step,
        {name: staging.copy(f"model {name}", tensor) for name, tensor in model.items()},
        tensors,
        state | {"optimizer": {"groups": optimizer["param_groups"], "scalars": scalars}},
        {name: staging.copy(f"kept {name}", tensor) for name, tensor in (kept or {}).items()},
    )
    staging.wait()
    return snapshot


def restore(
    snapshot: Snapshot,
    load_model: Callable[[dict[str, Tensor]], object],
    load_optimizer: Callable[[dict[str, Any]], object],
) -> None:
    """Load a snapshot into a model and an optimizer made the same way. Raises what torch raises when they are not."""
    load_model(snapshot.model)
    kept = snapshot.state["optimizer"]
    entries: dict[int, dict[str, Any]] = {}
    for name, tensor in snapshot.optimizer.items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = tensor
    for number, scalars in kept["scalars"].items():
        entries.setdefault(int(number), {}).update(scalars)
    load_optimizer({"state": entries, "param_groups": kept["groups"]})


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


@torch.no_grad()
def replicate(model: nn.Module, broadcast: Any) -> None:
    """Give every rank rank 0's parameters and buffers. ``broadcast``: bytes to bytes, as ``ProcessGroup.broadcast``."""
    from safetensors.torch import load, save

    content = save({name: _copy(tensor) for name, tensor in model.state_dict().items()})
    model.load_state_dict(load(broadcast(content)))
