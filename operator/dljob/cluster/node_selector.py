"""Node selectors: terms that choose nodes by their labels and names, as in the node affinity of a PersistentVolume.

They match as in the scheduler of Kubernetes (``k8s.io/component-helpers/scheduling/corev1/nodeaffinity``).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dljob.cluster.domains import ZONE_LABEL, Requirement
from dljob.cluster.view import Node

HOSTNAME_LABEL = "kubernetes.io/hostname"
NAME_FIELD = "metadata.name"
ZONE_KEYS = frozenset(
    {
        ZONE_LABEL,
        "failure-domain.beta.kubernetes.io/zone",
        "topology.disk.csi.azure.com/zone",
        "topology.ebs.csi.aws.com/zone",
        "topology.gke.io/zone",
    }
)
"""Labels that name the zone of a node: the one of Kubernetes, its predecessor, and those of drivers of zonal disks."""
MAX_LISTED = 3
"""Maximum number of values, and of terms, that a text lists."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MAX_KEY, _MAX_VALUE = 317, 63
"""Largest lengths of a label's key and value. A longer one matches no node."""

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
OPERATORS: frozenset[str] = frozenset({"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"})


@dataclass(frozen=True, slots=True)
class Expression:
    """A requirement on a label of a node, or on its name (``of_name``). An unknown operator matches no node."""

    key: str
    operator: str
    values: tuple[str, ...] = ()
    of_name: bool = False
    """True for an entry of ``matchFields``. Only the name of a node can be selected, with In or NotIn and one value."""

    def matches(self, node: Node) -> bool:
        if self.of_name:
            chosen = self.key == NAME_FIELD and self.operator in ("In", "NotIn") and len(self.values) == 1
            return chosen and (node.name in self.values) is (self.operator == "In")
        value = node.labels.get(self.key)
        if value is None and not node.exists:
            if self.key in ZONE_KEYS:
                value = node.labels.get(ZONE_LABEL)
            if value is None and self.key != HOSTNAME_LABEL:
                return self.operator in OPERATORS  # The node may have the label when it exists.
        return _met(self.operator, value, self.values)

    def __str__(self) -> str:
        listed = _listed(self.values, ", ")
        match self.operator:
            case "In":
                return f"{self.key} in ({listed})"
            case "NotIn":
                return f"{self.key} not in ({listed})"
            case "Exists":
                return f"the label {self.key}"
            case "DoesNotExist":
                return f"no label {self.key}"
            case "Gt" | "Lt":
                return f"{self.key} {'>' if self.operator == 'Gt' else '<'} {listed}"
        return f"{self.key} {self.operator} ({listed})"


def _met(operator: str, value: str | None, values: tuple[str, ...]) -> bool:
    """Return True if a label has a value that an operator requires. ``value``: None: the node lacks the label."""
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            found, bound = _integer(value), _integer(values[0]) if len(values) == 1 else None
            return found is not None and bound is not None and (found > bound if operator == "Gt" else found < bound)
    return False


def _integer(text: str | None) -> int | None:
    """Return a decimal number of at most 64 bits; None for any other text, which no comparison matches."""
    if text is None or len(text) > 20 or _INTEGER.fullmatch(text) is None:
        return None
    number = int(text)
    return number if -(2**63) <= number < 2**63 else None


@dataclass(frozen=True, slots=True)
class NodeSelector:
    """The nodes that match at least one of ``terms``. A node matches a term if it matches all its expressions.

    An empty term matches no node, and neither does a selector without terms.
    """

    terms: tuple[tuple[Expression, ...], ...]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> "NodeSelector":
        """Parse the form of the API server: ``nodeSelectorTerms`` with ``matchExpressions`` and ``matchFields``."""
        return cls(
            tuple(
                (
                    *(_expression(item) for item in term.get("matchExpressions") or ()),
                    *(_expression(item, of_name=True) for item in term.get("matchFields") or ()),
                )
                for term in body.get("nodeSelectorTerms") or ()
            )
        )

    @classmethod
    def parse_topologies(cls, body: Sequence[Mapping[str, Any]]) -> "NodeSelector":
        """Parse ``allowedTopologies`` of a StorageClass, whose expressions all have the operator In."""
        return cls(
            tuple(
                tuple(
                    Expression(str(item["key"]), "In", tuple(map(str, item.get("values") or ())))
                    for item in term.get("matchLabelExpressions") or ()
                )
                for term in body
            )
        )

    def matches(self, node: Node) -> bool:
        return any(bool(term) and all(each.matches(node) for each in term) for term in self.terms)

    def requirements(self) -> tuple[tuple[Requirement, ...], ...] | None:
        """Return the terms as those of a ``Domain``; None if that has no such terms, because of another operator."""
        found = [_requirements(term) for term in self.terms if term]
        return tuple(term for term in found if term is not None) if found and None not in found else None

    def __str__(self) -> str:
        """Return the terms in words, such as 'topology.kubernetes.io/zone in (a)'."""
        return _listed([" and ".join(map(str, term)) for term in self.terms if term], " or ") or "no node"


def _expression(body: Mapping[str, Any], *, of_name: bool = False) -> Expression:
    values = tuple(map(str, body.get("values") or ()))
    return Expression(str(body.get("key") or ""), str(body.get("operator") or ""), values, of_name)


def _requirements(term: tuple[Expression, ...]) -> tuple[Requirement, ...] | None:
    found: list[Requirement] = []
    for each in term:
        if each.of_name or len(each.key) > _MAX_KEY or any(len(value) > _MAX_VALUE for value in each.values):
            return None
        if each.operator == "In":
            found.append(Requirement(each.key, "In", each.values))
        elif each.operator == "NotIn":
            found.append(Requirement(each.key, "NotIn", each.values))
        else:
            return None
    return tuple(found)


def _listed(texts: Sequence[str], separator: str) -> str:
    if len(texts) <= MAX_LISTED:
        return separator.join(texts)
    return f"{separator.join(texts[:MAX_LISTED])}{separator}{len(texts) - MAX_LISTED} more"
