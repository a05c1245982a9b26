"""What a coordinator waits for until all ranks have started: a text for the job's report, and a limit of time."""

from collections.abc import Collection, Sequence

from dlcontract import Failure, Plan, Rank, reasons
from dltrain.agent.coordinator.diagnosis import Attempt

SHOWN = 4
"""Maximum number of pods or ranks that a text names."""
PREPARE_S = 30.0
"""Seconds for which pods may prepare a launch, or ranks start, before the report says so. 1 to 2 s are usual."""

LAUNCH_LIMIT_S = 300.0
"""Maximum seconds from a launch until every rank's process has started. 1 to 2 s are usual. Neither mpirun nor an agent
has such a limit."""


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
        coming = _coming(attempt)
        return f"these ranks have not started: {_shown(coming)}" if coming else None


def launch_failure(attempt: Attempt, now_s: float) -> Failure | None:
    """Return the failure of a launch in which ranks have not started within ``LAUNCH_LIMIT_S``; None without one.

    ``now_s``: time of the monotonic clock. The failure names the first of these ranks and its pod.
    """
    if attempt.over_or_troubled or now_s - attempt.launched_s <= LAUNCH_LIMIT_S:
        return None
    if not (coming := _coming(attempt)):
        return None
    remedy = (
        "Check that the job's pods can reach each other on the ports of their agents and of MPI"
        if attempt.launcher_runs
        else f"The agent of pod {coming[0].pod} answers, but starts no process: check its log, and the volumes and the "
        "node of the pod"
    )
    return Failure(
        reason=reasons.LAUNCH_FAILED,
        message=f"launch: found no process of ranks {_shown(coming)} after {LAUNCH_LIMIT_S:.0f} s; expected that all "
        f"ranks start. {remedy}",
        rank=coming[0].rank,
        host=coming[0].pod,
    )


def _coming(attempt: Attempt) -> list[Rank]:
    """Return the ranks whose process has not started."""
    begun = attempt.up | attempt.ended.keys() | attempt.absent
    return [rank for rank in attempt.plan.ranks if rank.rank not in begun]


def _shown(ranks: Sequence[Rank]) -> str:
    return _listed([f"{rank.rank} ({rank.pod})" for rank in ranks])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
