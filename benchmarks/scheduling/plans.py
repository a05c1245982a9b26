"""The plans of the operator's planner for the models of a stream, cached.

Many jobs ask the same question on the same free devices.
"""

from dataclasses import dataclass, field, replace

from benchmarks.scheduling.workload import MODELS

from dljob.cluster import ClusterView
from dljob.planner import Decision, Infeasible, plan
from dljob.planner.types import Choice

Signature = tuple[tuple[str, int], ...]


@dataclass
class Plans:
    """Plans for one step of each model on free devices, cached."""

    made: dict[tuple[str, Signature, tuple[str, ...], int | None], Choice | None] = field(default_factory=dict)

    def of(
        self, model: str, free: ClusterView, devices: tuple[str, ...] = (), most: int | None = None
    ) -> Choice | None:
        """Return the best plan on the free devices. ``devices``: allowed types. ``most``: number of nodes."""
        signature = tuple(sorted((node.device, node.free_devices) for node in free.nodes if node.free_devices))
        key = (model, signature, devices, most)
        if key not in self.made:
            request = replace(MODELS[model], candidates_kept=1, devices=devices, nodes_max=most)
            decision = plan(request, free, {}) if signature else Infeasible("", "", "")
            self.made[key] = decision.chosen if isinstance(decision, Decision) else None
        return self.made[key]


PLANS = Plans()
