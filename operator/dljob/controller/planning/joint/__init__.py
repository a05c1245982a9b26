"""Assign devices to all jobs together, and forecast when the waiting ones start."""

from dljob.controller.planning.joint.assigning import Assigning
from dljob.controller.planning.joint.shares import Share, not_passed_over

__all__ = ["Assigning", "Share", "not_passed_over"]
