"""Create a model without memory for its parameters, and compute the initial values of one parameter at a time.

The model is created on torch's meta device. The operations that would fill its parameters are recorded, each with the
state of torch's random generator before it. So the values of a parameter can be computed later, in any order, and they
are bit-identical to those of a model that is created in main memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_INITIAL = "_dltrain_initial_values"
"""Attribute of a deferred model with its ``InitialValues``."""


@dataclass(frozen=True)
class _Operation:
    """An operation that changes a tensor, or a view of it, in place.

    ``size``, ``stride`` and ``offset`` describe the view. ``generator``: the state of the random generator before the
    operation, or None if it draws no random numbers.
    """

    run: Callable[..., object]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    rest: tuple[Any, ...]
    named: Mapping[str, Any]
    generator: Tensor | None

    def apply(self, whole: Tensor) -> None:
        """Run the operation on ``whole``, a contiguous tensor in main memory."""
        if self.generator is not None:
            torch.default_generator.set_state(self.generator)
        self.run(whole.as_strided(self.size, self.stride, self.offset), *self.rest, **self.named)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operations that change tensors of the meta device.

    Random operations also run on a temporary tensor, so that the random generator advances as usual.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[int, tuple[torch.UntypedStorage, list[_Operation]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, Tensor) and target.is_meta:
            self._record(func, target, args[1:], named)
            return target
        return func(*args, **named)

    def _record(self, func: Any, target: Tensor, rest: tuple[Any, ...], named: dict[str, Any]) -> None:
        if unknown := [each for each in (*rest, *named.values()) if isinstance(each, Tensor) and each.is_meta]:
            raise ValueError(
                f"{func}: found an argument of shape {tuple(unknown[0].shape)} without values; expected initial values "
                "that do not depend on other tensors of the model"
            )
        draws = torch.Tag.nondeterministic_seeded in func.tags
        operation = _Operation(
            func, target.shape, target.stride(), int(target.storage_offset()), rest, named,
            torch.default_generator.get_state() if draws else None,
        )  # fmt: skip
        storage = target.untyped_storage()
        self._found.setdefault(storage._cdata, (storage, []))[1].append(operation)
        if draws:
            span = 1 + sum((n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True))
            drawn = temporary((span if target.numel() else 0,), target.dtype)
            func(drawn.as_strided(target.shape, target.stride()), *rest, **named)

    def of(self, tensor: Tensor) -> list[_Operation]:
        """Return the operations that filled ``tensor``, in their order."""
        return self._found.get(tensor.untyped_storage()._cdata, (None, []))[1]


class InitialValues:
    """The initial values of the parameters of a deferred model, which are computed when they are needed."""

    def __init__(self, model: nn.Module, recorder: _Recorder) -> None:
        self._operations = {name: recorder.of(parameter) for name, parameter in model.named_parameters()}
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}

    def fill(self, name: str, whole: Tensor) -> None:
        """Write the initial values of the parameter ``name`` to ``whole``, a contiguous tensor in main memory.

        ``whole`` may have another dtype than the model was created in. The random generator is as before afterwards.
        """
        before, drawn = torch.default_generator.get_state(), whole
        if whole.dtype != self._dtypes[name]:
            drawn = temporary(whole.shape, self._dtypes[name])
        with torch.no_grad():
            for operation in self._operations[name]:
                operation.apply(drawn)
            if drawn is not whole:
                whole.copy_(drawn)
        torch.default_generator.set_state(before)

    def __deepcopy__(self, memo: object) -> "InitialValues":
        return self  # the operations never change


def temporary(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a new tensor in main memory that goes back to the system when the tensor is freed.

    Freed memory of the heap stays with the process (``host.heap``). Small objects would divide it, so that the next
    large tensor would not fit there, and the heap would grow to the size of the whole model.
    """
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that ``make`` creates, with parameters that have no memory (torch's meta device).

    The random generator advances as if the model were created in main memory. ``make`` must fill parameters by
    operations in place, such as ``normal_``. It must not use ``trunc_normal_``, ``orthogonal_``, ``sparse_`` or
    ``dirac_`` of ``torch.nn.init``, which may do nothing on the meta device. Raise ValueError for a model with buffers,
    or if an initial value depends on another tensor of the model.
    """
    recorder = _Recorder()
    with torch.device("meta"), recorder:
        model = make()
    if buffers := [name for name, _ in model.named_buffers()]:
        raise ValueError(f"model: found buffers {', '.join(buffers)}; expected only parameters")
    setattr(model, _INITIAL, InitialValues(model, recorder))
    return model


def initial_values(model: nn.Module) -> InitialValues | None:
    """Return the initial values of a deferred model, or None if its parameters are in memory."""
    found: InitialValues | None = getattr(model, _INITIAL, None)
    return found
