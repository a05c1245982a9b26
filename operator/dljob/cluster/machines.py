"""Machines: physical machines whose cores several nodes share, such as virtual machines or the nodes of a kind cluster.

Labels of nodes name them. A node whose label is missing or empty counts as a machine of its own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, lgamma, log

from dljob.cluster.view import MACHINE_CPU_LABEL, MACHINE_LABEL, Node, quantity

LIKELY = 0.5
"""Probability that no machine has more nodes of a plan than the plan assumes (``together``)."""


@dataclass(frozen=True)
class Machine:
    """One or several equal physical machines.

    ``nodes``: number of nodes on each that a plan may use. ``cpu``: number of cores that these can use together.
    ``count``: number of such machines.
    """

    nodes: int
    cpu: float
    count: int = 1


def cores_of_machines(nodes: Iterable[Node]) -> dict[str, float]:
    """Return the number of cores of each machine that labels of ``nodes`` name.

    That is the smallest valid value of ``MACHINE_CPU_LABEL`` on its nodes. Without one, it is the number of CPUs of its
    largest node, because a node in a container has all cores of the machine.
    """
    stated: dict[str, float] = {}
    largest: dict[str, float] = {}
    for node in nodes:
        if (name := _machine(node.labels)) is None:
            continue
        largest[name] = max(node.cpu, largest.get(name, 0.0))
        if (cpu := _cores(node.labels)) is not None:
            stated[name] = min(cpu, stated.get(name, cpu))
    return largest | stated


def usable_cpus(nodes: Sequence[Node]) -> dict[str, float]:
    """Return node name → number of CPUs that a job's pods on this node can keep busy, if it runs on all ``nodes``.

    That is the node's CPUs or, if fewer, an equal part of the cores of its machine.
    """
    cores = cores_of_machines(nodes)
    names = {node.name: _machine(node.labels) for node in nodes}
    on_each = Counter(names.values())
    shared = {name: cores[machine] / on_each[machine] for name, machine in names.items() if machine is not None}
    return {node.name: min(node.cpu, shared.get(node.name, node.cpu)) for node in nodes}


def machines(nodes: Iterable[Node], cores: Mapping[str, float]) -> tuple[Machine, ...]:
    """Return the machines of those ``nodes`` that have the label of a machine.

    ``cores``: number of cores by name of the machine, from ``cores_of_machines`` for all nodes of the cluster.
    """
    on_each = Counter(name for node in nodes if (name := _machine(node.labels)) is not None)
    kinds = Counter((number, cores[name]) for name, number in on_each.items() if cores.get(name))
    return tuple(Machine(number, cpu, count) for (number, cpu), count in sorted(kinds.items()))


def smallest_cpu(found: Sequence[Machine], nodes: int) -> float:
    """Return the cores of the smallest machine with at least ``nodes`` nodes; infinite if no nodes share a machine.

    An earlier run may have used more nodes of a machine than ``found`` has now. Then the smallest machine counts.
    """
    large = [machine for machine in found if machine.nodes >= nodes]
    return min((machine.cpu for machine in large or found), default=inf)


def most_on_one_machine(labels: Iterable[Mapping[str, str]]) -> int:
    """Return the largest number of nodes that share a machine; at least 1. ``labels``: those of each node."""
    return max(Counter(name for each in labels if (name := _machine(each)) is not None).values(), default=1)


def neighbours(nodes: Iterable[Node], names: Iterable[str]) -> set[str]:
    """Return ``names`` and the names of all other ``nodes`` on the machines of the nodes with these names."""
    listed, given = list(nodes), set(names)
    shared = {_machine(node.labels) for node in listed if node.name in given} - {None}
    return given | {node.name for node in listed if _machine(node.labels) in shared}


@lru_cache(maxsize=4096)
def together(found: Sequence[Machine], nodes: int, chosen: int) -> int:
    """Return how many nodes of a plan run on the same machine: the most on any machine, as far as it is likely.

    Kubernetes does not know machines, so the ``chosen`` nodes of the plan are like drawn at random from all ``nodes``.
    The result is the smallest k with which, at a probability of ``LIKELY``, no machine has more than k of them. The
    number on one machine has a hypergeometric distribution; the machines are treated as independent. ``found``: the
    machines of these nodes. Nodes beyond them have a machine each.
    """
    counts = Counter[int]()
    for machine in found:
        counts[min(machine.nodes, nodes)] += machine.count
    most = min(max(counts, default=1), chosen)
    for k in range(1, most):
        likely = sum(times * log(max(_at_most(k, each, nodes, chosen), 1e-300)) for each, times in counts.items())
        if likely >= log(LIKELY):
            return k
    return max(1, most)


def _at_most(k: int, own: int, nodes: int, chosen: int) -> float:
    """Return the probability that at most ``k`` of ``chosen`` nodes are among the ``own`` nodes of a machine.

    ``nodes``: number of all nodes, of which ``chosen`` are drawn at random without replacement.
    """
    least = max(0, chosen - (nodes - own))
    whole = _log_choose(nodes, chosen)
    terms = range(least, min(k, own, chosen) + 1)
    return min(1.0, sum(exp(_log_choose(own, j) + _log_choose(nodes - own, chosen - j) - whole) for j in terms))


def _log_choose(n: int, k: int) -> float:
    """Return the logarithm of the number of ways to choose ``k`` of ``n`` things."""
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _machine(labels: Mapping[str, str]) -> str | None:
    """Return the name of the machine that ``labels`` give; None if the label is missing or empty."""
    return labels.get(MACHINE_LABEL) or None


def _cores(labels: Mapping[str, str]) -> float | None:
    """Return the value of ``MACHINE_CPU_LABEL``; None if it is missing, or is not a number of cores above 0."""
    try:
        cpu = float(quantity(labels[MACHINE_CPU_LABEL]))
    except (KeyError, ValueError):
        return None
    return cpu if cpu > 0 else None
