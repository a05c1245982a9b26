"""What the planner is asked and what it answers, and how its values read."""

from dlcontract import CollectiveName
from dljob.planner.types.decision import (
    BatchChoice,
    BatchOption,
    Choice,
    Decision,
    Group,
    Infeasible,
    Parallelism,
    Prediction,
    Refusal,
    Strategy,
)
from dljob.planner.types.request import Batches, FixedChoice, Kept, Request

__all__ = [
    "BatchChoice",
    "BatchOption",
    "Batches",
    "Choice",
    "CollectiveName",
    "Decision",
    "FixedChoice",
    "Group",
    "Infeasible",
    "Kept",
    "Parallelism",
    "Prediction",
    "Refusal",
    "Request",
    "Strategy",
]
