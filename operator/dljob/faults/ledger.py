"""Rules of the record of node faults (ledger): which nodes are left out of new plans, and for which namespaces.

Reports of jobs are untrusted: a job can report any fault of any node. Faults that only jobs of one namespace report
therefore leave a node out of the plans of this namespace alone. A node is left out of the plans of all namespaces if
its own condition shows the faults, or if jobs of at least two namespaces report them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from dljob.faults.types import EVERY_NAMESPACE, Fault, FaultPolicy, Ledger, LeftOut, NodeRecord

SAME_INCIDENT = timedelta(minutes=5)
"""Time within which several faults of a node's connection are one incident.

They are usually one event that is noticed twice: by agents after 5 s, and by Kubernetes after 50 s.
"""
MAX_NODES = 200
MAX_FAULTS = 8
"""Maximum number of stored faults of one node, and of namespaces for which it is left out.

With ``MAX_NODES``, the record has at most 1 MiB, the limit of a ConfigMap (``tests/unit/faults`` measures that).
"""


def recorded(ledger: Ledger, fault: Fault, policy: FaultPolicy, now: datetime) -> Ledger:
    """Return the record of all nodes (ledger) with one more fault.

    If the node's faults now reach ``policy.limit`` (faults of one incident count once), the result also has an entry
    that says until when the node is left out of new plans. Return ``ledger`` itself if it contains the fault already,
    or if the fault is older than the window in which faults count (``policy.window_s``).
    """
    if fault.at <= now - timedelta(seconds=policy.window_s) or _knows(ledger, fault):
        return ledger
    record = ledger.get(fault.node, NodeRecord())
    faults = _bounded((*record.faults, fault))
    left_out = record.left_out
    for namespace in dict.fromkeys((EVERY_NAMESPACE, *(known.namespace for known in faults))):
        left_out = _judged(fault.node, faults, left_out, namespace, policy, now)
    changed = {**ledger, fault.node: NodeRecord(faults=faults, left_out=left_out)}
    return _without_least(expired(changed, policy, now), now)


def _knows(ledger: Ledger, fault: Fault) -> bool:
    """Return True if the ledger contains a fault with the same key and namespace, on this or on another node.

    A late report may name a pod that runs on another node now. Its fault must not count again, for the new node.
    """
    mine = (fault.key, fault.namespace)
    return any((known.key, known.namespace) == mine for record in ledger.values() for known in record.faults)


def _judged(
    node: str, faults: tuple[Fault, ...], left_out: tuple[LeftOut, ...], namespace: str, policy: FaultPolicy,
    now: datetime,
) -> tuple[LeftOut, ...]:  # fmt: skip
    """Decide whether faults leave a node out of the plans of ``namespace``, and return the node's updated entries.

    ``faults``: the node's faults. ``left_out``: its entries, the periods in which it is or was left out of plans.
    ``namespace``: a namespace or ``EVERY_NAMESPACE``. Faults count if they occurred in the last ``policy.window_s``
    seconds, and after the last period in which the node was left out of the namespace's plans. If these make at least
    ``policy.limit`` incidents, the result has a new entry that begins at ``now``. Otherwise, or if the node is left out
    already, return ``left_out`` unchanged.
    """
    seen = [item for item in left_out if item.namespace in (namespace, EVERY_NAMESPACE)]
    if any(item.until > now for item in seen):
        return left_out
    returned = max((item.until for item in seen), default=None)
    oldest = now - timedelta(seconds=policy.window_s)
    counted = [item for item in faults if item.at > oldest and (returned is None or item.at > returned)]
    incidents = list(_incidents(_evidence(counted, namespace)))
    if len(incidents) < policy.limit:
        return left_out
    before = next((item for item in left_out if item.namespace == namespace), None)
    times = min(before.times + 1, 1000) if before is not None else 1
    new = LeftOut(
        node=node,
        namespace=namespace,
        since=now,
        until=now + policy.lasts(times),
        times=times,
        kinds=tuple(item.kind for item in incidents)[-MAX_FAULTS:],
    )
    others = sorted((item for item in left_out if item.namespace != namespace), key=lambda item: item.until)
    # The entry for all namespaces stays: it is one, and it matters most.
    others.sort(key=lambda item: item.namespace == EVERY_NAMESPACE)
    return (*others[-(MAX_FAULTS - 1) :], new)


def _evidence(faults: list[Fault], namespace: str) -> list[Fault]:
    """Return those of a node's faults that count in the decision to leave it out of the plans of ``namespace``.

    For one namespace, these are the faults that its jobs reported, and those that the node's own condition shows. For
    ``EVERY_NAMESPACE``, faults that jobs reported count only if jobs of several namespaces reported some, so that the
    jobs of one namespace cannot take a node from the others.
    """
    if namespace != EVERY_NAMESPACE:
        return [item for item in faults if item.namespace in (namespace, EVERY_NAMESPACE)]
    reporters = {item.namespace for item in faults} - {EVERY_NAMESPACE}
    return [item for item in faults if len(reporters) > 1 or item.namespace == EVERY_NAMESPACE]


def _incidents(faults: list[Fault]) -> Iterator[Fault]:
    """Yield one fault of each incident, in the order of time.

    Each device fault is an incident of its own. Faults of the connection within ``SAME_INCIDENT`` are one incident.
    """
    last: Fault | None = None
    for fault in sorted(faults, key=lambda item: item.at):
        if fault.kind.of_connection:
            if last is not None and fault.at - last.at < SAME_INCIDENT:
                continue
            last = fault
        yield fault


def _bounded(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Return at most ``MAX_FAULTS`` of a node's ``faults``.

    If there are more, drop the oldest fault of the namespace with the most faults, and repeat this. A namespace with
    few faults therefore keeps all of them.
    """
    kept = list(faults)
    while len(kept) > MAX_FAULTS:
        [(most, _)] = Counter(item.namespace for item in kept).most_common(1)
        kept.remove(min((item for item in kept if item.namespace == most), key=lambda item: item.at))
    return tuple(kept)


def _without_least(ledger: Ledger, now: datetime) -> Ledger:
    """Return the ledger with at most ``MAX_NODES`` records. If there are more, drop those that matter least.

    Nodes that are left out for all namespaces now matter most. Nodes that are left out for one namespace come second,
    and all other nodes last. Among nodes of the same kind, a node matters more if its last fault, or the start of its
    last period, is later.
    """
    if len(ledger) <= MAX_NODES:
        return ledger

    def matters(node: str) -> tuple[bool, bool, datetime]:
        record = ledger[node]
        out = [item for item in record.left_out if item.until > now]
        times = [*(item.at for item in record.faults), *(item.since for item in record.left_out)]
        return any(item.namespace == EVERY_NAMESPACE for item in out), bool(out), max(times)

    return {node: ledger[node] for node in sorted(ledger, key=matters)[-MAX_NODES:]}


def expired(ledger: Ledger, policy: FaultPolicy, now: datetime) -> Ledger:
    """Return the ledger without old faults, and without old entries of nodes that were left out.

    A fault is old if it happened more than ``policy.window_s`` seconds ago. An entry is old if it ended at least
    ``policy.longest_s`` seconds ago. If the node is left out again after that, this counts as the first time.
    """
    oldest, forgotten = now - timedelta(seconds=policy.window_s), now - timedelta(seconds=policy.longest_s)
    kept: dict[str, NodeRecord] = {}
    for node, record in ledger.items():
        faults = tuple(item for item in record.faults if item.at > oldest)
        left_out = tuple(item for item in record.left_out if item.until > forgotten)
        if faults or left_out:
            unchanged = (len(faults), len(left_out)) == (len(record.faults), len(record.left_out))
            kept[node] = record if unchanged else NodeRecord(faults=faults, left_out=left_out)
    return kept


def forgiven(ledger: Ledger, nodes: Iterable[str]) -> Ledger:
    """Return the ledger without the records of ``nodes``, whose faults the administrator does not want to count."""
    ignored = set(nodes)
    return {node: record for node, record in ledger.items() if node not in ignored}


def active(ledger: Ledger, now: datetime) -> tuple[LeftOut, ...]:
    """Return the entries of all nodes that are left out now, whether for one namespace or for all."""
    return tuple(item for record in ledger.values() for item in record.left_out if item.until > now)


def left_out_nodes(ledger: Ledger, namespace: str, now: datetime) -> dict[str, LeftOut]:
    """Return name of the node → entry for the nodes that are left out of the plans of ``namespace`` now.

    The entry says until when the node is left out, and why. If a node has an entry for the namespace and one for all
    namespaces, return the entry that ends later.
    """
    found: dict[str, LeftOut] = {}
    for item in sorted(active(ledger, now), key=lambda item: item.until):
        if item.namespace in (namespace, EVERY_NAMESPACE):
            found[item.node] = item
    return found
