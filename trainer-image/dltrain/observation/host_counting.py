"""Count what a whole step asks of the host: calls of functions, and operators of torch by kind.

Small scripts spend most of a step in the Python of their libraries and in the overhead of operators, also in loss,
backward pass, update, and while they load samples. None of this is in the forward passes of modules.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from .collectives import collective_kind, collective_nbytes, is_distributed_tensor
from .counting import harmless_mode, kind_of, tensors_in

MAX_CALLS = 10**7
"""Number of calls of functions after which a step is no longer counted, so that it does not slow down an evaluation."""
_RANDOM = (
    "bernoulli",
    "exponential",
    "multinomial",
    "native_dropout",
    "normal",
    "normal_functional",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random",
    "randperm",
    "uniform",
)
"""Operators that draw a random number for each element of their result, one after another in one thread."""
_active: list[Any] = []
"""The counts that have begun. A fork, such as a data loader, ends them in its own process."""
_is_registered = False


class FunctionCounts:
    """The number of calls of Python's own and of built-in functions in this thread, until ``end``.

    Python calls a profile function at each of them. A script that has set its own keeps it, and nothing is counted.
    """

    def __init__(self) -> None:
        self._count = 0
        self._different: set[int] = set()
        self._ended = False
        self._profile = self._see  # A new object would be made at each access of the method.
        if sys.getprofile() is None:
            _begin(self)
            sys.setprofile(self._profile)

    def _see(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self._different.add(id(frame.f_code))
        elif event != "c_call":
            return
        self._count += 1
        if self._ended or self._count > MAX_CALLS:
            sys.setprofile(None)

    def end(self) -> tuple[int, int] | None:
        """Return the number of calls, and that of different functions of Python; None if the count is incomplete."""
        is_own = sys.getprofile() is self._profile
        if is_own:
            sys.setprofile(None)
        self._ended = True  # In another thread, the profile function now ends itself.
        if self in _active:
            _active.remove(self)
        return (self._count, len(self._different)) if is_own else None


def operator_counts() -> Any:
    """Begin to count the operators that this thread and its backward passes run. Return an object with ``end``.

    The modes of torch form a stack, and a mode that ends removes the last one. A script may therefore only begin modes
    above the one of the counts. It is thus the first one, and nothing is counted if the script has one already, or in a
    backward pass, whose modes end with it.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    class OperatorCounts(harmless_mode()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.counts: dict[str, int] | None = {}
            """Number of operators by kind; None if they cannot be counted."""
            self.collectives: dict[str, list[int]] = {}
            """[Number of collectives, their bytes] by kind."""
            self._kinds: dict[Any, str] = {}
            self._thread = threading.get_ident()
            if in_backward_pass() or _get_current_dispatch_mode_stack():
                self.counts = None
            else:
                _begin(self)
                # Without the flags of ``__enter__``, which a script that is within its own mode would restore.
                _push_mode(self)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if types and is_distributed_tensor(types):
                if self.counts is not None:
                    self.counts["distributed"] = self.counts.get("distributed", 0) + 1
                return NotImplemented  # The class then runs the operators of its parts, and collectives, in this mode.
            result = func(*args, **(kwargs or {}))
            if self.counts is not None:
                kind = self._kinds.get(func)
                if kind is None:
                    kind = self._kinds[func] = _host_kind(func, result)
                self.counts[kind] = self.counts.get(kind, 0) + 1
                if kind == "random":
                    with contextlib.suppress(Exception):
                        self.counts["drawn"] = self.counts.get("drawn", 0) + sum(
                            t.numel() for t in tensors_in([result])
                        )
                if kind == "message":
                    with contextlib.suppress(Exception):
                        self._add_collective(func, args, kwargs or {}, result)
            return result

        def _add_collective(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            kind = collective_kind(func)
            if kind is not None:
                found = self.collectives.setdefault(kind, [0, 0])
                found[:] = [found[0] + 1, found[1] + collective_nbytes(kind, args, kwargs, result)]

        def end(self) -> bool:
            """Stop counting. Return False if the mode must stay: in a backward pass, or in another thread."""
            if in_backward_pass() or self._thread != threading.get_ident():
                self.counts = None
                return False
            above = []
            if any(each is self for each in _get_current_dispatch_mode_stack()):
                while (last := _pop_mode()) is not self:
                    above.append(last)
            for each in reversed(above):
                _push_mode(each)
            if self in _active:
                _active.remove(self)
            return True

    return OperatorCounts()


def _host_kind(func: Any, result: Any) -> str:
    """Return the kind of an operator that has returned ``result``.

    It is view (also others without a kernel), product, convolution, message, random or other.
    """
    try:
        if func.namespace.startswith(("c10d", "_c10d_functional")):
            return "view" if collective_kind(func) is None else "message"
        if func.namespace == "profiler":
            return "other"
        schema = func._schema
        results = result if isinstance(result, (list, tuple)) else [result]
        makes_none = not any(isinstance(each, _tensor_type()) for each in results)
        if not schema.is_mutable and (makes_none or any(each.alias_info is not None for each in schema.returns)):
            return "view"
        if func._overloadpacket.__name__.rstrip("_") in _RANDOM:
            return "random"
        kind = kind_of(func._overloadpacket)
        return kind if kind in ("product", "convolution") else "other"
    except Exception:  # noqa: BLE001 - an operator that cannot be counted must still run
        return "other"


def _tensor_type() -> Any:
    import torch

    return torch.Tensor


def in_backward_pass() -> bool:
    """Return True if autograd runs a backward pass in this thread. On CPUs, it does so in the thread of the script."""
    import torch

    task = getattr(torch._C, "_current_graph_task_id", None)  # Older releases of torch do not have it.
    return task is not None and task() != -1


def _begin(counts: Any) -> None:
    global _is_registered
    if not _is_registered:
        os.register_at_fork(after_in_child=_end_in_fork)
        _is_registered = True
    _active.append(counts)


def _end_in_fork() -> None:
    with contextlib.suppress(Exception):
        for each in list(_active):
            each.end()


def host_calls(
    functions: tuple[int, int] | None, operators: dict[str, int] | None, updates: int
) -> dict[str, int] | None:
    """Return the fields of ``dlcontract.HostCalls`` for a step; None if not all of them were counted."""
    if functions is None or operators is None:
        return None
    of: Iterable[str] = ("view", "other", "product", "convolution", "message", "distributed", "random", "drawn")
    views, others, products, convolutions, messages, distributed, random, drawn = (operators.get(k, 0) for k in of)
    return {
        "updates": updates,
        "functions": functions[0],
        "different": functions[1],
        "views": views,
        "operators": others + random,
        "products": products,
        "convolutions": convolutions,
        "messages": messages,
        "distributed": distributed,
        "random": drawn,
    }
