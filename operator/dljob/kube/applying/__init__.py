"""Apply the objects of jobs, and apply those again that somebody has changed or deleted."""

from dljob.kube.applying.applier import Applier, has_plan
from dljob.kube.applying.calls import complete_all
from dljob.kube.applying.looks import RECOVERY_RESYNC_S, recovers, within

__all__ = ["RECOVERY_RESYNC_S", "Applier", "complete_all", "has_plan", "recovers", "within"]
