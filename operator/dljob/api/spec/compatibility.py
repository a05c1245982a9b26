"""Compatibility of strategies, collectives, frameworks and kinds of synchronization.

``COMPATIBLE`` is the only table. ``compatible`` and ``chosen`` derive both the CEL text and the predicate of a rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dlcontract import COLLECTIVES

AxisName = Literal["strategy", "collective", "framework", "synchronization"]


@dataclass(frozen=True)
class Axis:
    """One of the four fields that must be compatible with each other: its path in the spec, and its default value."""

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
    "Pipeline": {"collective": ("Auto",)},
    "Tensor": {"collective": ("Auto", *(name for name in COLLECTIVES if name != "ParameterServer"))},
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
    "batchSizeRange": {"strategy": ("Data",), "synchronization": ("Synchronous",), "framework": ("DLTrain",)},
}


@dataclass(frozen=True)
class Condition:
    """A condition in two forms: CEL, where ``self`` is the object, and a Python predicate of the pydantic object."""

    cel: str
    holds: Callable[[Any], bool]

    def __and__(self, other: "Condition") -> "Condition":
        return Condition(f"({self.cel}) && ({other.cel})", lambda s: self.holds(s) and other.holds(s))

    def implies(self, other: "Condition") -> "Condition":
        """Return the condition 'if this condition holds, ``other`` holds too'."""
        return Condition(f"!({self.cel}) || ({other.cel})", lambda s: not self.holds(s) or other.holds(s))


def chosen(axis: AxisName, *values: str, inside: str = "") -> Condition:
    """Return the condition that the field ``axis`` has one of ``values``. An unset field has its default.

    ``inside``: the section of the spec that the condition is about; empty: the whole spec.
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
    """Return the condition: if ``axis`` has one of ``values``, ``COMPATIBLE`` allows the value of ``other`` with it."""
    found = [
        chosen(axis, value, inside=inside).implies(chosen(other, *COMPATIBLE[value][other], inside=inside))
        for value in values
    ]
    return Condition(" && ".join(f"({one.cel})" for one in found), lambda given: all(one.holds(given) for one in found))


def compatible_with_field(name: str, attribute: str, *axes: AxisName) -> Condition:
    """Return the condition: if the field ``name`` is set, its entry in ``COMPATIBLE`` allows the values of ``axes``.

    ``attribute``: the field's name in Python. Default of ``axes``: all axes in the entry.
    """
    found = Condition(f"has(self.{name})", lambda s: getattr(s, attribute) is not None)
    allowed = [chosen(axis, *COMPATIBLE[name][axis]) for axis in axes or COMPATIBLE[name]]
    return found.implies(
        Condition(" && ".join(f"({one.cel})" for one in allowed), lambda s: all(one.holds(s) for one in allowed))
    )


assert set(AXES) == set(get_args(AxisName))
