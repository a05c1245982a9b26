"""LimitRanges of a namespace: the defaults that they give to containers, and the pods that they forbid.

The rules are those of the admission plugin LimitRanger of Kubernetes (``plugin/pkg/admission/limitranger``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dljob.scheduling.limits.charges import Amounts, container_amounts, parsed_amounts, pod_amounts, thousandths

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LimitItem:
    """One entry of a LimitRange. Amounts are in thousandths of a unit.

    ``type``: Container, Pod or PersistentVolumeClaim. ``min``, ``max``: smallest and largest request and limit.
    ``default_request``: requests of containers that state none, as quantities. ``ratio``: largest allowed quotient of
    limit and request.
    """

    type: str
    min: Amounts = field(default_factory=dict)
    max: Amounts = field(default_factory=dict)
    default: Mapping[str, str] = field(default_factory=dict)
    """Limits of containers that state none, as quantities."""
    default_request: Mapping[str, str] = field(default_factory=dict)
    ratio: Amounts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LimitRange:
    name: str
    items: tuple[LimitItem, ...] = ()

    @classmethod
    def parse(cls, body: Json) -> "LimitRange":
        """Parse the manifest of a LimitRange, as the API server returns it: missing defaults are already filled in."""
        items = (body.get("spec") or {}).get("limits") or ()
        return cls(
            body["metadata"]["name"],
            tuple(
                LimitItem(
                    item.get("type") or "",
                    parsed_amounts(item.get("min")),
                    parsed_amounts(item.get("max")),
                    {str(key): str(value) for key, value in (item.get("default") or {}).items()},
                    {str(key): str(value) for key, value in (item.get("defaultRequest") or {}).items()},
                    parsed_amounts(item.get("maxLimitRequestRatio")),
                )
                for item in items
            ),
        )


@dataclass(frozen=True, slots=True)
class Violation:
    """A request or limit that a LimitRange forbids. ``range``: name of the LimitRange."""

    range: str
    where: str
    """Text such as 'container trainer', 'pod' or 'claim'."""
    resource: str
    text: str
    """The second part of the message: the value that was found, and the expected value."""

    def __str__(self) -> str:
        return f"LimitRange {self.range}: {self.resource} of each {self.where}: {self.text}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the LimitRanges allow for the trainer container of a pod, by resource and in thousandths of a unit.

    ``least`` and ``most``: smallest and largest request and limit. ``limit``: limit that a container without one gets,
    the smallest if several ranges have defaults, because the API server may apply any of these.
    ``ratio``: largest quotient of limit and request.
    """

    least: Amounts
    most: Amounts
    limit: Amounts
    ratio: Amounts


def bounds(ranges: Iterable[LimitRange]) -> Bounds:
    """Combine all LimitRanges of a namespace into the strictest values for the trainer container.

    Items of type Pod count as those of type Container: the trainer is the only container that runs to the pod's end.
    """
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    limit: dict[str, int] = {}
    ratio: dict[str, int] = {}
    for item in (item for each in ranges for item in each.items if item.type in ("Container", "Pod")):
        for name, value in item.min.items():
            least[name] = max(value, least.get(name, value))
        for found, values in ((most, item.max), (ratio, item.ratio)):
            for name, value in values.items():
                found[name] = min(value, found.get(name, value))
        for name, text in item.default.items() if item.type == "Container" else ():
            limit[name] = min(thousandths(text), limit.get(name, thousandths(text)))
    return Bounds(least, most, limit, ratio)


def with_defaults(spec: Json, ranges: Iterable[LimitRange]) -> dict[str, Any]:
    """Return a pod's spec with the default requests and limits that LimitRanger adds to its containers.

    If several ranges have a default limit of a resource, LimitRanger applies any of them. The smallest one counts here.
    """
    items = [item for each in ranges for item in each.items if item.type == "Container"]
    result = dict(spec)
    for key in ("initContainers", "containers"):
        if spec.get(key):
            result[key] = [_defaulted(container, items) for container in spec[key]]
    return result


def _defaulted(container: Json, items: Iterable[LimitItem]) -> dict[str, Any]:
    stated = container.get("resources") or {}
    limits = dict(stated.get("limits") or {})
    requests = {**limits, **(stated.get("requests") or {})}
    defaults: dict[str, str] = {}
    for item in items:
        smaller = {
            name: text
            for name, text in item.default.items()
            if thousandths(text) < thousandths(defaults.get(name, text))
        }
        defaults = {**item.default, **defaults, **smaller}
        requests = {**item.default_request, **requests}
    limits = {**defaults, **limits}
    return {**container, "resources": {**stated, "requests": requests, "limits": limits}}


def violation(spec: Json, ranges: Iterable[LimitRange]) -> Violation | None:
    """Return the first reason why the API server would reject a pod because of a LimitRange; None if it would not.

    ``spec``: the pod's spec, to which ``with_defaults`` has added the defaults of the ranges.
    """
    ranges = tuple(ranges)
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    for container in containers:
        requests, limits = container_amounts(container)
        where = f"container {container.get('name')}"
        for name, limit in limits.items():
            if requests.get(name, 0) > limit:
                given = next(
                    (
                        each.name
                        for each in ranges
                        for item in each.items
                        if name in item.default and thousandths(item.default[name]) == limit
                    ),
                    None,
                )
                text = f"found a request of {_text(requests[name])} above the default limit of {_text(limit)}"
                if given is not None:
                    return Violation(given, where, name, text)
        for each in ranges:
            for item in each.items:
                if item.type == "Container" and (found := _checked(each.name, where, item, requests, limits)):
                    return found
    requests, limits = pod_amounts(spec)
    for each in ranges:
        for item in each.items:
            if item.type == "Pod" and (found := _checked(each.name, "pod", item, requests, limits)):
                return found
    return None


def claim_violation(size: str, ranges: Iterable[LimitRange]) -> Violation | None:
    """Return the first reason why a LimitRange forbids a volume claim of this size (a quantity); None if none does."""
    stated = {"storage": thousandths(size)}
    for each in ranges:
        for item in each.items:
            if item.type == "PersistentVolumeClaim" and (found := _checked(each.name, "claim", item, stated, stated)):
                return found
    return None


def _checked(name: str, where: str, item: LimitItem, requests: Amounts, limits: Amounts) -> Violation | None:
    for resource, value in item.min.items():
        for kind, found in (("request", requests.get(resource)), ("limit", limits.get(resource, value))):
            if found is None or found < value:
                text = f"found {_found(kind, found)}; expected at least {_text(value)}"
                return Violation(name, where, resource, text)
    for resource, value in item.max.items():
        for kind, found in (("limit", limits.get(resource)), ("request", requests.get(resource, value))):
            if found is None or found > value:
                text = f"found {_found(kind, found)}; expected at most {_text(value)}"
                return Violation(name, where, resource, text)
    for resource, value in item.ratio.items():
        request, limit = requests.get(resource), limits.get(resource)
        if not request or not limit or 1000 * limit > value * request:
            text = (
                f"found {_found('limit', limit)} and {_found('request', request)}; expected a limit of at most "
                f"{value / 1000:g} times the request"
            )
            return Violation(name, where, resource, text)
    return None


def _found(kind: str, value: int | None) -> str:
    return f"no {kind}" if not value else f"a {kind} of {_text(value)}"


def _text(value: int) -> str:
    """Return an amount in thousandths of a unit as a Kubernetes quantity.

    An amount of a million units or more is given in Mi, because it must be bytes: no other resource has such amounts.
    """
    if value >= 10**9:
        return f"{value / 1000 / 2**20:.6g}Mi"
    return str(value // 1000) if value % 1000 == 0 else f"{value}m"
