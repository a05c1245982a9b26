"""The JSON form of a script's state in checkpoints, such as that of an optimizer, of ``t.keep`` or of a stream.

JSON has no tuples, and only strings as keys. A tuple is therefore ``{"tuple": [part, …]}``, and a dictionary is
``{"dict": [[key, part], …]}``. The users of this module add forms of other values, such as tensors, in the same way:
an object with one key, which names the kind. Reading executes no code, in contrast to pickle.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Path = tuple[Any, ...]
"""The keys that lead to a value."""
Leaf = Callable[[Any, Path], dict[str, Any] | None]
"""Returns the form of a value that is none of JSON, with one key for its kind; None for all other values."""
Unfit = Callable[[Path, str], Exception]
"""Returns the error for a value that a checkpoint cannot contain, given its path and what was found."""
PLAIN = (str, int, float, bool, type(None))
"""Types that JSON has, also as keys of a dictionary."""
_TUPLE, _DICT = "tuple", "dict"


def encode(value: Any, path: Path, leaf: Leaf, unfit: Unfit, keys: tuple[type, ...] = PLAIN) -> Any:
    """Return ``value`` as an object of JSON types.

    ``path``: the keys that lead to it, for ``leaf`` and ``unfit``. ``keys``: types that keys of dictionaries may have.
    Raise the error of ``unfit`` for a type that is not supported.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PLAIN):
        return value
    if (found := leaf(value, path)) is not None:
        return found
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, keys)]:
            raise unfit(path, f"a key of {type(wrong[0]).__name__}")
        return {_DICT: [[key, encode(part, (*path, key), leaf, unfit, keys)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        parts = [encode(part, (*path, index), leaf, unfit, keys) for index, part in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    raise unfit(path, type(value).__name__)


def decode(value: Any, leaves: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return the original value for ``value``, a result of ``encode``.

    ``leaves``: kind → function that returns the original of a value that ``leaf`` has encoded.
    """
    if isinstance(value, list):
        return [decode(part, leaves) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in leaves:
        return leaves[kind](content)
    if kind == _TUPLE:
        return tuple(decode(part, leaves) for part in content)
    return {key: decode(part, leaves) for key, part in content}
