"""``spec.optimizer``: how parameters are updated."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, Rule


class OptimizerName(StrEnum):
    SGD = "SGD"
    ADAM = "Adam"
    ADAMW = "AdamW"


class ScalingRule(StrEnum):
    LINEAR = "Linear"
    SQUARE_ROOT = "SquareRoot"
    ADA_SCALE = "AdaScale"


class LearningRateScaling(ApiModel):
    """How the learning rate for one batch size becomes that for globalBatchSize."""

    rule: Annotated[
        ScalingRule,
        Field(
            description="With S = globalBatchSize / baseBatchSize: Linear multiplies by S, SquareRoot by its root, "
            "AdaScale by a gain between 1 and S, measured from the noise of the gradients."
        ),
    ]
    base_batch_size: Annotated[int, Field(ge=1, le=2**31 - 1, description="Batch that learningRate is for.")]


class Optimizer(ApiModel):
    rules = (
        Rule(
            "findLearningRate",
            "!has(self.findLearningRate) || !self.findLearningRate || !has(self.learningRateScaling)",
            "findLearningRate finds the rate for globalBatchSize: remove learningRateScaling, or do not search",
            lambda o: not o.find_learning_rate or o.learning_rate_scaling is None,
        ),
    )

    name: Annotated[OptimizerName, Field(description="SGD, Adam or AdamW.")] = OptimizerName.SGD
    learning_rate: Annotated[float, Field(gt=0, le=100, description="Learning rate for the global batch.")] = 0.05
    find_learning_rate: Annotated[
        bool,
        Field(
            description="true: a range test before the first step finds the rate; learningRate is used if it finds "
            "none. Built-in models only."
        ),
    ] = False
    learning_rate_scaling: Annotated[
        LearningRateScaling | None,
        Field(description="learningRate is for another batch than globalBatchSize; default: for globalBatchSize."),
    ] = None
    momentum: Annotated[float, Field(ge=0, lt=1, description="Momentum; SGD only.")] = 0.9
    weight_decay: Annotated[float, Field(ge=0, le=1, description="L2 penalty (SGD) or decoupled decay (AdamW).")] = 0.0
