"""Observe the forward passes of one step with hooks of all modules: the script's samples, parameters and costs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from .counting import counting_mode, tensors_in
from .host_counting import host_calls, in_backward_pass, operator_counts

COMPILED = "the script uses torch.compile"
_MUON, _COMPILED_FUNCTION = "deepspeed.runtime.zero.muon.original_muon", "_torchdynamo_orig_callable"
"""A module that DeepSpeed imports for every optimizer with ZeRO, although only that of Muon calls the functions for
which it calls torch.compile, and the attribute of such functions."""


class ObservedStep:
    """The forward passes between two updates of an optimizer.

    The modules that the script calls itself, and not through other modules, are the *outer* ones. While one of them
    runs, a mode of torch sees each operation. It is not active outside of them, so that it never overlaps with a mode
    that the script uses. The operators of the whole step are only counted (``host_counting``).

    ``limit_s``: seconds after which the next forward pass stops observing, so that a script that never updates the
    optimizer again is not slowed down for long.
    """

    def __init__(self, limit_s: float = float("inf")) -> None:
        from torch.nn.modules import module as hooks

        self.optimizers: dict[int, Any] = {}
        """The optimizers that were updated since the step began, by id."""
        self.is_hopeless = False
        """True if observing another step would fail for the same reason."""
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._depth = 0
        self._mode: Any = None
        self._ended = False
        self._failure: str | None = None
        self._flops = 0.0
        self._kept_nbytes = 0
        """The most bytes that forward passes kept at the same time. A backward pass frees those of its micro-batch."""
        self._modes: list[Any] = []
        """The modes of the forward passes so far some of whose results still exist."""
        self._work: dict[str, list[float]] = {}
        """[Number of operations, FLOPs of forward passes, bytes moved in both passes] by kind of operation."""
        self._samples: dict[int, int] = {}
        """Number of samples by id of the outer module that was called with them. The calls of a step are added up."""
        self._sample_nbytes: dict[int, int] = {}
        self._trained: set[int] = set()
        self._evaluated: set[int] = set()
        self._without_gradients: set[int] = set()
        """The outer modules that ran without gradients, by id. If the script checkpoints a whole module with
        ``use_reentrant=True``, only its recomputation has gradients."""
        self._sizes: dict[int, int] = {}
        """Number of elements of each trained parameter of the outer modules, by its id. The parameters themselves are
        not stored, because the script may delete them."""
        self._frozen: dict[int, int] = {}
        """Bytes of each other parameter of these modules, by its id."""
        try:
            after = hooks.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        except TypeError:  # Older releases of torch do not show keyword arguments.
            after = hooks.register_module_forward_hook(self._leave, always_call=True)
        self._handles = [after, hooks.register_module_forward_pre_hook(self._enter)]
        self._updates = 0
        self._operators: Any = None
        with contextlib.suppress(Exception):  # Older releases of torch do not have the functions for modes.
            self._operators = operator_counts()

    def updated(self, optimizer: Any) -> None:
        """Count an update by ``optimizer`` in this step."""
        self.optimizers[id(optimizer)] = optimizer
        self._updates += 1

    def end(self) -> bool:
        """Stop observing and remove the hooks. Return False if some must stay until a pass ends, to be called again.

        The mode must end with this forward pass, because the script may have begun modes in it.
        """
        self._ended = True
        counted = self._operators is None or self._operators.end()
        if self._mode is not None:
            self._failure = self._failure or "it updates the model within a forward pass"
            return False
        self._remove()
        return bool(counted)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def problem(self) -> str | None:
        """Return the reason why this step shows no structure; None if it does."""
        if self._failure is not None:
            return self._failure
        if self._trained & self._evaluated:
            return "it evaluates the model between updates"
        if not any(self._samples.values()):
            return "found no call of a torch.nn.Module with a batch of samples"
        return None if self._flops else "found no products of matrices and no convolutions"

    def structure(self, functions: tuple[int, int] | None = None) -> dict[str, Any]:
        """Return the fields of ``dlcontract.Structure`` that this step shows. It has no problem.

        ``functions``: numbers of calls of functions in a step, and of different ones; None: unknown.
        """
        busiest = max(self._samples, key=lambda key: self._samples[key])
        samples = self._samples[busiest]
        updated = {
            id(p): p
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
        }
        return {
            "parameters": max(
                1, sum(self._sizes.values()), sum(p.numel() for p in updated.values() if p.requires_grad)
            ),
            "frozen_nbytes": sum(nbytes for key, nbytes in self._frozen.items() if key not in self._sizes),
            "samples": samples,
            "sample_nbytes": self._sample_nbytes[busiest] // samples,
            "flops": self._flops,
            "activation_nbytes": self._kept_nbytes,
            "optimizer_slots": _slots(self.optimizers.values()),
            "host": host_calls(functions, self._operators and self._operators.counts, self._updates),
            "collectives": self._collectives(),
            "work": [
                {"kind": kind, "count": int(count), "forward_flops": flops, "moved_nbytes": int(nbytes)}
                for kind, (count, flops, nbytes) in self._work.items()
            ],
        }

    def _collectives(self) -> list[dict[str, Any]] | None:
        """Return the fields of ``dlcontract.CollectiveCount`` by kind; None if operators were not counted."""
        if self._operators is None or self._operators.counts is None:
            return None
        found = self._operators.collectives
        return [{"kind": kind, "count": count, "nbytes": nbytes} for kind, (count, nbytes) in found.items()]

    def _enter(self, module: Any, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._mode is None and (self._ended or os.getpid() != self._pid):
            self._remove()  # The hooks were left by ``end``, or this is a fork of the rank, such as a data loader.
            return
        self._depth += 1
        if self._depth == 1 and self._failure is None and not self._ended:
            if is_compiled():
                self._stop(COMPILED)
                return
            if time.monotonic() > self._end_s:
                self._stop(f"the optimizer was not updated again within {self._limit_s:.0f} s")
                return
            try:
                for p in module.parameters():
                    sizes, size = (self._sizes, 1) if p.requires_grad else (self._frozen, p.element_size())
                    sizes[id(p)] = _numel(p) * size
                mode = counting_mode([*module.parameters(), *module.buffers()])
                mode.__enter__()
                self._mode = mode
            except Exception as error:  # noqa: BLE001 - the script must continue
                self._failure = repr(error)

    def _stop(self, reason: str) -> None:
        self._failure, self.is_hopeless = reason, True
        self.end()
        self.optimizers.clear()

    def _leave(self, module: Any, args: Any, *rest: Any) -> None:
        """Count the call of an outer module, also if it raised an error. ``rest``: keyword arguments and result."""
        if threading.get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth or self._mode is None:
            return
        try:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)
            if self._failure is None and not self._ended:
                self._count(mode, module, args, rest[0] if len(rest) == 2 else {})
        except Exception as error:  # noqa: BLE001 - the script must continue
            self._failure = repr(error)

    def _count(self, mode: Any, module: Any, args: Any, kwargs: Any) -> None:
        """Add a call of the outer module ``module``, which has just ended. ``mode``: the mode that counted in it."""
        import torch

        trains = torch.is_grad_enabled()
        if in_backward_pass() and id(module) not in self._without_gradients:
            self._count_again(mode)
            return
        forward_FLOPs = 0.0
        for kind, (count, flops, read_nbytes, written_nbytes) in mode.work.items():
            forward_FLOPs += flops
            moved_nbytes = read_nbytes + written_nbytes
            if trains:  # The backward pass moves the gradients of both, and reads the input of most layers again.
                moved_nbytes = (2 if kind == "other" else 3) * read_nbytes + 2 * written_nbytes
            total = self._work.setdefault(kind, [0, 0.0, 0.0])
            total[:] = [total[0] + count, total[1] + flops, total[2] + moved_nbytes]
        if not trains:
            self._flops += forward_FLOPs
            self._without_gradients.add(id(module))
            if not module.training:
                self._evaluated.add(id(module))
            return
        self._modes = [each for each in [*self._modes, mode] if each.kept_nbytes()]
        self._kept_nbytes = max(self._kept_nbytes, sum(each.kept_nbytes() for each in self._modes))
        everything = sum(_numel(p) for p in module.parameters())
        trained = sum(_numel(p) for p in module.parameters() if p.requires_grad)
        # The backward pass makes the gradients of activations, and those of the parameters that are trained.
        self._flops += forward_FLOPs * (2 + (trained / everything if everything else 0))
        if not trained:
            return
        self._trained.add(id(module))
        batch = next(tensors_in([args, kwargs]), None)
        if batch is not None:
            key, nbytes = id(module), batch.numel() * batch.element_size()
            self._samples[key] = self._samples.get(key, 0) + batch.shape[0]
            self._sample_nbytes[key] = self._sample_nbytes.get(key, 0) + nbytes

    def _count_again(self, mode: Any) -> None:
        """Add a forward pass that activation checkpointing repeats within a backward pass.

        The first one has already counted its operations, its samples, and the gradients of both. What this one keeps is
        freed before the next part of the model is recomputed.
        """
        for kind, (_, flops, read_nbytes, written_nbytes) in mode.work.items():
            self._flops += flops
            self._work.setdefault(kind, [1, 0.0, 0.0])[2] += read_nbytes + written_nbytes


def _numel(parameter: Any) -> int:
    """Return the number of elements of a whole parameter.

    DeepSpeed's ZeRO-3 leaves a parameter empty while its layer does not run, and stores its size beside it. The number
    of elements of PyTorch's own sharded parameters (``DTensor``) is that of the whole parameter.
    """
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _slots(optimizers: Any) -> int:
    """Return how many values an optimizer stores for a parameter: 0, 1 as with momentum, or 2 as Adam does.

    Of several optimizers, the one that stores most counts, so that plans do not request too little memory.
    """
    most = 0
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            alike = [value for value in state.values() if getattr(value, "shape", None) == parameter.shape]
            most = max(most, min(2, len(alike)))
            break
    return most


def is_compiled() -> bool:
    """Return True if the script has called torch.compile.

    Modes and hooks would make torch compile again what it has compiled, and torch never compiles a function that is
    first called while a mode is active.
    """
    utils, frames = sys.modules.get("torch._dynamo.utils"), sys.modules.get("torch._dynamo.eval_frame")
    if utils is not None and utils.counters["stats"]["unique_graphs"]:
        return True
    backends = [each for each in dict(getattr(frames, "cached_backends", {})).values() if each is not None]
    # Each call of torch.compile adds a backend. Nothing is compiled until its result is called.
    functions = list(vars(sys.modules[_MUON]).values()) if _MUON in sys.modules else []
    return len(backends) > sum(hasattr(each, _COMPILED_FUNCTION) for each in functions)
