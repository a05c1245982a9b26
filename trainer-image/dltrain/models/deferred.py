"""Create a model without memory for its parameters, and compute the initial values of one parameter at a time.

The model is created on torch's meta device. The operations that would compute its tensors are recorded, those that draw
random numbers with the state of the generator before them. So the values of a parameter can be computed later, in any
order, and they are bit-identical to those of a model that is created in main memory.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from math import prod
from mmap import mmap
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dltrain.protocol.errors import MisuseError

Model = TypeVar("Model", bound=nn.Module)

_INITIAL = "_dltrain_initial_values"
"""Attribute of a deferred model with its ``InitialValues``."""
_META, _CPU = torch.device("meta"), torch.device("cpu")
_SKIPS_META = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
"""Functions of ``torch.nn.init`` that do nothing on the meta device, because they read the values of tensors."""
_CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
"""Functions that make tensors from numbers. On the meta device, they lose the values."""
_COMPILED = "_orig_mod."
"""Part of names that ``torch.compile`` adds."""


@dataclass(frozen=True)
class _View:
    """A tensor of the meta device as a part of its storage. ``storage``: the number of the storage."""

    storage: int
    nbytes: int
    """Size of the storage."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: dict[int, Tensor]) -> Tensor:
        """Return this tensor in main memory. ``memory``: the bytes of storages by number; missing ones are added."""
        if self.storage not in memory:
            memory[self.storage] = temporary((self.nbytes,), torch.uint8)
        return memory[self.storage].view(self.dtype).as_strided(self.size, self.stride, self.offset)

    @property
    def covers_storage(self) -> bool:
        """Return True if the tensor is contiguous and has all of its storage."""
        contiguous = torch.empty(self.size, device=_META).stride() == self.stride
        return contiguous and not self.offset and self.size.numel() * self.dtype.itemsize == self.nbytes


@dataclass(frozen=True)
class _Operation:
    """An operation on tensors of the meta device.

    ``args``, ``named``: its arguments, with views in place of meta tensors. ``results``: the new tensors that it
    returns, by their place in the result. ``reads``, ``writes``: numbers of storages. ``generator``: the random
    generator that it uses and the state of it before the operation, or None if it draws no random numbers.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[_View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    generator: tuple[torch.Generator, Tensor] | None

    def apply(self, memory: dict[int, Tensor]) -> None:
        """Run the operation in main memory. ``memory``: the bytes of storages by number."""
        if self.generator is not None:
            self.generator[0].set_state(self.generator[1])
        args, named = tree_map(
            lambda each: each.of(memory) if isinstance(each, _View) else each, (self.args, self.named)
        )
        found = self.run(*args, **named)
        for place, result in zip(self.results, tree_leaves(found), strict=False):
            if place is not None:
                place.of(memory).copy_(result)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operations that compute tensors of the meta device.

    Random operations also run on temporary tensors, so that the random generator advances as usual.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """By address: the storage and its number. The storage stays alive, so that its address is not used again."""
        self.operations: list[_Operation] = []
        self.writers: dict[int, list[int]] = {}
        """The number of each storage → the indices of the operations that write to it."""

    def view(self, tensor: Tensor) -> _View:
        storage = tensor.untyped_storage()
        _, number = self._storages.setdefault(storage._cdata, (storage, len(self._storages)))
        place = int(tensor.storage_offset())
        return _View(number, storage.nbytes(), tensor.dtype, tensor.shape, tensor.stride(), place)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, schema = kwargs or {}, func._schema
        draws = torch.Tag.nondeterministic_seeded in func.tags
        generator = named.get("generator") or torch.default_generator
        state = generator.get_state() if draws else None
        # Operations on the meta device reject generators of other devices.
        found = func(*args, **{name: None if name == "generator" else each for name, each in named.items()})
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | named
        written = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        changed = [given[name] for name in written if name in given]
        self.record(func, args, named, found, changed, (generator, state) if state is not None else None)
        return found

    def record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
        found: Any,
        changed: Any,
        generator: tuple[torch.Generator, Tensor] | None,
    ) -> None:
        """Record that ``func`` has returned ``found`` for these arguments and has changed the tensors ``changed``.

        ``generator``: the random generator that it uses, and the state before. Do nothing if no tensor of the meta
        device got values.
        """
        given = [self.view(each) for each in tree_leaves((args, named)) if _is_meta(each)]
        reads = {view.storage for view in given}
        results = tuple(self.view(each) if _is_meta(each) else None for each in tree_leaves(found))
        results = tuple(view if view is not None and view.storage not in reads else None for view in results)
        writes = {self.view(each).storage for each in tree_leaves(changed) if _is_meta(each)}
        writes |= {view.storage for view in results if view is not None}
        if generator is not None and writes:
            generator[0].set_state(generator[1])
            self._draw(func, args, named)
        if not writes or "empty" in getattr(func, "__name__", ""):
            return
        for storage in writes:
            self.writers.setdefault(storage, []).append(len(self.operations))
        args, named = tree_map(self._described, (args, named))
        operation = _Operation(func, args, named, results, frozenset(reads), frozenset(writes), generator)
        self.operations.append(operation)

    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Draw the random numbers of an operation, which are not needed, in main memory."""
        memory: dict[int, Tensor] = {}
        given = tree_map(self._described, (args, named))
        args, named = tree_map(lambda each: each.of(memory) if isinstance(each, _View) else each, given)
        func(*args, **named)

    def _described(self, argument: Any) -> Any:
        if _is_meta(argument):
            return self.view(argument)
        return _CPU if argument == _META and isinstance(argument, torch.device) else argument

    def needed(self, storage: int) -> list[_Operation]:
        """Return the operations that compute the content of a storage, in their order."""
        chosen: set[int] = set()
        todo = [(storage, len(self.operations))]
        while todo:
            number, before = todo.pop()
            for index in self.writers.get(number, []):
                if index < before and index not in chosen:
                    chosen.add(index)
                    todo += [(read, index) for read in self.operations[index].reads]
        return [self.operations[index] for index in sorted(chosen)]


def _is_meta(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_meta


class _Constants(TorchFunctionMode):
    """Make tensors from numbers in main memory, and then copy them to the meta device, so that the copy is recorded.

    These are also the lists of indices in ``x[[0, 2]]``.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = tuple(map(self._numbers, args[1])) if isinstance(args[1], tuple) else self._numbers(args[1])
            return func(args[0], index, *args[2:])
        data = args[1:] if func is Tensor.new_tensor else args
        if func not in _CONSTANTS or named.get("device") is not None or any(map(_is_meta, (*data, *named.values()))):
            return func(*args, **named)
        made = func(*args, **named | {"device": _CPU})
        return made.detach().to(_META).requires_grad_(made.requires_grad)

    def _numbers(self, index: Any) -> Any:
        if not isinstance(index, list) or not index or any(isinstance(each, Tensor | slice | None) for each in index):
            return index
        return torch.tensor(index, device=_CPU).to(_META)


def tensor_attributes(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Return (name, module, name in the module, tensor) of the tensors without memory that modules have as attributes.

    They are neither parameters nor buffers, such as a table of positions. Names lack what torch.compile adds.
    """
    return [
        ((f"{prefix}." if prefix else "").replace(_COMPILED, "") + key, module, key, each)
        for prefix, module in model.named_modules()
        for key, each in vars(module).items()
        if _is_meta(each) and not isinstance(each, nn.Parameter)
    ]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by all their names, without those parts that torch.compile adds."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name.replace(_COMPILED, ""): each for name, each in named}


class InitialValues:
    """The initial values of the tensors of a deferred model, which are computed when they are needed."""

    def __init__(self, model: nn.Module, recorder: _Recorder) -> None:
        """Raise MisuseError if a parameter or a buffer of ``model`` has no initial values."""
        self._recorder = recorder
        tensors = {name: each for name, each in _tensors(model).items() if each.is_meta}
        self._views = {name: recorder.view(each) for name, each in tensors.items()}
        self._known = {each: (name, each._version) for name, each in tensors.items()}
        """Each tensor → its name, and the version of its values, which torch increases with each change in place."""
        for name, view in self._views.items():
            if view.storage not in recorder.writers and view.size.numel():
                raise MisuseError(
                    f"model: found no initial values of {name}; expected values from operations of torch, such as "
                    "torch.zeros, torch.randn or a function of torch.nn.init. Fill it in the function of t.create"
                )
        for name, module, key, each in tensor_attributes(model):
            vars(module)[key] = each.detach()  # Its graph would keep parameters that others replace.
            self._views.setdefault(name, recorder.view(each))

    def changed(self, model: nn.Module) -> list[str]:
        """Return the names of tensors of ``model`` that were changed after ``deferred``.

        These are also tensors without memory that are new, and those that now have memory, such as after ``to_empty``.
        """
        changed = [name for name, each in _tensors(model).items() if self._is_changed(name, each)]
        return changed + [name for name, *_ in tensor_attributes(model) if name not in self._views]

    def _is_changed(self, name: str, tensor: Tensor) -> bool:
        if tensor in self._known:
            return self._known[tensor][1] != tensor._version
        return (name in self._views) != tensor.is_meta

    def fill(self, name: str, whole: Tensor, of: Tensor | None = None) -> None:
        """Write the initial values of the tensor ``name``, which has no memory, to ``whole``.

        ``whole``: a contiguous tensor in main memory. It may have another dtype than the model was created in. ``of``:
        the tensor itself, which may have got another name, such as by tying weights. The random generator is as before
        afterwards.
        """
        created, _ = self._known.get(of, (name, 0)) if of is not None else (name, 0)
        view = self._views[created.replace(_COMPILED, "")]
        before, memory = torch.default_generator.get_state(), dict[int, Tensor]()
        in_place = whole.dtype == view.dtype and view.covers_storage
        if in_place:
            memory[view.storage] = whole.reshape(-1).view(torch.uint8)
        with torch.no_grad():
            for operation in self._recorder.needed(view.storage):
                operation.apply(memory)
            if not in_place:
                whole.copy_(view.of(memory))
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


@contextmanager
def _recorded_functions(recorder: _Recorder) -> Iterator[None]:
    """Record the functions of ``torch.nn.init`` that do nothing on the meta device as operations of their own.

    They are replaced in all modules, because scripts also import them by their names.
    """

    def recorded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def in_memory(*args: Any, **named: Any) -> Tensor:
            with torch.device(_CPU), torch.no_grad():
                return function(*args, **named)

        @wraps(function)
        def wrapper(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
            found = function(tensor, *args, **named)
            if tensor.is_meta:
                generator = named.get("generator") or torch.default_generator
                drawn = (generator, generator.get_state())
                recorder.record(in_memory, (tensor, *args), named, found, [tensor], drawn)
            return found

        return wrapper

    by_id = {id(function): recorded(function) for function in (getattr(nn.init, name) for name in _SKIPS_META)}
    places = [
        (found, key, value)
        for found in [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        for key, value in list(found.items())
        if id(value) in by_id
    ]
    for found, key, value in places:
        found[key] = by_id[id(value)]
    try:
        yield
    finally:
        for found, key, value in places:
            found[key] = value


def deferred(make: Callable[[], Model], *, allows_buffers: bool = False) -> Model:
    """Return the model that ``make`` creates, with parameters that have no memory (torch's meta device).

    The random generator advances as if the model were created in main memory. ``make`` must compute its tensors by
    operations of torch that do not read values. ``allows_buffers``: True if ranks can divide a model with buffers that
    are part of its ``state_dict()``. Raise MisuseError for such a model otherwise, if ``make`` reads values, or if a
    tensor has no initial values.
    """
    recorder = _Recorder()
    try:
        with torch.device(_META), recorder, _recorded_functions(recorder), _Constants():
            model = make()
    except (RuntimeError, TypeError) as error:  # TypeError: of Tensor.numpy
        if not re.search(r"\bmeta\b", str(error)):
            raise
        raise MisuseError(
            f"model: found {type(error).__name__}: {str(error).splitlines()[0]}; expected a function that creates the "
            "model without reading values of tensors or moving them to a device, because t.create makes it on the meta "
            "device, without memory"
        ) from error
    state = model.state_dict()
    if not allows_buffers and (buffers := [name for name, _ in model.named_buffers() if name in state]):
        raise MisuseError(
            f"model: found buffers {', '.join(buffers)}; expected only parameters, because ranks that split a model "
            "divide only these. Register buffers with persistent=False if checkpoints need not have them, and use "
            "GroupNorm or LayerNorm instead of BatchNorm"
        )
    setattr(model, _INITIAL, InitialValues(model, recorder))
    return model


def initial_values(model: nn.Module) -> InitialValues | None:
    """Return the initial values of a deferred model, or None if its parameters are in memory."""
    found: InitialValues | None = getattr(model, _INITIAL, None)
    return found


def forget_initial_values(model: nn.Module) -> None:
    """Free the initial values of a deferred model after they have been used. They may refer to loaded weights."""
    owner = getattr(model, _COMPILED.removesuffix("."), model)
    vars(owner).pop(_INITIAL, None)
