"""Compute the whole desired state of a job (``Desired``) from its observed state (``Observed``).

The package does no I/O and reads no clock: callers pass the time.
"""

from dljob.reconcile.decide import failed, needs_view, reconcile
from dljob.reconcile.desired import Desired, RunMeasurements, RunMemory, Scale, Target, WorkloadChange
from dljob.reconcile.forecasts import CONDITION as DEADLINE
from dljob.reconcile.parsed import ParsedJob, parse_observed, with_secrets
from dljob.reconcile.planning.node_faults import node_faults
from dljob.reconcile.planning.rest import with_pace

__all__ = [
    "DEADLINE",
    "Desired",
    "ParsedJob",
    "RunMeasurements",
    "RunMemory",
    "Scale",
    "Target",
    "WorkloadChange",
    "failed",
    "needs_view",
    "node_faults",
    "parse_observed",
    "reconcile",
    "with_pace",
    "with_secrets",
]
