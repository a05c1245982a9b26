"""Plan a running job again when the cluster has changed: it grows onto free nodes, or shrinks to those that are left.

The condition Resizing stores the state of a move. True:

- BetterPlan: another plan ends the training sooner, the restart included; or with less energy or cost, if the job
  minimizes that. Nodes have become free, or the time to the deadline has changed against the remaining steps.
- DeadlineAtRisk: the job minimizes energy or cost, its plan misses the deadline, and another plan meets it.
- DevicesReassigned: all jobs together gain if this one continues on other or fewer devices (the chart value
  ``queue.assignment: Together``).
- NodesGone: pods find no node for ``spec.scheduling.startTimeout``, and without them the job does not train.

The pods of the old plan write a checkpoint and stop. False:

- Resized: the new plan has replaced the old one.
- NotWorthwhile: the operator found no better plan when it looked last; the message says why.
- Resting: devices are free that the job could use, but it has moved shortly before. The message has the time at which
  it may move again (the chart value ``queue.assignment: Together``).
"""

from dljob.reconcile.planning.resize.move import resize
from dljob.reconcile.planning.resize.permission import (
    CONDITION,
    MIN_RESTARTS_BETWEEN,
    MIN_STEPS,
    lets_move,
    may_grow,
    may_move,
    rests_until,
    undecided,
)

__all__ = [
    "CONDITION",
    "MIN_RESTARTS_BETWEEN",
    "MIN_STEPS",
    "lets_move",
    "may_grow",
    "may_move",
    "resize",
    "rests_until",
    "undecided",
]
