"""Convert the state of any torch model and optimizer to named tensors and JSON, and back."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlcontract.checkpoint import parts
from dlcontract.checkpoint.parts import Table
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.store import MODEL, OPTIMIZER, USER_OBJECTS, Snapshot, Stored
from dltrain.checkpoint.tensor_file import content
from dltrain.checkpoint.user_objects import decode, encode
from dltrain.comm.process_group import ProcessGroup
from dltrain.device.rank_device import finish
from dltrain.models.deferred import initial_values
from dltrain.optim.options import constant, numbers
from dltrain.protocol import state_json
from dltrain.protocol.errors import CheckpointVolumeError, MisuseError

_GROUP, _OTHERS = "parameter group", "others"
_NOTHING: dict[str, Any] = {"dict": []}
"""The result of ``encode`` for an empty dictionary."""


class Staging:
    """Reusable main memory for snapshots of the training state. Memory for copies from a GPU is pinned.

    New memory would cost a page fault per 4 KiB. Together, the page faults would take several times as long as the
    copy.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._sources: set[torch.device] = set()

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of ``tensor`` in main memory.

        Reuse the memory of the previous copy with this ``name`` if shape and dtype are equal.

        A copy from a GPU is asynchronous, because each wait would take as long as copying a small tensor. Call ``wait``
        before you use the copy.
        """
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._held[name] = held
        self._sources.add(tensor.device)
        return held.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies that ``copy`` has started are complete."""
        for device in self._sources:
            finish(device)


def capture(
    step: int,
    model: Mapping[str, Tensor],
    optimizer: dict[str, Any],
    state: dict[str, Any],
    staging: Staging | None = None,
    kept: Mapping[str, Tensor] | None = None,
    *,
    copied: bool = False,
) -> Snapshot:
    """Return a copy of the training state in main memory, which later steps do not modify.

    ``step``: number of completed steps. ``model``, ``optimizer``: the ``state_dict()`` of each. ``state``: additional
    data for JSON. ``kept``: tensors of the objects that the script has passed to ``t.keep``. ``staging``: memory for
    the copy; None: new memory. The next capture with the same ``staging`` overwrites the snapshot. ``copied``: True if
    the tensors of the model, and the optimizer's single tensors of parameters, are copies in main memory already.
    """
    staging = staging or Staging()
    tensors, rest = _divide(optimizer, _unfit)
    inner = _inner_tensors(rest)

    def copy(name: str, tensor: Tensor) -> Tensor:
        return tensor if copied and name not in inner else staging.copy(f"optimizer {name}", tensor)

    snapshot = Snapshot(
        step,
        {name: tensor if copied else staging.copy(f"model {name}", tensor) for name, tensor in model.items()},
        {name: copy(name, tensor) for name, tensor in tensors.items()},
        state | {"optimizer": rest},
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

    ``load_model``, ``load_optimizer``: functions that take a state dictionary, such as the methods ``load_state_dict``.
    If the structure differs, raise torch's error.
    """
    load_model(snapshot.model)
    kept = snapshot.state["optimizer"]
    entries: dict[Any, Any] = {}
    inner = _inner_tensors(kept)
    for name, tensor in snapshot.optimizer.items():
        if name not in inner:
            index, _, key = name.partition(".")
            entries.setdefault(int(index), {})[key] = tensor
    _add_others(entries, kept, snapshot.optimizer)
    load_optimizer({"state": entries, "param_groups": kept["groups"]})


def check_optimizer_state(optimizer: Optimizer, model: nn.Module, *, divided: bool) -> None:
    """Raise MisuseError if a checkpoint cannot contain the state of ``optimizer``. Call it after the first update.

    The error names the parameter of ``model``, the key and the type. ``divided``: True if ranks divide the tensors of
    the state, so that it can have none inside lists and dictionaries.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    ordered = [names.get(each, str(index)) for index, each in enumerate(ids)]

    def unfit(path: tuple[Any, ...], found: str) -> MisuseError:
        return _unfit(path, found, type(optimizer).__name__, ordered)

    _, rest = _divide(optimizer.state_dict(), unfit)
    if divided and _inner_tensors({"others": rest["others"]}):
        raise MisuseError(
            f"{type(optimizer).__name__}: found tensors in its state without a parameter; expected tensors only in the "
            "state of parameters, because ranks divide the model. Use parallelism.strategy Data, or another optimizer"
        )
    for number, entry in rest["encoded"].items() if divided else ():
        for key, value in entry.items():
            if _inner_tensors({"encoded": {number: {key: value}}}):
                raise MisuseError(
                    f"{type(optimizer).__name__}: found tensors inside a list or dictionary in its state of parameter "
                    f"{ordered[int(number)]}[{key!r}]; expected a key for each tensor, because ranks divide the model. "
                    "Use parallelism.strategy Data, or another optimizer"
                )


def _divide(optimizer: Mapping[str, Any], unfit: state_json.Unfit) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors in an optimizer's ``state_dict()`` by name, and the rest of it as JSON types.

    The rest has the single numbers and strings of each parameter in ``scalars``. Lists and dictionaries are in
    ``encoded`` and refer to the tensors in them by name. State without a parameter is in ``others``. ``unfit``: see
    ``encode``. Raise MisuseError for a value that a checkpoint cannot contain.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    nested: list[tuple[int, str, Any]] = []
    for index, entry in optimizer["state"].items():
        if isinstance(index, int) and not isinstance(entry, Mapping):
            raise unfit((index,), type(entry).__name__)
        for key, value in entry.items() if isinstance(index, int) else ():
            if not isinstance(key, str):
                raise unfit((index,), f"a key of {type(key).__name__}")
            if isinstance(value, Tensor):
                encode(value, (index, key), tensors, unfit)
            elif value is None or isinstance(value, str | int | float):
                scalars.setdefault(str(index), {})[key] = value
            else:
                nested.append((index, key, value))
    encoded: dict[str, dict[str, Any]] = {}
    for index, key, value in nested:  # after the single tensors, which have the names by which older versions read them
        encoded.setdefault(str(index), {})[key] = encode(value, (index, key), tensors, unfit)
    others = {index: entry for index, entry in optimizer["state"].items() if not isinstance(index, int)}
    groups = []
    for number, group in enumerate(optimizer["param_groups"]):
        groups.append({name: numbers(option) for name, option in group.items() if not constant(option)})
        for name in groups[-1].keys() - {"params"}:
            encode(groups[-1][name], (_GROUP, number, name), {}, unfit)
    rest = {"groups": groups, "scalars": scalars, "encoded": encoded}
    return tensors, rest | {"others": encode(others, (_OTHERS,), tensors, unfit)}


def _inner_tensors(rest: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors inside lists and dictionaries. ``rest``: the JSON part of ``_divide``."""
    names: set[str] = set()
    values = [value for entry in rest.get("encoded", {}).values() for value in entry.values()]
    decode([*values, rest.get("others", _NOTHING)], names.add)
    return names


def _add_others(entries: dict[Any, Any], rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Add all but the single tensors of parameters to ``entries``, the ``state`` of an optimizer's ``state_dict()``.

    ``rest``: the JSON part of ``_divide``; a checkpoint of an older version has neither ``encoded`` nor ``others``.
    ``tensors``: those inside lists and dictionaries.
    """
    for number, scalars in rest["scalars"].items():
        entries.setdefault(int(number), {}).update(scalars)
    for number, entry in rest.get("encoded", {}).items():
        found = {key: decode(value, tensors.__getitem__) for key, value in entry.items()}
        entries.setdefault(int(number), {}).update(found)
    entries.update(decode(rest.get("others", _NOTHING), tensors.__getitem__))


def _unfit(path: tuple[Any, ...], found: str, optimizer: str = "optimizer", names: Sequence[str] = ()) -> MisuseError:
    """Return the error for a value in the state of an optimizer. ``names``: those of its parameters, in order."""
    first, *keys = path
    expected = "tensors, numbers, strings, and lists, tuples and dictionaries of them"
    if first == _GROUP:
        where, expected = f"parameter group {keys.pop(0)}", "numbers, strings, and lists and dictionaries of them"
    elif first == _OTHERS:
        where = "state"
    else:
        where = f"state of parameter {names[first] if first < len(names) else first}"
    where += "".join(f"[{key!r}]" for key in keys)
    return MisuseError(
        f"{optimizer}: found {found} in its {where}; expected {expected}, which a checkpoint can contain. Store it as "
        "one of these in the optimizer, use another optimizer, or turn off checkpoints (spec.checkpoint.enabled)"
    )


def replicate(model: nn.Module, process_group: ProcessGroup) -> None:
    """Copy rank 0's parameters and buffers to every rank, one tensor at a time. All ranks must call it.

    Copy nothing of a deferred model, whose parameters have no values yet: the strategy that divides it sends them.
    Raise PeerLostError if a rank is lost, and RuntimeError if the model of this rank differs from that of rank 0 in
    names, shapes or dtypes.
    """
    state = model.state_dict()
    rows = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state.items()]
    theirs = process_group.broadcast("\n".join(rows).encode()).decode().splitlines()
    if differing := [
        f"{here or 'nothing'} (rank 0: {there or 'nothing'})"
        for here, there in zip_longest(rows, theirs)
        if here != there
    ]:
        raise RuntimeError(f"model: found {differing[0]}; expected the same tensors on all ranks. Check the script")
    if initial_values(model) is not None:
        return
    load = WeightLoader(model)
    for name, tensor in state.items():
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        process_group.broadcast_into(content(copy))
        load(name, copy)
    load.finish()


class WeightLoader:
    """Load the tensors of a model one at a time, in place.

    Call the loader with each (name, tensor) of ``state_dict()``, and then call ``finish``. Models that convert their
    state (with hooks, or their own ``load_state_dict``) get all tensors together at the end.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        tensors = [*model.parameters(), *model.buffers()]
        memory = {(tensor.device, tensor.data_ptr()) for tensor in tensors}
        self._state = model.state_dict()
        plain = not any(_converts(module) for module in model.modules())
        self._in_place = plain and all((t.device, t.data_ptr()) in memory for t in self._state.values())
        self._rest: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, name: str, tensor: Tensor) -> None:
        if self._in_place:
            self._state[name].copy_(tensor)
        else:
            self._rest[name] = tensor

    def finish(self) -> None:
        if self._rest:
            self._model.load_state_dict(self._state | self._rest)  # a checkpoint may lack frozen parameters
            self._rest = {}


def _converts(module: nn.Module) -> bool:
    """Return True if the module may convert its state when it is saved or loaded, by hooks or by methods of its own."""
    methods = (getattr(type(module), name) for name in ("load_state_dict", "_load_from_state_dict", "state_dict"))
    own = any(not str(method.__module__).startswith("torch.") for method in methods)
    return own or bool(
        module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks
    )


class Target(Protocol):
    """The model and the optimizer of this rank, into which a checkpoint is loaded, one tensor at a time.

    Each tensor is passed whole and in main memory. The rank may hold only a part of the tensor.
    """

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise BadInputError if a checkpoint does not fit the model's frozen parameters or the optimizer's groups.

        ``state``: the JSON of the checkpoint.
        """

    def load_weight(self, name: str, whole: Tensor) -> None:
        """Load this rank's part of the model's tensor ``name`` from ``whole``, the complete tensor."""

    def optimizer_part(self, index: int, key: str, whole: Tensor) -> Tensor | None:
        """Return this rank's part of the optimizer's state ``key`` of parameter ``index``; None if it has no part.

        The part does not share memory with ``whole``.
        """

    def load_optimizer(self, parts: dict[str, Any]) -> None:
        """Load an optimizer's ``state_dict()`` whose tensors are the parts that ``optimizer_part`` has returned."""


class PartTarget(Protocol):
    """The model and the optimizer of this rank if it has rows of their tensors, for a sharded checkpoint."""

    def group(self) -> Any:
        """Return a new process group of torch for checkpoints. All ranks must call it."""

    def weight_part(self, name: str) -> tuple[Tensor, int]:
        """Return (this rank's rows of the model's tensor ``name``, index of the first one). They are read in place."""

    def optimizer_space(
        self, index: int, key: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, int]:
        """Return new memory for this rank's part of the optimizer's state ``key`` of parameter ``index``.

        ``dtype``, ``shape``: those of the whole tensor. Return (the tensor for the optimizer's ``state_dict()``, the
        rows of this rank, which share its memory, index of the first one).
        """


ReadParts = Callable[[Path, Table], dict[int, dict[str, Any]]]
"""Read this rank's parts of a sharded checkpoint, given its folder and table, into the model. All ranks must call it.

It returns the optimizer's state by index of the parameter and name, as in a ``state_dict()``."""


def load_together(
    stored: Stored | None,
    process_group: ProcessGroup,
    holder: int,
    target: Target,
    check: Callable[[dict[str, Any]], None],
    read_parts: ReadParts | None = None,
) -> Snapshot | None:
    """Load the checkpoint of rank ``holder`` into ``target`` on all ranks, one tensor at a time.

    ``stored``: the opened checkpoint on the holder, None on other ranks. ``check``: a function that raises an error if
    the checkpoint's JSON does not fit this job. A rank needs memory for one tensor besides the training state.
    ``read_parts``: if the checkpoint is sharded, this function reads the rank's parts of it. None: the holder reads
    whole tensors and broadcasts them, in this case, too. Return the snapshot without the tensors of model and
    optimizer, or None if the holder has no checkpoint.

    Raise PeerLostError if a rank is lost. On the holder, raise CheckpointVolumeError if the checkpoint cannot be read.
    """
    header = b"null"
    if stored is not None:
        files = {
            name: [[entry, tensor_file.NAMES[dtype], shape] for entry, (dtype, shape) in file.entries.items()]
            for name, file in stored.files.items()
        }
        found = {"step": stored.step, "state": stored.state, "files": files, "folder": str(stored.folder)}
        table = parts.to_json(stored.table) if stored.table is not None and read_parts is not None else None
        header = json.dumps(found | {"parts": table}).encode()
    described = json.loads(process_group.broadcast(header, holder))
    if described is None:
        return None
    state, dtypes = described["state"], {name: dtype for dtype, name in tensor_file.NAMES.items()}

    def tensors(name: str) -> Iterator[tuple[str, Tensor]]:
        for entry, dtype, shape in described["files"].get(name, []):
            if stored is not None:
                try:
                    tensor = stored.files[name].read(entry)
                except OSError as error:
                    raise CheckpointVolumeError(stored.folder, error) from None
            else:
                tensor = torch.empty(shape, dtype=dtypes[dtype], device="cpu")
            process_group.broadcast_into(content(tensor), holder)
            yield entry, tensor

    check(state)
    target.check(state)
    saved = state["optimizer"]
    entries: dict[Any, Any] = {}
    inner, inner_names = dict[str, Tensor](), _inner_tensors(saved)
    if read_parts is not None and described["parts"] is not None:
        entries = read_parts(Path(described["folder"]), parts.parse(described["parts"]))
    else:
        for name, whole in tensors(MODEL):
            target.load_weight(name, whole)
        for name, whole in tensors(OPTIMIZER):
            if name in inner_names:
                inner[name] = whole.clone()
                continue
            index, _, key = name.partition(".")
            if (part := target.optimizer_part(int(index), key, whole)) is not None:
                entries.setdefault(int(index), {})[key] = part
    _add_others(entries, saved, inner)
    target.load_optimizer({"state": entries, "param_groups": saved["groups"]})
    return Snapshot(described["step"], {}, {}, state, dict(tensors(USER_OBJECTS)))
