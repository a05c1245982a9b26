"""The resources that a pod requests, counted as the scheduler of Kubernetes counts them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from dljob.cluster import quantity
from dljob.cluster.catalogue import GPU_RESOURCES

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Requests:
    """Amounts of resources in whole units, so that sums do not depend on their order.

    ``cpu_m``: thousandths of a core. ``devices``: GPUs of any vendor.
    """

    cpu_m: int = 0
    memory_nbytes: int = 0
    devices: int = 0

    def __add__(self, other: "Requests") -> "Requests":
        return Requests(
            self.cpu_m + other.cpu_m, self.memory_nbytes + other.memory_nbytes, self.devices + other.devices
        )

    def __sub__(self, other: "Requests") -> "Requests":
        return Requests(
            self.cpu_m - other.cpu_m, self.memory_nbytes - other.memory_nbytes, self.devices - other.devices
        )


NOTHING = Requests()
MAX_AMOUNT = Decimal(2**63)

_Amounts = dict[str, Decimal]
_ZERO = Decimal(0)
_GPUS = tuple(GPU_RESOURCES.values())
_COUNTED = ("cpu", "memory", *_GPUS)
_OF_POD = ("cpu", "memory")
"""Resources for which the request of the whole pod (``spec.resources``) replaces the sum over its containers."""


@lru_cache(maxsize=4096)
def amount(text: str) -> Decimal:
    """Parse a Kubernetes quantity, including forms such as ``1e3`` and ``100n``. Return 0 for invalid text.

    The result is at most the API server's largest amount, because arithmetic with larger ones fails or takes long.
    """
    try:
        found = quantity(text)
    except ValueError:
        scale = {"n": Decimal("1e-9"), "u": Decimal("1e-6")}.get(text[-1:])
        try:
            found = Decimal(text[:-1]) * scale if scale else Decimal(text)
        except InvalidOperation:
            return _ZERO
    return max(-MAX_AMOUNT, min(found, MAX_AMOUNT)) if found.is_finite() else _ZERO


def in_units(amounts: Mapping[str, Decimal]) -> Requests:
    """Convert amounts by resource name (in cores, bytes and GPUs) to ``Requests``, rounded up like in Kubernetes."""
    return Requests(
        _up(1000 * amounts.get("cpu", _ZERO)),
        _up(amounts.get("memory", _ZERO)),
        _up(sum((amounts.get(resource, _ZERO) for resource in _GPUS), _ZERO)),
    )


def resources(mapping: Json | None) -> _Amounts:
    """Parse the CPU (in cores), memory (in bytes) and GPUs of a mapping from resource names to Kubernetes quantities.

    Ignore other resources. Resources that the mapping does not name are not in the result.
    """
    return {name: amount(str(mapping[name])) for name in _COUNTED if name in mapping} if mapping else {}


def pod_requests(spec: Json, status: Json | None = None) -> Requests:
    """Return what a pod requests of its node.

    ``spec``, ``status``: of the pod. For each resource, the result is the larger of two values. One is the sum over its
    containers and sidecars (init containers with ``restartPolicy: Always``). The other is the maximum over its init
    containers, each together with the sidecars before it. If the pod states a CPU or memory request for all its
    containers together, this request replaces the larger value. In any case, the pod's overhead is then added. While a
    container is resized, the larger of its old and new requests counts, but not the new one if the resize is
    infeasible. (Kubernetes: ``k8s.io/component-helpers/resource``, ``PodRequests``.)
    """
    status = status or {}
    infeasible = any(
        item.get("type") == "PodResizePending" and item.get("reason") == "Infeasible"
        for item in status.get("conditions") or ()
    )
    states = {
        item.get("name"): item
        for key in ("containerStatuses", "initContainerStatuses")
        for item in status.get(key) or ()
        if "allocatedResources" in item
    }

    def requested(container: Json) -> _Amounts:
        wanted = resources((container.get("resources") or {}).get("requests"))
        state = states.get(container.get("name"))
        if state is None:
            return wanted
        given = _largest(
            (resources(state["allocatedResources"]), resources((state.get("resources") or {}).get("requests")))
        )
        return given if infeasible else _largest((wanted, given))

    sidecars: _Amounts = {}
    first: _Amounts = {}
    for container in spec.get("initContainers") or ():
        own = requested(container)
        if container.get("restartPolicy") == "Always":
            sidecars = _sum((sidecars, own))
            own = sidecars
        else:
            own = _sum((sidecars, own))
        first = _largest((first, own))
    running = _sum((sidecars, *(requested(item) for item in spec.get("containers") or ())))
    whole = resources((spec.get("resources") or {}).get("requests"))
    total = _largest((first, running)) | {name: whole[name] for name in _OF_POD if name in whole}
    return in_units(_sum((total, resources(spec.get("overhead")))))


def _up(value: Decimal) -> int:
    return max(0, int(value.to_integral_value(ROUND_CEILING)))


def _sum(parts: Iterable[_Amounts]) -> _Amounts:
    found: _Amounts = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found.get(name, _ZERO) + value
    return found


def _largest(parts: Iterable[_Amounts]) -> _Amounts:
    found: _Amounts = {}
    for part in parts:
        for name, value in part.items():
            found[name] = max(found.get(name, _ZERO), value)
    return found
