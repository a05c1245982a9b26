"""How long from one checkpoint to the next: by what one costs and how often training is lost.

A checkpoint every T seconds that costs C takes C / T of the time, and a fault loses T / 2 of it in the mean; with M
seconds between faults the sum C / T + T / (2 M) is least at T = √(2·C·M) (Young 1974), as long as C is far below M.
"""

from math import sqrt
from statistics import median

from dlcontract import CheckpointRef

PRIOR_S = 3.6e6
"""A pod's time between faults before the run has shown any: a thousand hours, the order of what large clusters tell."""
PRIOR_FAULTS = 0.1
"""What that is worth: the first faults of a run outweigh it at once."""
SHORTEST_S, LONGEST_S = 5.0, 1800.0
COST_PART = 0.02
"""Of the training time that checkpoints may take at most, however often there are faults."""
_MEMORY = 5
"""Checkpoints whose median cost counts."""


def between_faults_s(pods: int, faults: int, trained_s: float) -> float:
    """Mean time between faults of a job of so many pods that had so many in ``trained_s`` seconds of training."""
    return (PRIOR_FAULTS * PRIOR_S / pods + trained_s) / (PRIOR_FAULTS + faults)


def best_s(cost_s: float, between_s: float) -> float:
    """√(2·C·M) within bounds; the one of the cost is the last to give way."""
    return max(SHORTEST_S, min(sqrt(2 * cost_s * between_s), LONGEST_S), cost_s / COST_PART)


class Interval:
    """Of a run: as it was given, or chosen from the costs of its checkpoints so far and its faults."""

    def __init__(self, given: CheckpointRef, pods: int) -> None:
        self._given, self._pods = given, pods
        self._costs: list[float] = []

    def paid(self, cost_s: float) -> None:
        """A checkpoint cost the training so long."""
        self._costs = [*self._costs, cost_s][-_MEMORY:]

    def seconds(self, trained_s: float) -> float:
        """After so long in this launch."""
        if not self._given.choose_interval or not self._costs:
            return self._given.interval_s
        between_s = between_faults_s(self._pods, self._given.faults, self._given.trained_s + trained_s)
        return best_s(median(self._costs), between_s)
