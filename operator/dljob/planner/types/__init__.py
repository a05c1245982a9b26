"""Request and result types of the planner, and the text forms of their values."""

from dlcontract import CollectiveName
from dljob.planner.types.decision import (
    Basis,
    BatchDecision,
    BatchOption,
    Choice,
    Decision,
    Group,
    Infeasible,
    Parallelism,
    PowerLimit,
    Prediction,
    Refusal,
    Strategy,
    Unsupported,
)
from dljob.planner.types.request import Batches, FixedChoice, Request, RunningBatch
from dljob.planner.types.storage import Storage, VolumeLimit

__all__ = [
    "Basis",
    "BatchDecision",
    "BatchOption",
    "Batches",
    "Choice",
    "CollectiveName",
    "Decision",
    "FixedChoice",
    "Group",
    "Infeasible",
    "Parallelism",
    "PowerLimit",
    "Prediction",
    "Refusal",
    "Request",
    "RunningBatch",
    "Storage",
    "Strategy",
    "Unsupported",
    "VolumeLimit",
]
