"""Base of all API types: field naming, strict validation, and rules that involve several fields.

Each rule has two forms: CEL, which API servers since 1.25 evaluate at admission, and a Python predicate, which the
operator evaluates for older servers. A test checks that both agree.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Self

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

GROUP = "dljob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

_DURATION_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"
_BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$"
_DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"
_AUTO_DURATION_PATTERN = r"^(Auto|([0-9]+(\.[0-9]+)?(ms|s|m|h))+)$"

_AUTO_BYTES_PATTERN = r"^(Auto|[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?)$"
_LABEL_KEY_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_CONDITION_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"
_LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_DNS_SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

GIT_URL_PATTERN = r"^https?://[^@/?#\s]+/[^?#\s]+$"
_SEGMENT = r"\.?[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*"
FOLDER_PATTERN = rf"^{_SEGMENT}(/{_SEGMENT})*$"

Duration = Annotated[str, Field(pattern=_DURATION_PATTERN, max_length=32)]
"""A duration as Go writes it: ``90s``, ``1h30m``, ``500ms``."""

MAX_S = 1e12
"""Largest valid value of any time in a profile, in seconds.

It exceeds the limit for times in reports (``dlcontract``), and is low enough that no sum of such times overflows.
"""

AUTO_INTERVAL = "Auto"
AutoDuration = Annotated[str, Field(pattern=_AUTO_DURATION_PATTERN, max_length=32)]
"""A duration, or ``Auto`` if dljob should choose it."""

INT_OR_STRING = "x-kubernetes-int-or-string"
"""Extension of the schema of a text that users may also write as an integer. Bounds are those of the integer."""


def _text_of_integer(value: object) -> object:
    """Return an integer as text, and any other value unchanged.

    core/v1 accepts ``cpu: 2`` for ``cpu: "2"``. It also accepts 0.5 without quotes, which no schema of a CRD can allow.
    """
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_FROM_INTEGER = BeforeValidator(_text_of_integer)

Quantity = Annotated[
    str,
    Field(pattern=_QUANTITY_PATTERN, max_length=32, json_schema_extra={INT_OR_STRING: True, "minimum": 0}),
    _FROM_INTEGER,
]
"""A Kubernetes quantity: ``500m``, ``4Gi``, ``2``. Like those of the other quantities, its value is a text."""

_MOMENT_PATTERN = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_MOMENT_EXAMPLE = "a date and time with a time zone, such as 2026-12-01T18:00:00Z (RFC 3339)"


def _moment(value: object) -> object:
    """Return ``value`` unchanged if it is a datetime or an RFC 3339 text. Raise ValueError for any other value.

    pydantic calls this before its own validation, which would also accept numbers and other forms of text.
    """
    if isinstance(value, datetime) or (isinstance(value, str) and _MOMENT_PATTERN.fullmatch(value)):
        return value
    raise ValueError(f"found {value!r:.100}; expected {_MOMENT_EXAMPLE}. Write it in this form")


SHA256_PATTERN = "^[0-9a-f]{64}$"

Moment = Annotated[AwareDatetime, BeforeValidator(_moment)]
"""A point in time as in RFC 3339: ``2026-12-01T18:00:00Z``."""

Bytes = Annotated[
    str,
    Field(pattern=_BYTES_PATTERN, max_length=32, json_schema_extra={INT_OR_STRING: True, "minimum": 0}),
    _FROM_INTEGER,
]
"""A Kubernetes quantity of bytes: ``512Mi``, ``4Gi``. ``512m`` is rejected: it means thousandths, not megabytes."""

AUTO_SIZE = "Auto"
AutoBytes = Annotated[
    str,
    Field(pattern=_AUTO_BYTES_PATTERN, max_length=32, json_schema_extra={INT_OR_STRING: True, "minimum": 1}),
    _FROM_INTEGER,
]
"""A quantity of bytes, or ``Auto`` if dljob should choose it. Rules of the fields exclude texts such as 0Gi."""

PATTERNS = {
    _DURATION_PATTERN: "a duration such as 90s, 1h30m or 500ms",
    _AUTO_DURATION_PATTERN: "Auto, or a duration such as 90s, 1h30m or 500ms",
    _QUANTITY_PATTERN: "a quantity such as 2, 500m or 4Gi",
    _BYTES_PATTERN: "a quantity of bytes such as 512Mi or 4Gi",
    _AUTO_BYTES_PATTERN: "Auto, or a quantity of bytes such as 512Mi or 20Gi",
    _LABEL_KEY_PATTERN: "the key of a label such as example.com/pool or pool",
    _CONDITION_PATTERN: "the type of a condition such as MemoryPressure or example.com/GpuUnhealthy",
    _LABEL_VALUE_PATTERN: "the value of a label: letters, digits, dashes, dots and underscores",
    SHA256_PATTERN: "64 hexadecimal digits in lower case, as sha256sum prints them",
    GIT_URL_PATTERN: "an https:// or http:// URL of a repository, without user and password",
    FOLDER_PATTERN: "a relative path below the top folder such as examples/digits",
    _DNS_LABEL_PATTERN: "a name of lower-case letters, digits and dashes",
    _DNS_SUBDOMAIN_PATTERN: "a name of lower-case letters, digits, dashes and dots",
}
"""Regular expression of a field → description of the texts that it accepts, for error messages."""

DnsLabel = Annotated[str, Field(pattern=_DNS_LABEL_PATTERN, max_length=63)]
DnsSubdomain = Annotated[str, Field(pattern=_DNS_SUBDOMAIN_PATTERN, max_length=253)]
LabelKey = Annotated[str, Field(pattern=_LABEL_KEY_PATTERN, max_length=317)]
ConditionType = Annotated[str, Field(pattern=_CONDITION_PATTERN, max_length=316)]
"""The type of a condition of a node or pod: ``Ready``, ``example.com/GpuHealthy``."""
LabelValue = Annotated[str, Field(pattern=_LABEL_VALUE_PATTERN, max_length=63)]


def duration_s(text: str) -> float:
    """Return the seconds in a duration such as ``1h30m``. Raise ValueError for any other text."""
    if not re.fullmatch(_DURATION_PATTERN, text):
        raise ValueError(f"found {text!r}; expected a duration such as 90s, 1h30m or 500ms")
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", text)
    return sum(float(number) * _DURATION_UNIT_S[unit] for number, unit in parts)


@dataclass(frozen=True)
class Rule:
    """A condition that an object of an API type must fulfil, often over several of its fields.

    ``cel``: the condition in CEL, which refers to the object as ``self``. ``holds``: the same condition as a function
    that takes the pydantic object and returns True if it is fulfilled. ``message`` says what is expected and what to
    do. ``field`` is the path, relative to the type, that the error names.
    """

    field: str
    cel: str
    message: str
    holds: Callable[[Any], bool]

    @property
    def text(self) -> str:
        """Return the error message for an object that breaks the rule. It begins with the name of the field.

        API server and operator use the same text.
        """
        return self.message if self.message.startswith(self.field) else f"{self.field}: {self.message}"


class ApiModel(BaseModel):
    """Base of every API type: frozen, camelCase in JSON, snake_case in Python, unknown fields rejected."""

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
        """Return the object as a camelCase dictionary for JSON, without null fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class FiniteModel(ApiModel):
    """Base of the parts of a profile: numbers must be finite, also if a file says ``.inf``."""

    model_config = ConfigDict(allow_inf_nan=False)
