"""Assign devices to all jobs together, and forecast when the waiting ones start."""

from dljob.controller.planning.joint.assigning import Assigning
from dljob.controller.planning.joint.shares import Share, may_not_delay

__all__ = ["Assigning", "Share", "may_not_delay"]
