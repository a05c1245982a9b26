"""The planner: a pure function from a request, a cluster view and learned constants to ``Decision | Infeasible``."""

from dljob.calibrate.learned import Learned, LearnedPoint
from dljob.planner.frameworks import FrameworkPlan, compare
from dljob.planner.plan import plan
from dljob.planner.scaling import scaling
from dljob.planner.types import (
    BatchDecision,
    Batches,
    Choice,
    Decision,
    FixedChoice,
    Group,
    Infeasible,
    Prediction,
    Refusal,
    Request,
    RunningBatch,
    Storage,
    Unsupported,
    VolumeLimit,
)

__all__ = [
    "BatchDecision",
    "Batches",
    "Choice",
    "Decision",
    "FixedChoice",
    "FrameworkPlan",
    "Group",
    "Infeasible",
    "Learned",
    "LearnedPoint",
    "Prediction",
    "Refusal",
    "Request",
    "RunningBatch",
    "Storage",
    "Unsupported",
    "VolumeLimit",
    "compare",
    "plan",
    "scaling",
]
