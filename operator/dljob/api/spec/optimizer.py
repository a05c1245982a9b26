"""``spec.optimizer``: the optimizer and its learning rate."""

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


class RateCurve(StrEnum):
    LOSS = "Loss"
    ACCURACY = "Accuracy"


class LearningRateScaling(ApiModel):
    """How a learning rate for one batch size is scaled to globalBatchSize."""

    rule: Annotated[
        ScalingRule,
        Field(
            description="With S = globalBatchSize / baseBatchSize, Linear multiplies learningRate by S, SquareRoot by "
            "the square root of S, and AdaScale by a gain between 1 and S that it measures from the gradient noise."
        ),
    ]
    base_batch_size: Annotated[int, Field(ge=1, le=2**31 - 1, description="Batch size to which learningRate belongs.")]


class Optimizer(ApiModel):
    rules = (
        Rule(
            "findLearningRate",
            "!has(self.findLearningRate) || !self.findLearningRate || !has(self.learningRateScaling)",
            "findLearningRate cannot be combined with learningRateScaling, because it searches the rate for "
            "globalBatchSize: remove learningRateScaling or findLearningRate",
            lambda o: not o.find_learning_rate or o.learning_rate_scaling is None,
        ),
        Rule(
            "learningRateCurve",
            "!has(self.learningRateCurve) || (has(self.findLearningRate) && self.findLearningRate)",
            "learningRateCurve is the curve of the learning-rate range test: set findLearningRate to true or remove "
            "learningRateCurve",
            lambda o: o.learning_rate_curve is None or o.find_learning_rate,
        ),
    )

    name: Annotated[OptimizerName, Field(description="SGD, Adam or AdamW.")] = OptimizerName.SGD
    learning_rate: Annotated[float, Field(gt=0, le=100, description="Learning rate for the global batch.")] = 0.05
    find_learning_rate: Annotated[
        bool,
        Field(
            description="true: a learning-rate range test before the first step chooses the learning rate. If the "
            "test finds no rate, learningRate is used. Built-in models only."
        ),
    ] = False
    learning_rate_curve: Annotated[
        RateCurve | None,
        Field(
            description="Curve by which findLearningRate chooses. Loss (default): where the training loss falls. "
            "Accuracy: where the accuracy of a classifier rises."
        ),
    ] = None
    learning_rate_scaling: Annotated[
        LearningRateScaling | None,
        Field(
            description="Scaling of a learningRate that is for another batch size than globalBatchSize. Default: no "
            "scaling."
        ),
    ] = None
    momentum: Annotated[float, Field(ge=0, lt=1, description="Momentum, for SGD only.")] = 0.9
    weight_decay: Annotated[
        float, Field(ge=0, le=1, description="L2 penalty (SGD) or decoupled weight decay (AdamW).")
    ] = 0.0
