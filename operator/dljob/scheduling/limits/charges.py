"""What a pod or another object charges to the quotas of its namespace, counted as Kubernetes counts it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any

from dljob.scheduling.requests import amount

Json = Mapping[str, Any]
Amounts = Mapping[str, int]
"""Amounts of resources by name, in thousandths of a unit (a CPU, a byte, an object)."""

MAX_AMOUNTS = 128
"""Maximum number of resources that the charge of a pod has. Beyond it, extended resources are left out.

Everybody who may create pods can name 30,000 in one pod, and the operator stores the charges of all pods of jobs.
"""
_PLURALS = {"NetworkPolicy": "networkpolicies"}
_SHORT_NAMES = ("configmaps", "secrets", "services", "persistentvolumeclaims")
"""Resources of the core group that a quota may also count without the prefix ``count/``."""
_WITHOUT_PREFIX = ("cpu", "memory", "ephemeral-storage")
"""Resources whose requests a quota may also limit without the prefix ``requests.``."""
_LIMITED = _WITHOUT_PREFIX
"""Resources for which a quota may restrict the sum of the pods' limits, as ``limits.cpu`` and so on."""

_CREATED = {
    "StatefulSet": ("count/controllerrevisions.apps",),
    "Service": ("count/endpoints", "count/endpointslices.discovery.k8s.io"),
}
"""Kind → names in quotas of the objects that Kubernetes' controllers create for each object of this kind, one of each.

Pods are not among them, because ``pod_charge`` counts them. A Service has another EndpointSlice for each further 100
pods; those are not counted.
"""


@dataclass(frozen=True, slots=True)
class Charge:
    """What one object charges to quotas, and the properties by which the scopes of quotas select objects."""

    amounts: tuple[tuple[str, int], ...]
    """(resource of a quota, amount in thousandths), sorted."""
    is_pod: bool = False
    priority_class: str = ""
    terminating: bool = False
    """True for a pod with ``activeDeadlineSeconds``. The scopes of quotas call such a pod Terminating."""
    best_effort: bool = False
    cross_namespace: bool = False
    """True for a pod whose affinity selects pods of other namespaces."""


def thousandths(quantity: object) -> int:
    """Return a Kubernetes quantity in thousandths, rounded up; 0 for invalid text."""
    return _up(amount(str(quantity)))


def parsed_amounts(mapping: Json | None) -> dict[str, int]:
    return {str(name): thousandths(value) for name, value in (mapping or {}).items()}


def container_amounts(container: Json) -> tuple[dict[str, int], dict[str, int]]:
    """Return requests and limits of a container, in thousandths. A resource without a request requests its limit."""
    stated = container.get("resources") or {}
    limits = parsed_amounts(stated.get("limits"))
    return {**limits, **parsed_amounts(stated.get("requests"))}, limits


def pod_amounts(spec: Json) -> tuple[dict[str, int], dict[str, int]]:
    """Return requests and limits of a pod by resource, in thousandths of a unit.

    Of each resource, the amount is the larger of two values. One is the sum over containers and sidecars, the other is
    the maximum over init containers, each together with the sidecars before it. An amount that the pod states for all
    its containers together (``spec.resources``) replaces this value. The pod's overhead is added.
    """
    totals = []
    for which in (0, 1):
        sidecars: dict[str, int] = {}
        first: dict[str, int] = {}
        for container in spec.get("initContainers") or ():
            own = container_amounts(container)[which]
            if container.get("restartPolicy") == "Always":
                sidecars = _sum((sidecars, own))
                own = sidecars
            else:
                own = _sum((sidecars, own))
            first = _largest((first, own))
        running = _sum((sidecars, *(container_amounts(item)[which] for item in spec.get("containers") or ())))
        whole = container_amounts(spec)[which]
        totals.append(_largest((first, running)) | whole)
    requests, limits = totals
    overhead = parsed_amounts(spec.get("overhead"))
    requests = _sum((requests, overhead))
    limits = {name: value + overhead.get(name, 0) for name, value in limits.items()}
    return requests, limits


def pod_charge(spec: Json) -> Charge:
    """Return what a pod charges to quotas until it ends (Kubernetes: ``pkg/quota/v1/evaluator/core/pods.go``)."""
    requests, limits = pod_amounts(spec)
    found = {"pods": 1000, "count/pods": 1000}
    for name, value in requests.items():
        found[f"requests.{name}"] = value
        if name in _WITHOUT_PREFIX or name.startswith("hugepages-"):
            found[name] = value
    found |= {f"limits.{name}": value for name, value in limits.items() if name in _LIMITED}
    if len(found) > MAX_AMOUNTS:
        found = dict(sorted(found.items(), key=lambda item: ("/" in item[0], item[0]))[:MAX_AMOUNTS])
    compute = [name for name in ("cpu", "memory") if requests.get(name) or limits.get(name)]
    return Charge(
        tuple(sorted(found.items())),
        is_pod=True,
        priority_class=spec.get("priorityClassName") or "",
        terminating=(spec.get("activeDeadlineSeconds") or -1) >= 0,
        best_effort=not compute,
        cross_namespace=_selects_other_namespaces(spec.get("affinity")),
    )


def object_charge(manifests: Iterable[Json]) -> Charge:
    """Return what objects other than pods charge to quotas together.

    A StatefulSet and a Service also charge the objects that Kubernetes creates for them (``_CREATED``).
    """
    found: dict[str, int] = {}
    for manifest in manifests:
        kind, group = manifest["kind"], manifest["apiVersion"].rpartition("/")[0]
        plural = _PLURALS.get(kind, f"{kind.lower()}s")
        one = {f"count/{plural}{f'.{group}' if group else ''}": 1000}
        if not group and plural in _SHORT_NAMES:
            one[plural] = 1000
        one |= dict.fromkeys(_CREATED.get(kind, ()), 1000)
        if kind == "PersistentVolumeClaim":
            one |= _claim_amounts(manifest["spec"])
        found = _sum((found, one))
    return Charge(tuple(sorted(found.items())))


def _claim_amounts(spec: Json) -> dict[str, int]:
    storage = thousandths(spec["resources"]["requests"]["storage"])
    found = {"requests.storage": storage}
    if name := spec.get("storageClassName"):
        prefix = f"{name}.storageclass.storage.k8s.io"
        found |= {f"{prefix}/requests.storage": storage, f"{prefix}/persistentvolumeclaims": 1000}
    return found


def _selects_other_namespaces(affinity: Json | None) -> bool:
    for kind in ("podAffinity", "podAntiAffinity"):
        terms = (affinity or {}).get(kind) or {}
        required = terms.get("requiredDuringSchedulingIgnoredDuringExecution") or ()
        preferred = terms.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
        for term in (*required, *(item.get("podAffinityTerm") or {} for item in preferred)):
            if term.get("namespaces") or term.get("namespaceSelector") is not None:
                return True
    return False


def _up(value: Decimal) -> int:
    return max(0, int((1000 * value).to_integral_value(ROUND_CEILING)))


def _sum(parts: Iterable[Amounts]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found.get(name, 0) + value
    return found


def _largest(parts: Iterable[Amounts]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = max(found.get(name, 0), value)
    return found
