"""Evaluation of NetworkPolicies (networking.k8s.io/v1) without a network."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any, Literal

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside of the cluster if it has no namespace."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.0.0.1"

    @property
    def namespace_labels(self) -> Mapping[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace}


def flows(policies: Iterable[Json], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Return True if egress at the source and ingress at the target allow a connection."""
    policies = tuple(policies)
    return _passes(policies, "Egress", source, target, port, protocol) and _passes(
        policies, "Ingress", target, source, port, protocol
    )


def selects(selector: Json, labels: Mapping[str, str]) -> bool:
    """Return True if a label selector matches. An empty one matches everything."""
    unknown = set(selector) - {"matchLabels", "matchExpressions"}
    assert not unknown, f"label selector: found {sorted(unknown)}"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def _holds(expression: Json, labels: Mapping[str, str]) -> bool:
    key, operator, values = expression["key"], expression["operator"], expression.get("values", ())
    match operator:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise AssertionError(f"label selector: found operator {operator!r}")


def _passes(
    policies: tuple[Json, ...],
    direction: Literal["Ingress", "Egress"],
    pod: Peer,
    other: Peer,
    port: int,
    protocol: str,
) -> bool:
    """Return True if no policy of the direction selects the pod, or one of their rules allows the connection."""
    isolating = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == pod.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    side = "from" if direction == "Ingress" else "to"
    return not isolating or any(
        _is_peer(rule.get(side), policy["metadata"]["namespace"], other) and _is_port(rule.get("ports"), port, protocol)
        for policy in isolating
        for rule in policy["spec"].get(direction.lower()) or ()
    )


def _is_peer(peers: Iterable[Json] | None, namespace: str, other: Peer) -> bool:
    """Return True if a peer matches. Missing or empty peers match everything."""
    return not peers or any(_matches(peer, namespace, other) for peer in peers)


def _matches(peer: Json, namespace: str, other: Peer) -> bool:
    if "ipBlock" in peer:
        assert set(peer) == {"ipBlock"}, "an ipBlock cannot be combined"
        address, block = ip_address(other.address), peer["ipBlock"]
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(cidr) for cidr in block.get("except", ())
        )
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        at_home = selects(peer["namespaceSelector"], other.namespace_labels)
    else:
        at_home = other.namespace == namespace
    return at_home and selects(peer.get("podSelector", {}), other.labels)


def _is_port(ports: Iterable[Json] | None, port: int, protocol: str) -> bool:
    """Return True if a port matches. Missing or empty ports match every port of every protocol."""
    return not ports or any(_covers(entry, port, protocol) for entry in ports)


def _covers(entry: Json, port: int, protocol: str) -> bool:
    if entry.get("protocol", "TCP") != protocol:
        return False
    if "port" not in entry:
        return True
    assert isinstance(entry["port"], int), (
        f"port {entry['port']!r}: expected a number, since port names depend on the pod"
    )
    return bool(entry["port"] <= port <= entry.get("endPort", entry["port"]))
