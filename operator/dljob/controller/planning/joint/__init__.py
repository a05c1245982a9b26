"""Assign devices to all jobs together, and forecast when the waiting ones start."""

from dljob.controller.planning.joint.assigning import Assigning
from dljob.controller.planning.joint.shares import Share, may_not_delay
from dljob.controller.planning.joint.state import PlanningState

__all__ = ["Assigning", "PlanningState", "Share", "may_not_delay"]
