"""A mode of torch that counts what operations compute and move, and the memory that they keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
_MORE_PRODUCTS = (
    _CPU_ATTENTION,
    *_RECURRENT,
    f"{_CPU_ATTENTION}_backward",
    *(f"{name}_backward" for name in _RECURRENT),
)
"""Products of matrices for which torch has no formula."""


def harmless_mode() -> Any:
    """Return a base class of modes of torch under which a script runs as it does without them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class HarmlessMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True
        """Without this, torch raises an error for operators such as ``torch.cond``. Their own costs are not counted."""

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Let torch compile what the script first calls while this mode is active. Otherwise, it never would."""
            return True

    return HarmlessMode


def counting_mode(own: Sequence[Any]) -> Any:
    """Return a mode of torch that counts the operations and the kept memory of what runs in it.

    ``own``: tensors that do not count as kept, such as parameters.
    """
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils.flop_counter import flop_registry

    weak: Any = StorageWeakRef

    class Counting(harmless_mode()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.work: dict[str, list[float]] = {}
            """[Number of operations, FLOPs, bytes read, bytes written] by kind, without views and parameters."""
            self._own = {storage._cdata for storage in _storages(own)}
            self._made: dict[int, tuple[Any, int]] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            with contextlib.suppress(Exception):  # An operator that cannot be counted must still run.
                self._add(func, args, kwargs or {}, result)
            return result

        def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            given = [t for t in tensors_in([args, kwargs]) if not self._own & {s._cdata for s in _storages([t])}]
            known, outputs = {storage._cdata for storage in _storages(given)}, list(tensors_in([result]))
            is_view = not func._schema.is_mutable
            for storage in _storages(outputs):
                if storage._cdata not in self._own and storage._cdata not in known:
                    self._made[storage._cdata] = (weak(storage), storage.nbytes())
                    is_view = False
            packet = func._overloadpacket
            formula = flop_registry.get(packet)
            flops = float(formula(*args, **kwargs, out_val=result)) if formula else _more_flops(packet, args)
            if not given or (is_view and not flops):
                return
            costs = self.work.setdefault(kind_of(packet, flops), [0, 0.0, 0.0, 0.0])
            for i, more in enumerate((1, flops, _nbytes(given), _nbytes(outputs))):
                costs[i] += more

        def kept_nbytes(self) -> int:
            """Return the bytes of the tensors that operations have made and that still exist."""
            self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
            return sum(nbytes for _, nbytes in self._made.values())

    return Counting()


def kind_of(packet: Any, flops: float = 0.0) -> str:
    """Return the kind of an operator: convolution, product, pool or other. ``flops``: its operations, if known."""
    from torch.utils.flop_counter import flop_registry

    name = packet.__name__
    if "conv" in name:
        return "convolution"
    if flops or packet in flop_registry or name in _MORE_PRODUCTS:
        return "product"
    return "pool" if "pool" in name else "other"


def _more_flops(packet: Any, args: Any) -> float:
    """Return the operations of operators for which torch has no formula: attention on CPUs, and recurrent layers."""
    name = packet.__name__
    if name == _CPU_ATTENTION:
        query, key, value = args[:3]
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        return float(2 * pairs * (query.shape[3] + value.shape[3]))
    if name in _RECURRENT:
        # After the weights, the operator of CPUs has the states, which also have two dimensions.
        given = args[1:5] if name == "mkldnn_rnn_layer" else args[1:2]
        weights = [tensor for tensor in tensors_in(given) if tensor.dim() == 2]
        return float(2 * args[0].shape[0] * args[0].shape[1] * sum(weight.numel() for weight in weights))
    return 0.0


def _nbytes(tensors: Sequence[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _storages(tensors: Any) -> Iterator[Any]:
    for tensor in tensors:
        with contextlib.suppress(Exception):  # Tensors of some kinds have no storage.
            yield tensor.untyped_storage()


def tensors_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the tensors with at least one dimension in nested lists, tuples and dictionaries."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.dim():
            yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1)
