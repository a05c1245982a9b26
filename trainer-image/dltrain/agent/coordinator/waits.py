"""What a coordinator waits for before it can launch ranks, as a text for the job's report."""

from collections.abc import Collection, Sequence

from dlcontract import Plan
from dltrain.agent.coordinator.diagnosis import Attempt

SHOWN = 4
"""Maximum number of pods that a text names."""
PREPARE_S = 30.0
"""Seconds for which a pod may prepare a launch before the report says so. Most pods need milliseconds."""


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
        unprepared = [pod for pod in attempt.plan.pods if pod not in prepared]
        if not unprepared or now_s - attempt.started_s <= PREPARE_S:
            return None
        return f"these pods are being prepared, such as by copying checkpoints from a bucket: {_listed(unprepared)}"


def _listed(pods: Sequence[str]) -> str:
    more = f" and {len(pods) - SHOWN} more" if len(pods) > SHOWN else ""
    return f"{', '.join(pods[:SHOWN])}{more}"
