"""Observed → Desired: the whole of a job's desired state from what is observed. Pure: no clock, no I/O."""

from dljob.reconcile.decide import needs_view, reconcile
from dljob.reconcile.desired import Desired, RunMeasurements, Scale, Target

__all__ = ["Desired", "RunMeasurements", "Scale", "Target", "needs_view", "reconcile"]
