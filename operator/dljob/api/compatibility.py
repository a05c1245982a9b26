"""Compatibility of strategies, collectives, frameworks and kinds of synchronization.

``COMPATIBLE`` is the only table. ``compatible`` and ``chosen`` derive both the CEL text and the predicate of a rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dlcontract import COLLECTIVES, SERVERS

AxisName = Literal["strategy", "collective", "framework", "synchronization"]


@dataclass(frozen=True)
class Axis:
    """One of the four fields of the spec whose values must be compatible with each other.

    ``path``: names of the sections and of the field in the spec. ``default``: value of the field if it is unset.
    """

    path: tuple[str, ...]
    default: str


AXES: Mapping[AxisName, Axis] = {
    "strategy": Axis(("parallelism", "strategy"), "Data"),
    "collective": Axis(("collective",), "Auto"),
    "framework": Axis(("trainer", "framework"), "DLTrain"),
    "synchronization": Axis(("parallelism", "synchronization"), "Synchronous"),
}

_SERVER = ("Auto", "ParameterServer")

COMPATIBLE: Mapping[str, Mapping[AxisName, tuple[str, ...]]] = {
    # Each entry lists the values that the other axes may have. An axis that is not listed may have any value.
    "Optimizer": {"collective": ("Auto", "Ring", "Torch")},
    "Sharded": {"collective": ("Auto", "Torch")},
    "Pipeline": {"collective": ("Auto",)},
    "Tensor": {"collective": ("Auto", *(name for name in COLLECTIVES if name not in (*SERVERS, "DDP")))},
    "Asynchronous": {"collective": _SERVER, "strategy": ("Data",)},
    "StaleSynchronous": {"collective": _SERVER, "strategy": ("Data",)},
    "Torchrun": {"collective": ("Auto", "Torch"), "strategy": ("Data",)},
    "MPI": {"collective": ("Auto", "MPI"), "strategy": ("Data",), "synchronization": ("Synchronous",)},
    # The following entries apply when the field is set, whatever its value.
    "gradientCompression": {
        "collective": ("Auto",),
        "strategy": ("Data",),
        "synchronization": ("Synchronous",),
        "framework": ("DLTrain",),
    },
    # Of the following entry, all but the framework applies to the values BF16 and FP16 only. A script for Torchrun may
    # also have a value other than Auto, which says what it does.
    "precision": {
        "framework": ("DLTrain",),
        "collective": tuple(name for name in ("Auto", *COLLECTIVES) if name != "LayeredServer"),
        "strategy": ("Data", "Optimizer", "Sharded", "Auto"),
        "synchronization": ("Synchronous",),
    },
    # Of the following entry, all but the framework applies to the value Always only. Pipeline and Tensor have no blocks
    # of their own, and asynchronous workers and a layered server have other training loops. A script for Torchrun may
    # also have a value other than Auto, which says what it does.
    "activationCheckpointing": {
        "framework": ("DLTrain",),
        "collective": tuple(name for name in ("Auto", *COLLECTIVES) if name != "LayeredServer"),
        "strategy": ("Data", "Optimizer", "Sharded", "Auto"),
        "synchronization": ("Synchronous",),
    },
    "batchSizeRange": {"strategy": ("Data",), "synchronization": ("Synchronous",), "framework": ("DLTrain",)},
}


@dataclass(frozen=True)
class Condition:
    """A condition on an object of the API in two equivalent forms, of which a ``Rule`` is made.

    ``cel``: CEL expression, where ``self`` is the object. ``holds``: function that takes the pydantic object, and
    returns True if the condition is fulfilled.
    """

    cel: str
    holds: Callable[[Any], bool]

    def __and__(self, other: "Condition") -> "Condition":
        return Condition(f"({self.cel}) && ({other.cel})", lambda s: self.holds(s) and other.holds(s))

    def implies(self, other: "Condition") -> "Condition":
        """Return the condition 'if this condition holds, ``other`` holds too'."""
        return Condition(f"!({self.cel}) || ({other.cel})", lambda s: not self.holds(s) or other.holds(s))


def chosen(axis: AxisName, *values: str, inside: str = "") -> Condition:
    """Return the condition that the field ``axis`` has one of ``values``. An unset field has its default.

    ``inside``: name of a section, such as parallelism, if the condition is for a rule of this section, so that ``self``
    is the section; empty if it is for a rule of the whole spec.
    """
    path, default = AXES[axis].path, AXES[axis].default
    path = path[1:] if inside == path[0] else path
    sections = [".".join(("self", *path[: n + 1])) for n in range(len(path))]
    listed = f"{sections[-1]} in {list(values)}"
    if default in values:
        cel = " || ".join([*(f"!has({section})" for section in sections), listed])
    else:
        cel = " && ".join([*(f"has({section})" for section in sections), listed])

    def holds(given: Any) -> bool:
        for name in path:
            given = getattr(given, name)
        return given in values

    return Condition(cel, holds)


def compatible(axis: AxisName, *values: str, other: AxisName, inside: str = "") -> Condition:
    """Return the condition that the values of the fields ``axis`` and ``other`` are compatible.

    If the field ``axis`` has one of ``values``, ``COMPATIBLE`` must allow the value of the field ``other`` with it.
    With other values of ``axis``, the condition holds. ``inside``: name of a section, such as parallelism, if the
    condition is for a rule of this section; empty if it is for a rule of the whole spec.
    """
    found = [
        chosen(axis, value, inside=inside).implies(chosen(other, *COMPATIBLE[value][other], inside=inside))
        for value in values
    ]
    return Condition(" && ".join(f"({one.cel})" for one in found), lambda given: all(one.holds(given) for one in found))


def compatible_with_field(name: str, attribute: str, *axes: AxisName) -> Condition:
    """Return the condition: if the field ``name`` is set, its entry in ``COMPATIBLE`` allows the values of ``axes``.

    ``name``: the field's name in JSON, such as gradientCompression. ``attribute``: its name in Python. ``axes``: the
    fields to check; without any, all axes in the entry. If the field ``name`` is unset, the condition holds.
    """
    found = Condition(f"has(self.{name})", lambda s: getattr(s, attribute) is not None)
    allowed = [chosen(axis, *COMPATIBLE[name][axis]) for axis in axes or COMPATIBLE[name]]
    return found.implies(
        Condition(" && ".join(f"({one.cel})" for one in allowed), lambda s: all(one.holds(s) for one in allowed))
    )


assert set(AXES) == set(get_args(AxisName))
