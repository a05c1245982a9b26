"""The possible plans of a model on one device type each, predicted by the operator's planner."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dljob.cluster import ClusterView
from dljob.planner import Decision, Request, plan

Pool = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Use:
    """A plan on ``devices`` devices of one type. ``seconds`` and ``energy_J`` are of the whole training."""

    device: str
    devices: int
    nodes: int
    seconds: float
    energy_J: float

    def times(self, steps: int) -> "Use":
        return replace(self, seconds=self.seconds * steps, energy_J=self.energy_J * steps)


def uses(request: Request, pool: Pool, view: Callable[[str, int, int], ClusterView]) -> tuple[Use, ...]:
    """Return the plans for one step on 1, 2, 4, … devices of each type, packed on as few nodes as possible.

    A plan that is slower than another one with fewer devices of its type is left out.
    """
    found: list[Use] = []
    for device, nodes, per_node in pool:
        least = float("inf")
        for count in _counts(nodes, per_node):
            free = view(device, 1, count) if count < per_node else view(device, count // per_node, per_node)
            decision = plan(replace(request, candidates_kept=1, devices=(device,)), free, {})
            if not isinstance(decision, Decision):
                continue
            used = sum(group.nodes * group.ranks_per_node for group in decision.chosen.groups)
            predicted = decision.chosen.prediction
            if used == count and predicted.step_s < least:
                least = predicted.step_s
                found.append(Use(device, used, max(1, count // per_node), least, predicted.energy_J or 0.0))
    return tuple(found)


def _counts(nodes: int, per_node: int) -> list[int]:
    return [n for n in (1, 2, 4) if n < per_node] + [per_node * n for n in range(1, nodes + 1)]


def fastest(found: Iterable[Use]) -> Use:
    return min(found, key=lambda use: use.seconds)
