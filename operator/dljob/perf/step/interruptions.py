"""Time of a training that writes checkpoints, and whose nodes may be interrupted, such as spot nodes.

Interruptions of a node are a Poisson process. After each one, the job starts again from its last checkpoint.
"""

from dataclasses import dataclass

import numpy as np

from dlcontract.checkpoint.interval import BETWEEN_POD_FAULTS_S, FIRST_S, best_interval_s
from dljob.perf.step.communication import Number
from dljob.perf.step.step import P90

RESTART_S = 120.0
"""Assumed seconds from an interruption to the first new step: another node, pods, ranks, and loading the checkpoint."""
CHECKPOINT_BANDWIDTH_Bps = 2e8
"""Assumed bytes per second at which a checkpoint is written. During training, the trainer measures the real time."""
STORE_BANDWIDTH_Bps = 1e8
"""Assumed bytes per second at which a checkpoint is written to an object store, which is not known before the run."""
MAX_EXPONENT = 30.0
"""Maximum exponent in the formulas of ``Interruptions``. A training that can hardly ever end thus has a finite time."""


@dataclass(frozen=True)
class Interruptions:
    """Interruptions of a training, such as the loss of spot nodes, and the checkpoints that limit the lost work.

    ``per_node_h``: interruptions of one node per hour. ``checkpoint_s``: seconds that it takes to write a checkpoint.
    """

    per_node_h: float
    checkpoint_s: float
    interval_s: float | None = None
    """Seconds between checkpoints; None: the trainer chooses this interval."""
    checkpoints: bool = True
    """False if the job writes no checkpoints. Each interruption then loses all training so far."""
    restart_s: float = RESTART_S
    """Seconds from an interruption to the first new step."""

    def expected_s(self, work_s: Number, nodes: Number) -> Number:
        """Return the expected seconds of a training on ``nodes`` nodes that takes ``work_s`` without interruptions.

        With M seconds between interruptions, checkpoints of C seconds every T seconds and restarts of R seconds, the
        time is M e^(R/M) (e^((T + C)/M) - 1) / T for each second of work (Daly 2006, equation 13). Without checkpoints,
        T is the whole work and C is 0. The result is never below ``work_s``, and is ``work_s`` without interruptions.
        """
        if self.per_node_h == 0:
            return work_s
        rate = self._rate(nodes)
        interval_s, cost_s = self._interval_s(work_s, nodes), self.checkpoint_s if self.checkpoints else 0.0
        segment_s = interval_s + cost_s
        exponent = np.minimum(segment_s * rate, MAX_EXPONENT)
        lost = np.expm1(exponent) / exponent * segment_s / interval_s
        return np.asarray(work_s * np.exp(np.minimum(self.restart_s * rate, MAX_EXPONENT)) * lost)

    def written(self, work_s: float, nodes: int) -> float:
        """Return the expected number of checkpoints of a training that takes ``work_s`` seconds without them.

        They are one after each interval, of which the last one comes at the end of the training. If the trainer chooses
        the interval, the first one comes after ``FIRST_S``, and shows the cost. While a checkpoint is being written,
        none begins. The result is 0 if the job writes no checkpoints.
        """
        if not self.checkpoints:
            return 0.0
        if self.interval_s is not None:
            return max(1.0, work_s / max(self.interval_s, self.checkpoint_s))
        later_s = work_s - FIRST_S
        return 1.0 if later_s <= 0 else 1.0 + max(1.0, later_s / max(self._chosen_s(nodes), self.checkpoint_s))

    def expected(self, total_s: float, nodes: int) -> float:
        """Return the expected number of interruptions of a job on ``nodes`` nodes within ``total_s`` seconds."""
        return total_s * float(self._rate(nodes))

    def p90_s(self, work_s: float, nodes: int) -> float:
        """Return the seconds by which the 90th percentile of the time of a training exceeds ``expected_s``.

        Only the number and the time of interruptions are uncertain here; without interruptions, return 0. Each
        interruption loses a time L that is uniform between R and T + R, where R is ``restart_s`` and T is the
        checkpoint interval. The variance of the sum of such losses (compound Poisson) is the expected number of
        interruptions times the mean of L².
        """
        if self.per_node_h == 0:
            return 0.0
        count = self.expected(float(self.expected_s(work_s, nodes)), nodes)
        interval_s = float(self._interval_s(work_s, nodes))
        square = interval_s**2 / 3 + interval_s * self.restart_s + self.restart_s**2
        return P90 * float(np.sqrt(count * square))

    def _rate(self, nodes: Number) -> Number:
        """Return the job's interruptions per second: those of one node times the number of nodes."""
        return np.asarray(self.per_node_h / 3600 * nodes)

    def _interval_s(self, work_s: Number, nodes: Number) -> Number:
        """Return the seconds between checkpoints: the interval in the spec, or the one that the trainer would choose.

        The result is at most ``work_s``, and equal to it without checkpoints.
        """
        if not self.checkpoints:
            return np.maximum(work_s, 1e-9)
        if self.interval_s is not None:
            return np.minimum(self.interval_s, np.maximum(work_s, 1e-9))
        numbers, number_of = np.unique(nodes, return_inverse=True)
        found = np.array([self._chosen_s(n) for n in numbers.tolist()])
        chosen = np.asarray(found[number_of].reshape(np.shape(nodes)), dtype=np.float64)
        return np.minimum(chosen, np.maximum(work_s, 1e-9))

    def _chosen_s(self, nodes: float) -> float:
        """Return the checkpoint interval that the trainer would choose at the start of a job on ``nodes`` nodes.

        It is ``best_interval_s`` of the seconds to write a checkpoint and the mean seconds between interruptions of the
        job. If nodes are never interrupted, pods are assumed to fail every ``BETWEEN_POD_FAULTS_S`` seconds.
        """
        between_s = 3600 / self.per_node_h if self.per_node_h else BETWEEN_POD_FAULTS_S
        return best_interval_s(self.checkpoint_s, between_s / nodes)
