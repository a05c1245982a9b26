"""ResourceQuotas of a namespace: what they leave, and whether the objects of a plan fit into that.

The API server adds to a quota's usage when it admits an object. The quota controller subtracts from it some time after
an object is gone. A plan is checked against the usage that the quota's status shows, minus what the job's own pods
charge, plus what the plans of other jobs will charge.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dljob.scheduling.limits.charges import Amounts, Charge, container_amounts, parsed_amounts
from dljob.scheduling.limits.limit_ranges import LimitRange

EXPLICIT = ("cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
"""Resources that each container must state if a quota limits them; otherwise the API server rejects its pod."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A requirement on the objects that a quota counts. Only the scope PriorityClass has an operator and values."""

    name: str
    operator: str = "Exists"
    values: tuple[str, ...] = ()

    def holds(self, charge: Charge) -> bool:
        """Return True if the scope selects the object with this charge. An unknown scope selects no object.

        Scopes select only pods.
        """
        if not charge.is_pod:
            return False
        if self.name != "PriorityClass":
            return {
                "Terminating": charge.terminating,
                "NotTerminating": not charge.terminating,
                "BestEffort": charge.best_effort,
                "NotBestEffort": not charge.best_effort,
                "CrossNamespacePodAffinity": charge.cross_namespace,
            }.get(self.name, False)
        return {
            "In": charge.priority_class in self.values,
            "NotIn": charge.priority_class not in self.values,
            "Exists": bool(charge.priority_class),
            "DoesNotExist": not charge.priority_class,
        }.get(self.operator, False)


@dataclass(frozen=True, slots=True)
class Quota:
    """A ResourceQuota. ``hard``: its limits. ``used``: its usage, from its status or changed by ``with_usage``.

    Amounts are by resource, in thousandths of a unit. The quota counts only the objects that all its ``scopes`` select.
    """

    name: str
    hard: Amounts = field(default_factory=dict)
    used: Amounts = field(default_factory=dict)
    scopes: tuple[Scope, ...] = ()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> "Quota":
        """Parse the manifest of a ResourceQuota. Its limits are those in the status, which the API server enforces.

        A limit that the status does not show yet is taken from the spec.
        """
        spec, status = body.get("spec") or {}, body.get("status") or {}
        selector = (spec.get("scopeSelector") or {}).get("matchExpressions") or ()
        hard = {**parsed_amounts(spec.get("hard")), **parsed_amounts(status.get("hard"))}
        return cls(
            body["metadata"]["name"],
            hard,
            {name: value for name, value in parsed_amounts(status.get("used")).items() if name in hard},
            (
                *(Scope(name) for name in spec.get("scopes") or ()),
                *(
                    Scope(item["scopeName"], item.get("operator") or "Exists", tuple(item.get("values") or ()))
                    for item in selector
                ),
            ),
        )

    def charged(self, charge: Charge) -> dict[str, int]:
        """Return what an object charges to this quota, by resource in thousandths.

        Return an empty dictionary if a scope of the quota does not select the object.
        """
        if not all(scope.holds(charge) for scope in self.scopes):
            return {}
        return {name: value for name, value in charge.amounts if name in self.hard}

    def total(self, needs: Iterable[tuple[Charge, int]]) -> dict[str, int]:
        """Return what several objects charge to this quota together, by resource in thousandths.

        ``needs``: pairs of the charge of an object and the number of such objects; negative: they are removed.
        """
        found: dict[str, int] = {}
        for charge, count in needs:
            for name, value in self.charged(charge).items():
                found[name] = found.get(name, 0) + value * count
        return found

    def left(self, resource: str) -> int:
        """Return how much of a resource may still be used, in thousandths.

        The result is negative if the quota was lowered below its usage. The quota must limit the resource.
        """
        return self.hard[resource] - self.used.get(resource, 0)

    def with_usage(self, more: Iterable[tuple[Charge, int]]) -> "Quota":
        """Return the quota as if objects had been added or removed.

        ``more``: pairs of the charge of an object and the number of such objects; negative: they are removed.
        """
        used = dict(self.used)
        for charge, count in more:
            for name, value in self.charged(charge).items():
                used[name] = max(0, used.get(name, 0) + value * count)
        return replace(self, used=used)

    def with_room_for(self, needs: Iterable[tuple[Charge, int]]) -> "Quota":
        """Return the quota as if at least as much were left as objects charge, or all of it if it is smaller."""
        most = {name: max(0, self.hard[name] - value) for name, value in self.total(needs).items()}
        return replace(self, used={name: min(value, most.get(name, value)) for name, value in self.used.items()})

    def kept_for(self, needs: Iterable[tuple[Charge, int]], own: Iterable[tuple[Charge, int]]) -> "Quota":
        """Return the quota as if other objects had been added, except where that takes what a job has already.

        ``needs``: these objects, and ``own``: those of the job, which are not in the usage; as in ``with_usage``.
        """
        held = replace(self, used={}).with_usage(own).used
        more = self.with_usage(needs).used
        used = {name: min(value, self.hard[name] - held.get(name, 0)) for name, value in more.items()}
        return replace(self, used={name: max(value, self.used.get(name, 0)) for name, value in used.items()})


@dataclass(frozen=True, slots=True)
class NamespaceLimits:
    """The quotas and limit ranges of a job's namespace, sorted by name.

    ``priority_class``: the cluster's default PriorityClass, which the API server gives to pods that name none, before
    it compares them with the scopes of quotas. Empty: there is none.
    """

    quotas: tuple[Quota, ...] = ()
    ranges: tuple[LimitRange, ...] = ()
    priority_class: str = ""

    @property
    def empty(self) -> bool:
        return not (self.quotas or self.ranges)

    def kept_for(self, needs: Collection[tuple[Charge, int]], own: Collection[tuple[Charge, int]]) -> "NamespaceLimits":
        """Return the limits with ``Quota.kept_for`` of each quota."""
        return replace(self, quotas=tuple(quota.kept_for(needs, own) for quota in self.quotas))

    def with_room_for(self, needs: Collection[tuple[Charge, int]]) -> "NamespaceLimits":
        """Return the limits with ``Quota.with_room_for`` of each quota."""
        return replace(self, quotas=tuple(quota.with_room_for(needs) for quota in self.quotas))

    def unused(self) -> "NamespaceLimits":
        """Return the limits as if no object used the quotas."""
        return replace(self, quotas=tuple(replace(quota, used={}) for quota in self.quotas))

    def grown(self, before: "NamespaceLimits") -> bool:
        """Return True if these limits may allow a plan that the earlier limits ``before`` did not allow."""
        if (self.ranges, self.priority_class) != (before.ranges, before.priority_class):
            return True
        now = {quota.name: quota for quota in self.quotas}
        for old in before.quotas:
            new = now.get(old.name)
            if new is None or new.scopes != old.scopes or old.hard.keys() - new.hard.keys():
                return True
            if any(new.left(name) > old.left(name) for name in old.hard):
                return True
        return False


NO_LIMITS = NamespaceLimits()


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource of which a quota has less left than the objects of a plan need. Amounts are in thousandths."""

    quota: str
    resource: str
    hard: int
    used: int
    needed: int

    @property
    def left(self) -> int:
        return max(0, self.hard - self.used)

    def __str__(self) -> str:
        hard, used, left, needed = (
            amount_text(self.resource, each) for each in (self.hard, self.used, self.left, self.needed)
        )
        return (
            f"ResourceQuota {self.quota}: {self.resource} has {used} of {hard} used or reserved and {left} left, "
            f"{needed} needed"
        )


@dataclass(frozen=True, slots=True)
class Overdraft:
    """A resource of which more is used than a quota allows, because the quota was lowered. Amounts: in thousandths."""

    quota: str
    resource: str
    hard: int
    used: int

    def __str__(self) -> str:
        hard, used = (amount_text(self.resource, each) for each in (self.hard, self.used))
        return f"ResourceQuota {self.quota}: {self.resource}: found {used} used; the quota allows {hard}"


def overdrawn(quotas: Iterable[Quota]) -> set[tuple[str, str, int]]:
    """Return (quota, resource, limit) for each limit that is below what is used."""
    return {
        (quota.name, resource, limit)
        for quota in quotas
        for resource, limit in quota.hard.items()
        if quota.left(resource) < 0
    }


def overdrafts(quotas: Iterable[Quota], charges: Iterable[Charge]) -> tuple[Overdraft, ...]:
    """Return the resources that objects use, and of which more is used than the quotas allow.

    ``charges``: what each of the objects charges.
    """
    charges, found = set(charges), []
    for quota in quotas:
        resources = {name for charge in charges for name, value in quota.charged(charge).items() if value}
        found += [
            Overdraft(quota.name, name, quota.hard[name], quota.used[name])
            for name in sorted(resources)
            if quota.left(name) < 0
        ]
    return tuple(found)


def shortages(quotas: Iterable[Quota], needs: Iterable[tuple[Charge, int]]) -> tuple[Shortage, ...]:
    """Return the resources of which the quotas have too little left for new objects; empty if all fit.

    ``needs``: pairs of the charge of an object and the number of such objects. A resource of which the objects use
    nothing is never short, even if the quota was lowered below its usage.
    """
    needs, found = tuple(needs), []
    for quota in quotas:
        found += [
            Shortage(quota.name, name, quota.hard[name], quota.used.get(name, 0), value)
            for name, value in sorted(quota.total(needs).items())
            if value > max(0, quota.left(name))
        ]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SharedQuotas:
    """The quotas of a namespace, as limits for several of its jobs together.

    ``quotas``: with the usage as if these jobs had ended. All amounts that the methods return have one entry for each
    resource of each quota, in the same order and in thousandths of a unit.
    """

    quotas: tuple[Quota, ...] = ()

    def allowed(self) -> tuple[int, ...]:
        """Return what the quotas allow to the jobs together."""
        return tuple(max(0, quota.left(name)) for quota in self.quotas for name in quota.hard)

    def needed(self, objects: Collection[tuple[Charge, int]]) -> tuple[int, ...]:
        """Return what objects charge to the quotas: pairs of the charge of an object and their number."""
        totals = [(quota, quota.total(objects)) for quota in self.quotas]
        return tuple(total.get(name, 0) for quota, total in totals for name in quota.hard)


@dataclass(frozen=True, slots=True)
class Unstated:
    """A request or limit that a container must have because of a quota, and lacks."""

    quota: str
    resource: str
    container: str


def unstated(quotas: Iterable[Quota], spec: Mapping[str, Any], charge: Charge) -> Unstated | None:
    """Return the first request or limit that a quota demands and a container lacks; None if none is missing.

    ``spec``, ``charge``: those of the pod with the container. Only quotas whose scopes select the pod count.
    """
    for quota in quotas:
        if not all(scope.holds(charge) for scope in quota.scopes):
            continue
        whole = _stated(spec)
        for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
            for resource in EXPLICIT:
                if resource in quota.hard and resource not in whole | _stated(container):
                    return Unstated(quota.name, resource, str(container.get("name")))
    return None


def _stated(container: Mapping[str, Any]) -> set[str]:
    requests, limits = container_amounts(container)
    return {*requests, *(f"requests.{name}" for name in requests), *(f"limits.{name}" for name in limits)}


def amount_text(resource: str, value: int) -> str:
    """Return an amount in thousandths as a Kubernetes quantity, bytes in MiB or GiB."""
    if resource.endswith(("memory", "storage")):
        mebibytes = value / 1000 / 2**20
        return f"{mebibytes / 1024:.4g}Gi" if mebibytes >= 1024 else f"{mebibytes:.4g}Mi"
    return str(value // 1000) if value % 1000 == 0 else f"{value}m"
