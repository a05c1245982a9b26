"""``spec.parallelism``, and fields that say how ranks compute and exchange gradients."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, Rule
from dljob.api.compatibility import compatible


class Collective(StrEnum):
    AUTO = "Auto"
    RING = "Ring"
    MPI = "MPI"
    TREE = "Tree"
    BUTTERFLY = "Butterfly"
    HALVING_DOUBLING = "HalvingDoubling"
    PARAMETER_SERVER = "ParameterServer"
    LAYERED_SERVER = "LayeredServer"
    TORCH = "Torch"
    DDP = "DDP"


class GradientCompression(StrEnum):
    BF16 = "BF16"
    FP16 = "FP16"


class Precision(StrEnum):
    AUTO = "Auto"
    FP32 = "FP32"
    BF16 = "BF16"
    FP16 = "FP16"


class ActivationCheckpointing(StrEnum):
    NEVER = "Never"
    AUTO = "Auto"
    ALWAYS = "Always"


class ParallelismStrategy(StrEnum):
    DATA = "Data"
    OPTIMIZER = "Optimizer"
    SHARDED = "Sharded"
    PIPELINE = "Pipeline"
    TENSOR = "Tensor"
    AUTO = "Auto"

    @property
    def splits_model(self) -> bool:
        """Return True for model parallelism (Pipeline, Tensor): each rank holds a part of the model.

        Each rank then processes the whole batch of its replica. Return False for Auto, with which the planner has not
        decided yet.
        """
        return self in (ParallelismStrategy.PIPELINE, ParallelismStrategy.TENSOR)


class GradientAccumulation(StrEnum):
    AUTO = "Auto"
    NEVER = "Never"


class Synchronization(StrEnum):
    SYNCHRONOUS = "Synchronous"
    ASYNCHRONOUS = "Asynchronous"
    STALE_SYNCHRONOUS = "StaleSynchronous"


_ACCUMULATES = (ParallelismStrategy.DATA, ParallelismStrategy.OPTIMIZER, ParallelismStrategy.SHARDED)
_SYNCHRONIZED_STRATEGY = compatible(
    "synchronization", "Asynchronous", "StaleSynchronous", other="strategy", inside="parallelism"
)


class Parallelism(ApiModel):
    rules = (
        Rule(
            "stages",
            "(has(self.strategy) && self.strategy == 'Pipeline') == has(self.stages)",
            "parallelism.stages is for parallelism.strategy Pipeline, which needs it: set both, or set neither",
            lambda p: (p.strategy is ParallelismStrategy.PIPELINE) == (p.stages is not None),
        ),
        Rule(
            "replicas",
            "!has(self.replicas) || self.replicas == 1 || has(self.strategy) && "
            "self.strategy in ['Pipeline', 'Tensor']",
            "parallelism.replicas needs parallelism.strategy Pipeline or Tensor: choose one of them, or remove "
            "replicas (with strategy Auto, the planner chooses their number)",
            lambda p: (p.replicas or 1) == 1 or p.strategy.splits_model,
        ),
        Rule(
            "microBatches",
            "(!has(self.strategy) || self.strategy in ['Data', 'Optimizer', 'Sharded']) && "
            "(!has(self.synchronization) || self.synchronization == 'Synchronous') || "
            "(!has(self.microBatches) || (has(self.strategy) && self.strategy == 'Pipeline'))",
            "microBatches needs strategy Data, Optimizer, Sharded or Pipeline, and synchronization Synchronous: choose "
            "them, or remove microBatches",
            # Pipeline may not be asynchronous either, which another rule says.
            lambda p: (
                p.micro_batches is None
                or p.strategy is ParallelismStrategy.PIPELINE
                or (p.strategy in _ACCUMULATES and not p.asynchronous)
            ),
        ),
        Rule(
            "gradientAccumulation",
            "!has(self.gradientAccumulation) || !has(self.microBatches)",
            "gradientAccumulation lets the planner choose the number of micro-batches, and microBatches fixes it: "
            "remove one of the two",
            lambda p: p.gradient_accumulation is None or p.micro_batches is None,
        ),
        Rule(
            "gradientAccumulation",
            "!has(self.gradientAccumulation) || self.gradientAccumulation == 'Never' || !has(self.strategy) || "
            "self.strategy in ['Data', 'Optimizer', 'Sharded', 'Auto']",
            "gradientAccumulation Auto needs strategy Data, Optimizer, Sharded or Auto, because Pipeline divides "
            "batches: remove gradientAccumulation",
            lambda p: p.gradient_accumulation is not GradientAccumulation.AUTO or not p.strategy.splits_model,
        ),
        Rule(
            "gradientAccumulation",
            "!has(self.gradientAccumulation) || self.gradientAccumulation == 'Never' || "
            "!has(self.synchronization) || self.synchronization == 'Synchronous'",
            "gradientAccumulation Auto needs synchronization Synchronous: remove one of the two",
            lambda p: not p.asynchronous or p.gradient_accumulation is not GradientAccumulation.AUTO,
        ),
        Rule(
            "deferredInit",
            "!has(self.deferredInit) || !self.deferredInit || has(self.strategy) && self.strategy == 'Sharded'",
            "parallelism.deferredInit is for parallelism.strategy Sharded: choose it, or remove deferredInit (Pipeline "
            "and Tensor always create a script's model in parts)",
            lambda p: not p.deferred_init or p.strategy is ParallelismStrategy.SHARDED,
        ),
        Rule(
            "stalenessBound",
            "(has(self.synchronization) && self.synchronization == 'StaleSynchronous') == has(self.stalenessBound)",
            "parallelism.stalenessBound is for parallelism.synchronization StaleSynchronous, which needs it: set both, "
            "or set neither",
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
            description="Data: data parallelism; every rank holds the whole model and updates all parameters. "
            "Optimizer: data parallelism with a sharded optimizer (ZeRO-1); each rank updates a part of the parameters "
            "and stores only that part of the optimizer state. Sharded: fully sharded data parallelism (ZeRO-3) by "
            "PyTorch's fully_shard, for training scripts; each rank stores a part of the parameters, the gradients and "
            "the optimizer state. Pipeline: pipeline parallelism; each rank holds "
            "consecutive layers (one stage). Tensor: tensor parallelism; each rank holds a part of the linear layers. "
            "With these two, a training script creates its model with t.create and runs it with t.run. All give the "
            "same result. Auto: the strategy with the best objective for built-in models, Data for "
            "training scripts. Auto chooses Pipeline or Tensor only if its advantage exceeds the uncertainty of the "
            "prediction, or if no other strategy fits into memory or meets the deadline. With trainer.framework "
            "Torchrun, Data, Optimizer and Sharded say what the script does, for the prediction."
        ),
    ] = ParallelismStrategy.DATA
    stages: Annotated[
        int | None,
        Field(ge=2, le=64, description="Number of pipeline stages, and of the ranks of each replica."),
    ] = None
    replicas: Annotated[
        int | None,
        Field(
            ge=1,
            le=1024,
            description="Number of replicas of the model, with Pipeline and Tensor (default: 1). The ranks of a "
            "replica split the model, and the replicas split each batch, as with data parallelism. The job has stages "
            "times replicas ranks with Pipeline, and with Tensor a multiple of replicas. With Auto, the planner "
            "chooses the number.",
        ),
    ] = None
    micro_batches: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="Number of micro-batches. Pipeline splits the batch of each replica into so many (default: "
            "four times the number of stages, or more if memory needs it); with p stages and k micro-batches, each "
            "stage is idle in p-1 of k+p-1 turns. With Data, Optimizer and Sharded, each rank splits its part of a "
            "batch into so many and accumulates their gradients; a training script needs "
            "t.steps(loader, accumulate=True). Default: see gradientAccumulation. With trainer.framework Torchrun and "
            "MPI, the number that the script has, for the prediction (default: 1).",
        ),
    ] = None
    gradient_accumulation: Annotated[
        GradientAccumulation | None,
        Field(
            description="Auto: the planner may divide each rank's part of a batch into micro-batches with strategies "
            "Data, Optimizer and Sharded, for example if the whole part does not fit into memory; a training script "
            "needs t.steps(loader, accumulate=True). Never: each rank computes its part of a batch at once. Default: "
            "Auto for built-in models, Never for training scripts. Scripts for Torchrun and MPI accumulate gradients "
            "themselves, so this field has no effect on them; microBatches says how many they have."
        ),
    ] = None
    deferred_init: Annotated[
        bool | None,
        Field(
            description="True: with strategy Sharded, the script creates its model with t.create, so that no rank ever "
            "has all of it in main memory. False (default): each rank creates the whole model before it keeps its "
            "part. With trainer.framework Torchrun, true says that ranks create the model on the meta device."
        ),
    ] = None
    synchronization: Annotated[
        Synchronization,
        Field(
            description="Synchronous: all ranks make each step together. Asynchronous (ASP): a parameter server "
            "applies each worker's update when it arrives, and workers do not wait for each other. StaleSynchronous "
            "(SSP): like Asynchronous, but workers are at most stalenessBound steps apart."
        ),
    ] = Synchronization.SYNCHRONOUS
    staleness_bound: Annotated[
        int | None,
        Field(ge=1, le=10**6, description="Steps that the fastest worker may be ahead of the slowest."),
    ] = None

    @property
    def asynchronous(self) -> bool:
        """Return True if workers do not make each step together (Asynchronous or StaleSynchronous)."""
        return self.synchronization is not Synchronization.SYNCHRONOUS
