"""Domains: parts of a cluster. The planner makes a plan for each of them, and the pods run in that of the best plan.

A domain contains nodes of one rack, of one zone or of the whole cluster: all these nodes, only the spot nodes, or only
the other nodes. Without a topology and without spot nodes, there is only one domain: ``ANYWHERE``.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dljob.cluster.view import ClusterView, Node

ZONE_LABEL = "topology.kubernetes.io/zone"
RACK_LABEL = "topology.kubernetes.io/rack"
SPOT_LABELS = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
"""Labels of spot nodes: Google GKE, Amazon EKS, Karpenter, Azure AKS."""
MAX_DOMAINS = 6
"""Maximum number of zones, and of racks in a zone, for which plans are made: those with the most free devices."""


@dataclass(frozen=True)
class Crossing:
    """The network between two zones or two racks.

    ``bandwidth_Bps``: bytes per second that one node can send to the other zone or rack. ``latency_s``: latency in
    seconds. A value of None means: as good as within one rack or zone.
    """

    bandwidth_Bps: float | None = None
    latency_s: float | None = None

    def joined(self, other: "Crossing | None") -> "Crossing":
        """Return the network for traffic that crosses both zones and racks: the lower bandwidth, the higher latency.

        ``other``: the second network; None: return this one.
        """
        if other is None:
            return self
        bandwidths = [b for b in (self.bandwidth_Bps, other.bandwidth_Bps) if b is not None]
        latencies = [s for s in (self.latency_s, other.latency_s) if s is not None]
        return Crossing(min(bandwidths, default=None), max(latencies, default=None))


@dataclass(frozen=True)
class Topology:
    """The network between zones and between racks, as the administrator describes it.

    ``zones``: the network between zones; None: as good as within one zone. ``racks``: the network between racks; None:
    as good as within one rack. ``rack_label``: key of the node label whose value is the name of the rack.
    """

    zones: Crossing | None = None
    racks: Crossing | None = None
    rack_label: str = RACK_LABEL


@dataclass(frozen=True)
class Spot:
    """Nodes that the cloud may take back at any time. ``labels``: (key, value); a spot node has one or more of them."""

    labels: tuple[tuple[str, str], ...] = SPOT_LABELS
    price_factor: float = 1.0
    """Price of a spot node divided by the price of the same node on demand."""
    interruptions_per_h: float = 0.0
    """Interruptions per hour of one node."""

    @property
    def differs(self) -> bool:
        """Return True if spot nodes differ from others in price or in interruptions, so that plans depend on them."""
        return self.price_factor != 1.0 or self.interruptions_per_h > 0

    def includes(self, node: Node) -> bool:
        return any(node.labels.get(key) == value for key, value in self.labels)

    def includes_all(self, domain: "Domain") -> bool:
        """Return True if every node of a domain is a spot node: each of its terms requires a label of spot nodes."""
        return bool(domain.terms) and all(
            any(item.operator == "In" and {(item.key, each) for each in item.values} <= {*self.labels} for item in term)
            for term in domain.terms
        )


@dataclass(frozen=True)
class Requirement:
    """A requirement on a label of a node, as in a node affinity: its value is in (In) or not in (NotIn) ``values``.

    A node without the label ``key`` meets every requirement with NotIn.
    """

    key: str
    operator: Literal["In", "NotIn"]
    values: tuple[str, ...]

    def met(self, labels: Mapping[str, str]) -> bool:
        return (labels.get(self.key) in self.values) is (self.operator == "In")


@dataclass(frozen=True)
class Domain:
    """A part of the cluster, such as one zone, or the spot nodes of one rack.

    ``terms`` are alternatives: a node belongs to the domain if it meets all requirements of at least one of them.
    Without terms, every node belongs to the domain.
    """

    text: str = ""
    """Description, such as 'in zone a, on spot nodes'; empty if zones, racks and spot nodes do not matter."""
    terms: tuple[tuple[Requirement, ...], ...] = ()
    crossing: Crossing | None = None
    """The network between the zones or racks that a plan in this domain may span; None: as within one zone or rack."""
    price_factor: float = 1.0
    """Price of a node in this domain divided by the price of the same node on demand."""
    interruptions_per_h: float = 0.0
    """Interruptions per hour of one node."""

    def within(self, view: ClusterView) -> ClusterView:
        """Return the view with the nodes of this domain only."""
        if not self.terms:
            return view
        return ClusterView(tuple(node for node in view.nodes if self.has(node)))

    def has(self, node: Node) -> bool:
        """Return True if the node belongs to the domain."""
        return not self.terms or any(all(item.met(node.labels) for item in term) for term in self.terms)

    def narrowed(self, text: str, *requirements: Requirement) -> "Domain":
        """Return the part of this domain whose nodes also meet all ``requirements``.

        ``text``: description of these requirements, such as 'in zone a'. It precedes the description of this domain.
        """
        terms = tuple((*term, *requirements) for term in self.terms or ((),))
        return replace(self, text=_texts(text, self.text), terms=terms)


ANYWHERE = Domain()

NO_BORDERS = Topology()
SAME_AS_OTHERS = Spot()


def domains(nodes: Sequence[Node], topology: Topology, spot: Spot, *, avoid_spot: bool = False) -> list[Domain]:
    """Return the domains for each of which the planner makes a plan of a job, to choose the best of these plans.

    ``nodes``: the nodes that the job could use. ``avoid_spot``: True to leave out all spot nodes, also those that the
    cluster gets later. The first domain is the widest. It is the only one if ``topology`` describes no network between
    zones or racks, and spot nodes have the same price and interruptions as other nodes (``Spot.differs``).
    """
    found: list[Domain] = []
    for part in _by_interruption(nodes, spot, avoid_spot=avoid_spot):
        view = part.within(ClusterView(tuple(nodes)))
        first, *places = _by_place(part, view.nodes, topology)
        if part.text and not part.terms:  # all nodes, also spot nodes
            # A place whose nodes are all spot nodes, or all others, is priced more precisely as a part of these.
            places = [place for place in places if len({spot.includes(n) for n in place.within(view).nodes}) > 1]
        found += [first, *places]
    return found


def _by_interruption(nodes: Sequence[Node], spot: Spot, *, avoid_spot: bool) -> list[Domain]:
    """Divide the cluster by spot nodes: return all nodes, the nodes that are not spot nodes, and the spot nodes.

    In the domain of all nodes, the scheduler decides whether a plan gets spot nodes. Therefore, this domain has the
    price of on-demand nodes and the interruptions of spot nodes. In three cases, return only one domain:

    - the nodes that are not spot nodes, if ``avoid_spot`` is True and spot nodes have labels;
    - ``ANYWHERE``, if there are no spot nodes, or if ``Spot.differs`` is False;
    - the spot nodes, if all nodes are spot nodes.

    The nodes that are not spot nodes have none of the labels of spot nodes, also of those that no node has now: the
    cluster may get nodes with them while pods wait for a node, or while a lost pod is replaced.
    """
    names = sorted(set(spot.labels))
    others = ANYWHERE.narrowed("on nodes that are not spot nodes", *(Requirement(k, "NotIn", (v,)) for k, v in names))
    if avoid_spot and names:
        return [others]
    labels = [(k, v) for k, v in names if any(node.labels.get(k) == v for node in nodes)]
    if not labels or not spot.differs:
        return [ANYWHERE]
    bought = Domain(
        "on spot nodes",
        tuple((Requirement(key, "In", (value,)),) for key, value in labels),
        None,
        spot.price_factor,
        spot.interruptions_per_h,
    )
    if all(spot.includes(node) for node in nodes):
        return [bought]
    mixed = Domain("on any nodes, also spot nodes", interruptions_per_h=spot.interruptions_per_h)
    return [mixed, others, bought]


def _by_place(part: Domain, nodes: Sequence[Node], topology: Topology) -> list[Domain]:
    """Return ``part`` as a domain that may span zones and racks, then a domain for each zone and for each rack in it.

    ``nodes``: the nodes of ``part``. Zones get no domains if ``part`` has only one zone, or if ``topology`` does not
    describe the network between zones. The same holds for racks. At most ``MAX_DOMAINS`` zones, and as many racks of a
    zone, get domains: those with the most free devices.
    """
    across = part.crossing
    texts = [part.text]
    inner: list[Domain] = []
    if topology.zones is not None and len(zones := _places(nodes, (ZONE_LABEL,))) > 1:
        across = topology.zones
        texts.insert(0, "across zones")
        for (zone,) in _largest(nodes, (ZONE_LABEL,), zones):
            own = [node for node in nodes if node.labels.get(ZONE_LABEL) == zone]
            inner += _by_place(
                part.narrowed(f"in zone {zone}", Requirement(ZONE_LABEL, "In", (zone,))),
                own,
                replace(topology, zones=None),
            )
    if topology.racks is not None and len(racks := _places(nodes, (topology.rack_label,))) > 1:
        across = topology.racks.joined(across)
        texts.insert(0, "across racks")
        if len(texts) == 2:  # the nodes are in one zone, or zones do not matter
            for (rack,) in _largest(nodes, (topology.rack_label,), racks):
                requirement = Requirement(topology.rack_label, "In", (rack,))
                inner.append(part.narrowed(f"in rack {rack}", requirement))
    return [replace(part, text=_texts(*texts), crossing=across), *inner]


Place = tuple[str | None, ...]


def _places(nodes: Iterable[Node], labels: Sequence[str]) -> set[Place]:
    return {tuple(node.labels.get(label) for label in labels) for node in nodes}


def _largest(nodes: Iterable[Node], labels: Sequence[str], places: Iterable[Place]) -> list[tuple[str, ...]]:
    """Return at most ``MAX_DOMAINS`` of ``places``: those with the most free devices, in falling order of this number.

    A place (such as a zone) is a tuple of the values of ``labels`` on its nodes. Places whose nodes lack a label are
    left out.
    """
    free: Counter[Place] = Counter()
    for node in nodes:
        free[tuple(node.labels.get(label) for label in labels)] += node.free_devices
    named = [place for place in places if all(place)]
    ordered = sorted(named, key=lambda place: (-free[place], place))
    return [tuple(name or "" for name in place) for place in ordered[:MAX_DOMAINS]]


def _texts(*texts: str) -> str:
    return ", ".join(text for text in texts if text)
