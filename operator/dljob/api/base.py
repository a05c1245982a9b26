"""What every API type shares: naming, strictness and rules that span fields.

A rule stands once, in two tongues: CEL for API servers that evaluate it at admission (1.25 and later)
and a Python predicate that the operator evaluates for those that do not. A test holds them together.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

GROUP = "dljob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

_DURATION_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"
_BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$"
_DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
_AUTO_DURATION_PATTERN = r"^(Auto|([0-9]+(\.[0-9]+)?(ms|s|m|h))+)$"

Duration = Annotated[str, Field(pattern=_DURATION_PATTERN, max_length=32)]
"""A duration as Go writes it: ``90s``, ``1h30m``, ``500ms``."""

AUTO_INTERVAL = "Auto"
AutoDuration = Annotated[str, Field(pattern=_AUTO_DURATION_PATTERN, max_length=32)]
"""A duration, or that it is for dljob to choose."""

Quantity = Annotated[str, Field(pattern=_QUANTITY_PATTERN, max_length=32)]
"""A Kubernetes quantity: ``500m``, ``4Gi``."""

Bytes = Annotated[str, Field(pattern=_BYTES_PATTERN, max_length=32)]
"""A Kubernetes quantity of bytes: ``512Mi``, ``4Gi``. Thousandths (``512m``, Docker's megabytes) are none of these."""

PATTERNS = {
    _DURATION_PATTERN: "a duration such as 90s, 1h30m or 500ms",
    _AUTO_DURATION_PATTERN: "Auto, or a duration such as 90s, 1h30m or 500ms",
    _QUANTITY_PATTERN: "a quantity such as 2, 500m or 4Gi",
    _BYTES_PATTERN: "a quantity of bytes such as 512Mi or 4Gi",
}
"""What the patterns of the types above mean, in words."""

DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
DnsSubdomain = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]


def duration_s(text: str) -> float:
    """Seconds in a duration such as ``1h30m``.

    Raises ValueError when the text is no such duration.
    """
    if not re.fullmatch(_DURATION_PATTERN, text):
        raise ValueError(f"found {text!r}, expected a duration such as 90s, 1h30m or 500ms")
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", text)
    return sum(float(number) * _DURATION_UNIT_S[unit] for number, unit in parts)


@dataclass(frozen=True)
class Rule:
    """One condition over several fields of a type.

    ``cel`` sees the object as ``self``; ``holds`` gets the pydantic object. ``message`` names what is
    expected and what to do; ``field`` is the path, relative to the type, that an error should name.
    """

    field: str
    cel: str
    message: str
    holds: Callable[[Any], bool]

    @property
    def text(self) -> str:
        """What a user reads, from the API server and from the operator alike; it begins with the field."""
        return self.message if self.message.startswith(self.field) else f"{self.field}: {self.message}"


class ApiModel(BaseModel):
    """Base of every API type: camelCase outside, snake_case inside, frozen, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_enum_values=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        broken = [rule for rule in type(self).rules if not rule.holds(self)]
        if broken:
            raise ValueError("; ".join(rule.text for rule in broken))
        return self

    def manifest(self) -> dict[str, Any]:
        """The object as JSON-able camelCase, without fields that are unset (null)."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
