"""Choose the checkpoint interval from the cost of a checkpoint and the mean time between faults.

``checkpoint/writer.py`` (``due``) compares it with the time since the last checkpoint.

The formula is ``dlcontract.checkpoint.interval.best_interval_s``, with which the planner predicts, too.
"""

from statistics import median

from dlcontract import Plan
from dlcontract.checkpoint.interval import BETWEEN_POD_FAULTS_S, best_interval_s
from dltrain.protocol.rank_messages import AttemptPlan

PRIOR_FAULTS = 0.1
"""Weight of ``BETWEEN_POD_FAULTS_S`` in the estimate, in faults: it counts as a tenth of an observed fault.

The first observed fault of a run therefore outweighs the assumption.
"""
_RECENT = 5
"""Number of recent checkpoints whose median cost determines the interval."""


def between_faults_s(pods: int, faults: int, trained_s: float, interrupted_s: float | None = None) -> float:
    """Return the estimated mean time between faults of a job in seconds, from its faults so far and an assumption.

    ``pods``: number of the job's pods. ``faults``: number of faults in ``trained_s`` seconds of training.
    ``interrupted_s``: mean seconds between interruptions of one pod's node, as the administrator has given it; None:
    unknown.

    The assumption is the mean time between faults of one pod. It is ``interrupted_s``, but at most
    ``BETWEEN_POD_FAULTS_S``, and counts as much as one observed fault, because cloud providers publish this number. If
    ``interrupted_s`` is None, the assumption is ``BETWEEN_POD_FAULTS_S`` and counts only as much as ``PRIOR_FAULTS``
    faults.
    """
    if interrupted_s is not None:
        return (min(interrupted_s, BETWEEN_POD_FAULTS_S) / pods + trained_s) / (1 + faults)
    return (PRIOR_FAULTS * BETWEEN_POD_FAULTS_S / pods + trained_s) / (PRIOR_FAULTS + faults)


class Interval:
    """The checkpoint interval of a run: fixed by the spec, or chosen from measured costs and faults."""

    def __init__(self, plan: Plan) -> None:
        self._plan = AttemptPlan.of(plan)
        self._costs: list[float] = []

    def add_cost(self, cost_s: float) -> None:
        """Record the seconds of training time that a checkpoint cost."""
        self._costs = [*self._costs, cost_s][-_RECENT:]

    def seconds(self, trained_s: float) -> float:
        """Return the seconds from one checkpoint to the next.

        ``trained_s``: seconds of training since the last launch of the ranks, from which the mean time between faults
        is estimated. Return the plan's interval if the plan fixes it, or until the cost of a checkpoint is known.
        """
        plan = self._plan
        if not plan.checkpoint.choose_interval or not self._costs:
            return plan.checkpoint.interval_s
        between_s = between_faults_s(
            len(plan.pods), plan.prior_faults, plan.prior_trained_s + trained_s, plan.checkpoint.interrupted_s
        )
        return best_interval_s(median(self._costs), between_s)
