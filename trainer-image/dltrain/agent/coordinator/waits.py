"""What a coordinator waits for before it can launch ranks, as a text for the job's report."""

from collections.abc import Collection, Sequence

from dlcontract import Plan
from dltrain.agent.coordinator.diagnosis import Attempt

SHOWN = 4
"""Maximum number of pods or ranks that a text names."""
PREPARE_S = 30.0
"""Seconds for which pods may prepare a launch, or ranks start, before the report says so. 1 to 2 s are usual."""


class Waits:
    """Collects what pods report about processes that do not end, and describes what the coordinator waits for."""

    def __init__(self) -> None:
        self._lasting: dict[str, str] = {}

    def lasts(self, pod: str, processes: str) -> None:
        """Note that killed ``processes`` of a pod have not ended."""
        self._lasting[pod] = processes

    def ended(self, pod: str) -> None:
        """Note that no process of the previous attempt is left on a pod, or that the pod is gone."""
        self._lasting.pop(pod, None)

    def text(
        self, plan: Plan, attempt: Attempt | None, present: Sequence[str], prepared: Collection[str], now_s: float
    ) -> str | None:
        """Return why ranks cannot start yet; None: there is no reason that a user should know.

        ``attempt``: the launch that is being prepared; None: pods are awaited. ``present``: pods whose agents are
        connected. ``prepared``: pods that are ready to start ranks. ``now_s``: time of the monotonic clock.
        """
        for pod in plan.pods:
            if pod in self._lasting:
                hint = ". A volume or a device does not answer (state D): repair it, or restart the node"
                uninterruptible = "state D" in self._lasting[pod]
                return f"pod {pod}: killed, but not ended: {self._lasting[pod]}{hint if uninterruptible else ''}"
        if attempt is None:
            absent = [pod for pod in plan.pods if pod not in present]
            return f"not connected: {_listed(absent)}" if absent else None
        if now_s - attempt.started_s <= PREPARE_S:
            return None
        if unprepared := [pod for pod in attempt.plan.pods if pod not in prepared]:
            return f"these pods are being prepared, such as by copying checkpoints from a bucket: {_listed(unprepared)}"
        begun = attempt.up | attempt.ended.keys() | attempt.absent
        coming = [f"{rank.rank} ({rank.pod})" for rank in attempt.plan.ranks if rank.rank not in begun]
        return f"these ranks have not started: {_listed(coming)}" if coming else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
