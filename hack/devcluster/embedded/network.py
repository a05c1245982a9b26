"""The cluster's network: a switch in its own network namespace, and one network namespace per node.

The machine itself gets only one additional link, to the switch. It forwards nothing, so its sysctls and its firewall do
not change. No packet for the cluster's address ranges leaves the machine: routes make the ranges `unreachable` before
anything else is created and until everything else is removed, and no node has a default route.
"""

from __future__ import annotations

import ipaddress
import json
from functools import partial
from pathlib import Path

from devcluster.embedded.processes import wait_until
from devcluster.embedded.state import SLOTS, Ranges, State
from devcluster.errors import ClusterError
from devcluster.model import ClusterSpec, NodeSpec
from devcluster.shell import run

_ROUTE_PROTOCOL = "213"  # marks the cluster's routes (an unassigned number, see rtnetlink(7))
_LAST_RESORT_METRIC = "4278198272"
_BRIDGE = "switch"


def pick_ranges() -> Ranges:
    """Return the first address ranges that overlap no route of this machine. Raise ClusterError if there are none."""
    taken = _routed()
    for slot in range(SLOTS):
        ranges = Ranges(slot)
        if not any(ours.overlaps(theirs) for ours in ranges.all for theirs in taken):
            return ranges
    raise ClusterError(
        "network: found routes on this machine that overlap every address range that the embedded cluster can use; "
        "expected one range without such routes. Remove other clusters with hack/cluster down, or remove routes (see "
        "`ip route show table all`)"
    )


def _routed() -> list[ipaddress.IPv4Network]:
    routes = json.loads(run(["ip", "-4", "-json", "route", "show", "table", "all"]).stdout or "[]")
    destinations = [route["dst"] for route in routes if route["dst"] != "default"]
    return [ipaddress.IPv4Network(dst, strict=False) for dst in destinations]


def link_name(ranges: Ranges) -> str:
    """Return the name of the network interface that connects this machine to the cluster's virtual switch."""
    return f"dljob{ranges.slot}"


def create(state: State, ranges: Ranges) -> None:
    """Create the cluster's virtual switch, the machine's link to it, and an address for DNS.

    Before these, create a route of type `unreachable` for each address range of the cluster, so that its packets never
    leave this machine.
    """
    for network in ranges.all:
        _ip("route", "add", "unreachable", network, "metric", _LAST_RESORT_METRIC, "proto", _ROUTE_PROTOCOL)
    switch, link = state.prefix, link_name(ranges)
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "set", "lo", "up")
    _ip("-n", switch, "link", "add", _BRIDGE, "type", "bridge", "forward_delay", 0)
    _ip("-n", switch, "addr", "add", f"{ranges.dns}/24", "dev", _BRIDGE)
    _ip("-n", switch, "link", "set", _BRIDGE, "up")
    _ip("link", "add", link, "type", "veth", "peer", "name", "machine", "netns", switch)
    _ip("link", "set", link, "alias", state.prefix)
    _ip("-n", switch, "link", "set", "machine", "master", _BRIDGE, "up")
    _ip("addr", "add", f"{ranges.control_plane}/24", "dev", link)
    _ip("link", "set", link, "up")
    # DNS also answers pods.
    _ip("-n", switch, "route", "add", ranges.pods, "via", ranges.control_plane)


def create_node(state: State, ranges: Ranges, spec: ClusterSpec, node: NodeSpec) -> None:
    """Create the node's network namespace, its link to the switch, and the routes between the node and all others."""
    number, netns = spec.nodes.index(node) + 1, state.netns(node)
    _ip("netns", "add", netns)
    _ip("-n", netns, "link", "set", "lo", "up")
    _ip("link", "add", "eth0", "netns", netns, "type", "veth", "peer", "name", node.name[:15], "netns", state.prefix)
    _ip("-n", state.prefix, "link", "set", node.name[:15], "master", _BRIDGE, "up")
    _ip("-n", netns, "addr", "add", f"{ranges.node(number)}/24", "dev", "eth0")
    _ip("-n", netns, "link", "set", "eth0", "up")
    for other in range(1, len(spec.nodes) + 1):
        if other != number:
            _ip("-n", netns, "route", "add", ranges.node_pods(other), "via", ranges.node(other))
    # kube-proxy rewrites service addresses, but only of packets that have a route to begin with.
    _ip("-n", netns, "route", "add", ranges.services, "via", ranges.control_plane)
    pods, gateway = ranges.node_pods(number), ranges.node(number)
    _ip("route", "replace", pods, "via", gateway, "proto", _ROUTE_PROTOCOL)
    _ip("-n", state.prefix, "route", "replace", pods, "via", gateway)


def set_cut(state: State, node: NodeSpec, cut: bool) -> None:
    """Disconnect the node's port at the switch if `cut` is true; otherwise connect it again."""
    _ip("-n", state.prefix, "link", "set", node.name[:15], "down" if cut else "up")


def remove(state: State) -> None:
    """Remove all parts of the network that exist, even if `State.read` returns no record of the cluster."""
    for link in json.loads(run(["ip", "-json", "link", "show"]).stdout):
        if link.get("ifalias") == state.prefix:  # the kernel may delete it first, with its peer's namespace
            run(["ip", "link", "delete", link["ifname"]], check=False)
            if not wait_until(partial(_link_is_gone, link["ifname"]), 10):
                raise ClusterError(
                    f"link {link['ifname']}: found it 10 s after its deletion; expected it to be gone. "
                    f"Look for the cause with `ip link show {link['ifname']}`"
                )
    namespaces = [line.split()[0] for line in run(["ip", "netns", "list"]).stdout.splitlines() if line.strip()]
    for name in namespaces:
        if name == state.prefix or name.startswith(state.prefix + "."):
            _ip("netns", "delete", name)
    record = state.read()
    for slot in range(SLOTS):
        if (record and record.ranges.slot == slot) or _link_is_gone(link_name(Ranges(slot))):
            _remove_routes(Ranges(slot))


def _link_is_gone(name: str) -> bool:
    return not Path("/sys/class/net", name).exists()


def _remove_routes(ranges: Ranges) -> None:
    for route in json.loads(run(["ip", "-4", "-json", "route", "show", "proto", _ROUTE_PROTOCOL]).stdout or "[]"):
        network = ipaddress.IPv4Network(route["dst"])
        if any(network.subnet_of(ours) for ours in ranges.all):
            kind = [route["type"]] if route.get("type") else []
            metric = ["metric", route["metric"]] if route.get("metric") else []
            _ip("route", "delete", *kind, network, *metric, "proto", _ROUTE_PROTOCOL)


def _ip(*words: object) -> None:
    run(["ip", *map(str, words)], timeout_s=20)
