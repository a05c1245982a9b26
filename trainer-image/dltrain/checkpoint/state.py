"""Convert the state of any torch model and optimizer to named tensors and JSON, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dltrain.checkpoint.store import Snapshot
from dltrain.device.rank_device import finish


class Staging:
    """Reusable main memory for snapshots of the training state. Memory for copies from a GPU is pinned.

    New memory would cost a page fault per 4 KiB. Together, the page faults would take several times as long as the
    copy.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._sources: set[torch.device] = set()

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a contiguous copy.

        Reuse the memory of the previous copy with this ``name`` if shape and dtype are equal.

        A copy from a GPU is asynchronous, because each wait would take as long as copying a small tensor. Call ``wait``
        before you use the copy.
        """
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._held[name] = held
        self._sources.add(tensor.device)
        return held.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies are complete."""
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
    """Return a copy of the training state in main memory, which later steps do not modify.

    ``model``, ``optimizer``: the ``state_dict()`` of each. ``state``: additional data for JSON. ``kept``: additional
    tensors. ``staging``: memory for the copy. The snapshot is valid until the next capture with the same ``staging``.
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
    """Load a snapshot into a model and an optimizer of equal structure.

    If the structure differs, raise torch's error.
    """
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
    """Copy rank 0's parameters and buffers to every rank. ``broadcast``: a function like ``ProcessGroup.broadcast``."""
    from safetensors.torch import load, save

    content = save({name: _copy(tensor) for name, tensor in model.state_dict().items()})
    model.load_state_dict(load(broadcast(content)))
