"""The planner: (request, cluster view, learned constants) → Decision | Infeasible. Pure."""

from dljob.calibrate.learned import Learned, LearnedPoint
from dljob.planner.plan import plan
from dljob.planner.scaling import scaling
from dljob.planner.types import (
    BatchChoice,
    Batches,
    Choice,
    Decision,
    FixedChoice,
    Group,
    Infeasible,
    Kept,
    Prediction,
    Refusal,
    Request,
)

__all__ = [
    "BatchChoice",
    "Batches",
    "Choice",
    "Decision",
    "FixedChoice",
    "Group",
    "Infeasible",
    "Kept",
    "Learned",
    "LearnedPoint",
    "Prediction",
    "Refusal",
    "Request",
    "plan",
    "scaling",
]
