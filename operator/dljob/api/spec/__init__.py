"""The types of ``DLJobSpec``, with one module for each section."""

from dljob.api.spec.checkpoint import Checkpoint, CheckpointVolume, ReclaimPolicy
from dljob.api.spec.dataset import BUILTIN_DATASETS, BuiltinDataset, Dataset
from dljob.api.spec.environment import EnvVar
from dljob.api.spec.model import BUILTIN_MODELS, PAIRED_MODELS, BuiltinModel, ModelHints, ModelSpec, ReferenceModel
from dljob.api.spec.optimizer import LearningRateScaling, Optimizer, OptimizerName, ScalingRule
from dljob.api.spec.parallelism import (
    Collective,
    GradientAccumulation,
    GradientCompression,
    Parallelism,
    ParallelismStrategy,
    Synchronization,
)
from dljob.api.spec.planning import (
    BatchSizeRange,
    FixedGroup,
    Minimize,
    NodeRange,
    Objective,
    Planning,
    PlanningMode,
    Resize,
)
from dljob.api.spec.pods import (
    STARTUP_CONDITIONS,
    ConditionPattern,
    Disruption,
    FailureAction,
    FailureReason,
    FailureRule,
    Metadata,
    PodTemplateOverride,
    Resources,
    RunPolicy,
    Scheduling,
    SpotUse,
    Toleration,
)
from dljob.api.spec.spec import DLJobSpec
from dljob.api.spec.trainer import Framework, PullPolicy, Trainer

__all__ = [
    "BUILTIN_DATASETS",
    "BUILTIN_MODELS",
    "PAIRED_MODELS",
    "STARTUP_CONDITIONS",
    "BatchSizeRange",
    "BuiltinDataset",
    "BuiltinModel",
    "Checkpoint",
    "CheckpointVolume",
    "Collective",
    "ConditionPattern",
    "DLJobSpec",
    "Dataset",
    "Disruption",
    "EnvVar",
    "FailureAction",
    "FailureReason",
    "FailureRule",
    "FixedGroup",
    "Framework",
    "GradientAccumulation",
    "GradientCompression",
    "LearningRateScaling",
    "Metadata",
    "Minimize",
    "ModelHints",
    "ModelSpec",
    "NodeRange",
    "Objective",
    "Optimizer",
    "OptimizerName",
    "Parallelism",
    "ParallelismStrategy",
    "Planning",
    "PlanningMode",
    "PodTemplateOverride",
    "PullPolicy",
    "ReclaimPolicy",
    "ReferenceModel",
    "Resize",
    "Resources",
    "RunPolicy",
    "ScalingRule",
    "Scheduling",
    "SpotUse",
    "Synchronization",
    "Toleration",
    "Trainer",
]
