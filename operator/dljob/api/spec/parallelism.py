"""``spec.parallelism``, ``spec.collective`` and ``spec.gradientCompression``: what ranks split and how they sum."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, Rule
from dljob.api.spec.compatibility import compatible


class Collective(StrEnum):
    AUTO = "Auto"
    RING = "Ring"
    MPI = "MPI"
    TREE = "Tree"
    BUTTERFLY = "Butterfly"
    HALVING_DOUBLING = "HalvingDoubling"
    PARAMETER_SERVER = "ParameterServer"
    TORCH = "Torch"


class GradientCompression(StrEnum):
    BF16 = "BF16"
    FP16 = "FP16"


class ParallelismStrategy(StrEnum):
    DATA = "Data"
    OPTIMIZER = "Optimizer"
    PIPELINE = "Pipeline"
    TENSOR = "Tensor"
    AUTO = "Auto"

    @property
    def splits_model(self) -> bool:
        """Whether ranks hold parts of the model and each sees the whole batch."""
        return self in (ParallelismStrategy.PIPELINE, ParallelismStrategy.TENSOR)


class Synchronization(StrEnum):
    SYNCHRONOUS = "Synchronous"
    ASYNCHRONOUS = "Asynchronous"
    STALE_SYNCHRONOUS = "StaleSynchronous"


_SYNCHRONIZED_STRATEGY = compatible(
    "synchronization", "Asynchronous", "StaleSynchronous", other="strategy", inside="parallelism"
)


class Parallelism(ApiModel):
    rules = (
        Rule(
            "stages",
            "(has(self.strategy) && self.strategy == 'Pipeline') == has(self.stages)",
            "strategy Pipeline needs stages, and stages need strategy Pipeline: set both or neither",
            lambda p: (p.strategy is ParallelismStrategy.PIPELINE) == (p.stages is not None),
        ),
        Rule(
            "microBatches",
            "!has(self.microBatches) || (has(self.strategy) && self.strategy == 'Pipeline')",
            "microBatches are for strategy Pipeline: choose it, or remove them",
            lambda p: p.micro_batches is None or p.strategy is ParallelismStrategy.PIPELINE,
        ),
        Rule(
            "stalenessBound",
            "(has(self.synchronization) && self.synchronization == 'StaleSynchronous') == has(self.stalenessBound)",
            "StaleSynchronous needs stalenessBound, and stalenessBound needs StaleSynchronous: set both or neither",
            lambda p: (p.synchronization is Synchronization.STALE_SYNCHRONOUS) == (p.staleness_bound is not None),
        ),
        Rule(
            "synchronization",
            _SYNCHRONIZED_STRATEGY.cel,
            "synchronization Asynchronous and StaleSynchronous need strategy Data: remove one of the two",
            _SYNCHRONIZED_STRATEGY.holds,
        ),
    )

    strategy: Annotated[
        ParallelismStrategy,
        Field(
            description="Data: every rank updates all parameters. Optimizer: each updates a part and keeps optimizer "
            "state for it alone. Pipeline: each holds some of the layers, one stage. Tensor: each holds a part of the "
            "linear layers. The result is the same. Auto: whichever serves the objective best, for built-in models; a "
            "program gets Data. Pipeline and Tensor only where they are better by more than what is uncertain, or "
            "nothing else fits or meets the deadline."
        ),
    ] = ParallelismStrategy.DATA
    stages: Annotated[
        int | None,
        Field(ge=2, le=64, description="Stages of a Pipeline: the job has as many ranks."),
    ] = None
    micro_batches: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="Parts of the batch that follow each other through a Pipeline; default: four times the stages. "
            "Of p stages and k parts, p-1 of k+p-1 turns are idle.",
        ),
    ] = None
    synchronization: Annotated[
        Synchronization,
        Field(
            description="Synchronous: all ranks make each step together. Asynchronous: a parameter server applies each "
            "worker's update as it comes, nobody waits. StaleSynchronous: the same, with workers at most "
            "stalenessBound steps apart."
        ),
    ] = Synchronization.SYNCHRONOUS
    staleness_bound: Annotated[
        int | None,
        Field(ge=1, le=10**6, description="Steps that the fastest worker may be ahead of the slowest."),
    ] = None

    @property
    def asynchronous(self) -> bool:
        """Whether workers are at steps of their own."""
        return self.synchronization is not Synchronization.SYNCHRONOUS
