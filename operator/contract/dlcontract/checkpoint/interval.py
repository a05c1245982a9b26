"""The time between checkpoints if the spec leaves it open.

The trainer uses this interval, and the planner predicts with it.

A checkpoint of cost C every T seconds takes the fraction C / T of the time. A fault loses T / 2 on average. With M
seconds between faults, the sum C / T + T / (2 M) is minimal at T = √(2·C·M) (Young 1974, Communications of the ACM 17
(9)). Daly (2006, Future Generation Computer Systems 22 (3), equation 13) gives the expected time without the assumption
that C and T are far below M. As long as C is below M / 4, Young's interval takes at most 2 % longer than the best one.
"""

from math import sqrt

SHORTEST_S, LONGEST_S = 5.0, 1800.0
FIRST_S = 60.0
"""Seconds to the first checkpoint, before its cost is known."""
BETWEEN_POD_FAULTS_S = 3.6e6
"""Assumed seconds between faults of one pod before any were observed: a thousand hours, the order of magnitude that
large clusters report."""
COST_FRACTION = 0.02
"""An interval longer than ``LONGEST_S`` is chosen only as far as checkpoints otherwise take more than this fraction of
the time."""


def best_interval_s(cost_s: float, between_s: float) -> float:
    """Return √(2·``cost_s``·``between_s``) in seconds, at least ``SHORTEST_S``.

    ``cost_s``: cost of a checkpoint. ``between_s``: mean time between faults. The result is at most ``LONGEST_S``, or
    ``cost_s / COST_FRACTION`` if that is longer. Nothing else bounds the cost: with frequent faults, a longer interval
    loses more work than it saves.
    """
    return max(SHORTEST_S, min(sqrt(2 * cost_s * between_s), max(LONGEST_S, cost_s / COST_FRACTION)))
