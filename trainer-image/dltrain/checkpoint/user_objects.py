"""Objects that a script keeps (``t.keep``) in addition to model and optimizer, such as averaged weights or a history.

An object must have ``state_dict`` and ``load_state_dict``, or be a list or dictionary. A checkpoint stores the tensors
in the state of these objects in a separate file and the rest as JSON that refers to the tensors, so that reading
executes no code. Before a step is repeated, ``restore`` undoes the changes to these objects since ``freeze``, and those
to lists and dictionaries since ``begin``.
"""

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dltrain.checkpoint import tensor_file
from dltrain.protocol import state_json
from dltrain.protocol.errors import MisuseError

_TENSOR = "tensor"
UNDO_NBYTES = 16 * 2**20
"""Maximum total size of the tensors in lists and dictionaries that are copied at the beginning of each elastic step.

Copying 16 MiB takes a few milliseconds. Larger tensors are copied only when a step is abandoned."""


def encode(value: Any, path: state_json.Path, tensors: dict[str, Tensor], unfit: state_json.Unfit | None = None) -> Any:
    """Return ``value`` as an object of JSON types that refers to tensors by name, and add these to ``tensors``.

    ``path``: the name of the kept object and the keys that lead to ``value``. The names of the tensors consist of
    these. ``unfit``: a function that makes the error; by default, it is one of ``t.keep``. Raise MisuseError for a type
    that is not supported.
    """
    refused = unfit or _unfit

    def leaf(value: Any, path: state_json.Path) -> dict[str, Any] | None:
        if not isinstance(value, Tensor):
            return None
        if value.dtype not in tensor_file.NAMES or value.layout is not torch.strided:
            raise refused(path, f"a tensor of dtype {value.dtype} and layout {value.layout}")
        name = ".".join(map(str, path))
        while name in tensors:  # Two paths can have the same name: {"a.b": …, "a": {"b": …}}.
            name += "'"
        tensors[name] = value.detach()
        return {_TENSOR: name}

    return state_json.encode(value, path, leaf, refused, (str, int))


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the original value for ``value``, a result of ``encode``.

    ``tensor``: a function that returns the tensor with a given name.
    """
    return state_json.decode(value, {_TENSOR: tensor})


class _Contents:
    """The contents of a list or dictionary at the beginning of a step, with those of all containers in it.

    ``undo`` restores them in place, so that other references of the script to inner containers and tensors stay valid.
    """

    def __init__(self, given: list[Any] | dict[Any, Any]) -> None:
        self._containers: list[tuple[Any, Any]] = []
        """Each list and dictionary, and a copy of it that refers to the same parts."""
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        """A copy of each tensor, once ``copy_tensors`` has made them."""
        self._add(given)

    @property
    def nbytes(self) -> int:
        """Return the total size of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensors.append(value)
        elif isinstance(value, list | dict):
            self._containers.append((value, list(value) if isinstance(value, list) else dict(value)))
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for part in parts:
            # A history may have very many numbers, or tuples of numbers. Python does not track the latter.
            if type(part) not in state_json.PLAIN and not (type(part) is tuple and not gc.is_tracked(part)):
                self._add(part)

    def copy_tensors(self) -> None:
        """Copy the tensors, unless they were copied before."""
        if not self._copies:
            self._copies = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def undo(self) -> None:
        """Restore all contents in place. Tensors get the values that they had when ``copy_tensors`` was called."""
        for container, contents in self._containers:
            if isinstance(container, list):
                container[:] = contents
            else:
                container.clear()
                container.update(contents)
        for tensor, values in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(values)


class UserObjects:
    """The objects that a script registers with ``t.keep``, by name. Checkpoints contain their state."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._resumed: int | None = None
        self._stored: dict[str, Any] = {}
        self._stored_tensors: dict[str, Tensor] = {}
        self._began: dict[str, _Contents] = {}
        self._frozen: tuple[dict[str, Any], dict[str, Tensor]] | None = None
        self._complete = False

    def load(self, step: int, stored: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Set the state from a checkpoint after ``step`` steps. Each later ``add`` restores its object from this state.

        ``stored``: name of each object → its state as JSON. ``tensors``: the tensors to which the JSON refers.
        """
        self._resumed, self._stored, self._stored_tensors = step, stored, tensors

    def add(self, name: str, given: Any) -> None:
        """Add an object and, if the run is resumed, restore the object's state.

        Raise MisuseError if the object cannot be stored, or if its state cannot be restored.
        """
        kind = type(given).__name__
        if isinstance(given, LRScheduler) and not isinstance(given, ReduceLROnPlateau):
            raise MisuseError(
                f"t.keep: {name}: found a learning-rate scheduler ({kind}); expected it in t.schedule, which also "
                "steps it. Call t.schedule instead"
            )
        both = all(callable(getattr(given, method, None)) for method in ("state_dict", "load_state_dict"))
        if isinstance(given, type) or not (isinstance(given, list | dict) or both):
            raise MisuseError(
                f"t.keep: {name}: found {kind}; expected an object with state_dict() and load_state_dict(), a list or "
                "a dict"
            )
        if name in self._objects:
            raise MisuseError(f"t.keep: {name}: found a second object with this name; expected a unique name")
        if self._complete:
            raise MisuseError(
                f"t.keep: {name}: found a call after t.steps has begun; expected a call before it. Move the call"
            )
        if self._resumed is not None and name not in self._stored:
            raise MisuseError(
                f"t.keep: {name}: found a checkpoint of step {self._resumed} that holds {self._names(self._stored)}; "
                f"expected {name} in it. Remove t.keep for {name}, or use another checkpoint volume"
            )
        encode(_state(given), (name,), {})  # Raise now if the state cannot be saved.
        self._objects[name] = given
        if self._resumed is not None:
            try:
                self._set(name, self._stored[name], self._stored_tensors)
            except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
                raise MisuseError(
                    f"t.keep: {name}: found a {kind} that cannot load its state from the checkpoint of step "
                    f"{self._resumed} ({type(error).__name__}: {error}); expected an object of the same kind and shape "
                    "as the saved one. Pass such an object to t.keep, or use another checkpoint volume"
                ) from error

    def close(self) -> None:
        """Accept no more objects from now on, because training begins.

        Raise MisuseError if the checkpoint from which the run resumed contains objects that were not added.
        """
        if rest := set(self._stored) - set(self._objects):
            raise MisuseError(
                f"t.steps: found a checkpoint of step {self._resumed} that holds {self._names(rest)}; expected only "
                "objects that the script passes to t.keep before t.steps. Pass these objects to t.keep again, or use "
                "another checkpoint volume"
            )
        self._complete, self._stored_tensors = True, {}

    def begin(self, *, undoable: bool) -> None:
        """Begin a step. ``undoable``: True if a loss of ranks could force the ranks to repeat the step.

        In that case, copy the present contents of the lists and dictionaries among the objects, including those inside
        them, and the tensors in them if these take at most ``UNDO_NBYTES`` together.
        """
        self._frozen = None
        plain = self._objects.items() if undoable else ()
        self._began = {name: _Contents(given) for name, given in plain if isinstance(given, list | dict)}
        if sum(contents.nbytes for contents in self._began.values()) <= UNDO_NBYTES:
            for contents in self._began.values():
                contents.copy_tensors()

    def freeze(self) -> None:
        """Save the objects' state, because the current step will be repeated. ``restore`` undoes later changes.

        Lists and dictionaries are saved as they were at the beginning of the step. Large tensors in them, and other
        objects, are saved as they are now, because copying them at each step would be too expensive.
        """
        state, tensors = {}, dict[str, Tensor]()
        for contents in self._began.values():
            contents.copy_tensors()
        for name, given in self._objects.items():
            if name not in self._began:
                state[name] = encode(_state(given), (name,), tensors)
        self._frozen = state, {name: tensor.clone() for name, tensor in tensors.items()}

    def restore(self) -> None:
        """Restore the state that ``freeze`` saved, before the step is repeated."""
        if self._frozen is not None:
            state, tensors = self._frozen
            for name, saved in state.items():
                self._set(name, saved, tensors)
            for contents in self._began.values():
                contents.undo()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return (state of all objects as JSON, tensors to which it refers). Tensors are not copied."""
        tensors: dict[str, Tensor] = {}
        return {name: encode(_state(given), (name,), tensors) for name, given in self._objects.items()}, tensors

    def _set(self, name: str, state: Any, tensors: Mapping[str, Tensor]) -> None:
        """Set the state of the object ``name`` to ``state``, a result of ``encode`` that refers to ``tensors``.

        Move the tensors to the devices of the object's current tensors.
        """
        given, own = self._objects[name], dict[str, Tensor]()
        encode(_state(given), (name,), own)
        value = decode(state, lambda key: tensors[key].to(own[key].device) if key in own else tensors[key])
        if isinstance(given, list | dict):
            _assign(given, value, set())
        else:
            given.load_state_dict(value)

    def _names(self, names: Any) -> str:
        return ", ".join(sorted(names)) or "no object of t.keep"


def _state(given: Any) -> Any:
    return given if isinstance(given, list | dict) else given.state_dict()


def _assign(own: Any, saved: Any, assigned: set[int]) -> Any:
    """Return ``saved``, with the lists and dictionaries that ``own`` has at the same places, which get the contents.

    References of the script to these containers thereby stay valid. ``assigned``: ids of the containers that have got
    contents already. One that is in several places gets those of the first. Tensors of ``own`` do not change, because
    they could be parameters of the model.
    """
    if isinstance(saved, tuple):
        parts = own if isinstance(own, tuple) else ()
        return tuple(_assign(*each, assigned) for each in zip(_padded(parts, len(saved)), saved, strict=True))
    fits = isinstance(saved, list | dict) and isinstance(own, list if isinstance(saved, list) else dict)
    if not fits or id(own) in assigned:
        return saved
    assigned.add(id(own))
    if isinstance(own, list):
        own[:] = [_assign(*each, assigned) for each in zip(_padded(own, len(saved)), saved, strict=True)]
    else:
        contents = {key: _assign(own.get(key), part, assigned) for key, part in saved.items()}
        own.clear()
        own.update(contents)
    return own


def _padded(parts: Any, length: int) -> list[Any]:
    """Return the first ``length`` of ``parts``, with None for those that are missing."""
    return [*parts[:length], *[None] * (length - len(parts))]


def _unfit(path: tuple[Any, ...], found: str) -> MisuseError:
    name, *rest = path
    where = "".join(f"[{part!r}]" for part in rest)
    return MisuseError(
        f"t.keep: {name}: found {found} in its state{where}; expected tensors, numbers, strings, and lists, tuples and "
        "dictionaries of them"
    )
