"""Rules of the record of node faults: a node with several faults within a time is left out of new plans for a while.

A job can report any fault. What the jobs of one namespace report therefore leaves a node out for this namespace alone.
A node is left out for all namespaces if its own condition shows the faults, or if jobs of two namespaces report them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from dljob.faults.types import EVERY_NAMESPACE, Fault, FaultPolicy, Ledger, LeftOut, NodeRecord

SAME_INCIDENT = timedelta(minutes=5)
"""Faults of a node's connection within this time are one incident: agents notice after 5 s, Kubernetes after 50 s."""
MAX_NODES = 200
MAX_FAULTS = 8
"""Maximum number of stored faults of one node, and of namespaces for which it is left out.

With ``MAX_NODES``, the record has at most 1 MiB, the limit of a ConfigMap (``tests/unit/faults`` measures that).
"""


def recorded(ledger: Ledger, fault: Fault, policy: FaultPolicy, now: datetime) -> Ledger:
    """Return the ledger with one more fault, and with its node left out if that was one fault too many.

    Return the ledger itself if the fault is known or older than the window.
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
    """Return True if the fault is known on any node: a late report may name a pod that runs on another node now."""
    mine = (fault.key, fault.namespace)
    return any((known.key, known.namespace) == mine for record in ledger.values() for known in record.faults)


def _judged(
    node: str, faults: tuple[Fault, ...], left_out: tuple[LeftOut, ...], namespace: str, policy: FaultPolicy,
    now: datetime,
) -> tuple[LeftOut, ...]:  # fmt: skip
    """Return ``left_out``, with a new entry if the faults that count for ``namespace`` reach the limit."""
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
    """Return the faults that count when a node is left out for ``namespace``, or for EVERY_NAMESPACE.

    For the latter, faults that jobs reported count only if jobs of several namespaces reported some.
    """
    if namespace != EVERY_NAMESPACE:
        return [item for item in faults if item.namespace in (namespace, EVERY_NAMESPACE)]
    reporters = {item.namespace for item in faults} - {EVERY_NAMESPACE}
    return [item for item in faults if len(reporters) > 1 or item.namespace == EVERY_NAMESPACE]


def _incidents(faults: list[Fault]) -> Iterator[Fault]:
    """Yield one fault of each incident, in the order of time. Each device fault is an incident of its own."""
    last: Fault | None = None
    for fault in sorted(faults, key=lambda item: item.at):
        if fault.kind.of_connection:
            if last is not None and fault.at - last.at < SAME_INCIDENT:
                continue
            last = fault
        yield fault


def _bounded(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Drop faults until ``MAX_FAULTS`` are left: each time, the oldest of the namespace that has the most faults.

    A namespace with few faults therefore keeps all of them.
    """
    kept = list(faults)
    while len(kept) > MAX_FAULTS:
        [(most, _)] = Counter(item.namespace for item in kept).most_common(1)
        kept.remove(min((item for item in kept if item.namespace == most), key=lambda item: item.at))
    return tuple(kept)


def _without_least(ledger: Ledger, now: datetime) -> Ledger:
    """Drop the records that matter least if there are too many.

    Nodes that are left out for all namespaces matter most, then nodes that are left out for one namespace. Among equal
    nodes, those with the latest faults matter most.
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
    """Return the ledger without faults before the window, and without old entries of nodes that were left out.

    An entry is old if it ended at least ``policy.longest_s`` seconds ago. If the node is then left out again, this
    counts as the first time.
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
    """Return the entries of all nodes that are left out now, for any namespace."""
    return tuple(item for record in ledger.values() for item in record.left_out if item.until > now)


def left_out_nodes(ledger: Ledger, namespace: str, now: datetime) -> dict[str, LeftOut]:
    """Return node → entry for the nodes that are left out of the plans of ``namespace`` now.

    If a node is left out for the namespace and for all, return the entry that ends later.
    """
    found: dict[str, LeftOut] = {}
    for item in sorted(active(ledger, now), key=lambda item: item.until):
        if item.namespace in (namespace, EVERY_NAMESPACE):
            found[item.node] = item
    return found
