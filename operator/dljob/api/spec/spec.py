"""DLJobSpec: the user's request. ``kubectl explain`` prints the field descriptions."""

from typing import Annotated, Any

from pydantic import Field

from dljob.api.base import ApiModel
from dljob.api.spec.checkpoint import Checkpoint
from dljob.api.spec.dataset import NO_DATASET, Dataset
from dljob.api.spec.goal import Task, Until
from dljob.api.spec.model import NO_MODEL, ModelSpec
from dljob.api.spec.optimizer import Optimizer
from dljob.api.spec.parallelism import (
    ActivationCheckpointing,
    Collective,
    GradientCompression,
    Parallelism,
    Precision,
)
from dljob.api.spec.planning import MAX_NODES, BatchSizeRange, NodeRange, Objective, Planning
from dljob.api.spec.pods import PodTemplateOverride, Resources, RunPolicy, Scheduling, each_once, map_list
from dljob.api.spec.rules.combinations import RULES
from dljob.api.spec.trainer import Trainer


class DLJobSpec(ApiModel):
    """The training to run, its objective, and the limits of its plan."""

    rules = RULES

    model: Annotated[
        ModelSpec,
        Field(
            default_factory=lambda: NO_MODEL,  # A factory, because the CRD would contain a default.
            description="The model to train. Required unless trainer.framework is Torchrun or MPI, or task is set.",
        ),
    ]
    dataset: Annotated[
        Dataset,
        Field(
            default_factory=lambda: NO_DATASET,
            description="The training data. Required unless trainer.framework is Torchrun or MPI.",
        ),
    ]
    task: Annotated[
        Task | None,
        Field(
            description="The task to solve with the data at dataset.uri, in place of model, globalBatchSize, epochs "
            "and trainer.command: a pod of the job looks at the data, chooses the model, and writes the training "
            "script. status.suggestion shows the choice. Then the job is planned and trained as any other."
        ),
    ] = None
    global_batch_size: Annotated[
        int | None,
        Field(
            ge=1,
            le=2**31 - 1,
            description="Samples per step, summed over all ranks. Required unless trainer.framework is Torchrun or "
            "MPI, or task is set.",
        ),
    ] = None
    batch_size_range: Annotated[
        BatchSizeRange | None,
        Field(
            description="Range from which the planner may choose the global batch size. The planner chooses another "
            "size than globalBatchSize only if an earlier run has measured the gradient noise scale, and if this "
            "scale predicts a better objective for the same progress. epochs, steps and learningRate still refer to "
            "globalBatchSize. Default: the job always uses globalBatchSize."
        ),
    ] = None
    epochs: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**6,
            description="Passes over the dataset. Either epochs or steps is required unless trainer.framework is "
            "Torchrun or MPI, or task is set.",
        ),
    ] = None
    steps: Annotated[int | None, Field(ge=1, le=10**12, description="Optimizer steps.")] = None
    until: Annotated[
        Until | None,
        Field(
            description="When to stop before the last step: if a metric reaches a target (reason TargetReached) or, "
            "with patience, if it no longer improves (NoImprovement). The job then writes a checkpoint and is "
            "complete. Default: the job makes all steps."
        ),
    ] = None
    optimizer: Annotated[Optimizer, Field(description="The optimizer and its learning rate.")] = Optimizer()
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="Seed of initialization and sampling.")] = 0
    trainer: Annotated[Trainer, Field(description="Image, command and environment of the training script.")] = Trainer()
    nodes: Annotated[NodeRange, Field(description="How many nodes the job may use.")] = NodeRange()
    devices: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=63)], ...],
        Field(
            max_length=32,
            description="Device types that the plan may use. A device type is the value of the node label "
            "nvidia.com/gpu.product or amd.com/gpu.product-name, or else of dljob.dev/device (cpu without these "
            "labels). Default: all types in the cluster.",
        ),
    ] = ()
    objective: Annotated[Objective, Field(description="Quantity that the plan minimizes, and the deadline.")] = (
        Objective()
    )
    planning: Annotated[Planning, Field(description="Mode of planning, and the plan for mode Fixed.")] = Planning()
    collective: Annotated[
        Collective,
        Field(
            description="All-reduce algorithm for the gradients. Auto: the planner chooses, and ranks that can use "
            "several algorithms measure them when they start and use the fastest. DDP: PyTorch's "
            "DistributedDataParallel reduces the gradients, in buckets of 25 MiB. On GPUs, gradients are reduced with "
            "NCCL: Auto, Torch, Ring, MPI and DDP mean NCCL there, and the others exclude GPUs."
        ),
    ] = Collective.AUTO
    gradient_compression: Annotated[
        GradientCompression | None,
        Field(
            description="Send gradients as 16-bit numbers, with error feedback. Use it on CPUs with slow networks. "
            "Default: no compression."
        ),
    ] = None
    precision: Annotated[
        Precision | None,
        Field(
            description="Number format of forward and backward pass, by autocast. FP32: float32. BF16: bfloat16. FP16: "
            "float16 with loss scaling. Parameters, gradients that ranks exchange, and checkpoints are always float32, "
            "and so are norms and the loss. Strategy Sharded also gathers parameters in this format, so norms with "
            "parameters compute in it. Auto: the precision of the best plan, among those for which all its GPUs "
            "have units; FP32 on CPUs and on GPUs that the catalogue lacks. A training script needs t.autocast() and, "
            "for Auto and FP16, t.grad_scaler(). Default: FP32. With trainer.framework Torchrun, it says in which "
            "format the script computes, for the prediction."
        ),
    ] = None
    activation_checkpointing: Annotated[
        ActivationCheckpointing | None,
        Field(
            description="Activation checkpointing (recomputation): blocks of the model, such as residual blocks or "
            "transformer layers, keep only their inputs for the backward pass, which computes their forward pass "
            "again. This needs less memory and more time; results stay the same. Always: every plan uses it. Auto: the "
            "planner uses it if no plan fits into memory otherwise, or if it makes a better plan. A training script "
            "needs t.checkpoint_activations(model.blocks). Default: Never. With trainer.framework Torchrun, it says "
            "what the script does, for the prediction."
        ),
    ] = None
    parallelism: Annotated[Parallelism, Field(description="Parallelism strategy and synchronization.")] = Parallelism()
    checkpoint: Annotated[Checkpoint, Field(description="How and where checkpoints are saved.")] = Checkpoint()
    suspend: Annotated[
        bool, Field(description="true: write a checkpoint and remove the pods. false: run or resume.")
    ] = False
    run_policy: Annotated[
        RunPolicy, Field(description="Limits on failures and run time, and clean-up after the end.")
    ] = RunPolicy()
    scheduling: Annotated[Scheduling, Field(description="Where and when pods may run.")] = Scheduling()
    resources: Annotated[Resources, Field(description="Resources of one pod.")] = Resources()
    pod_template_overrides: Annotated[
        tuple[PodTemplateOverride, ...],
        Field(
            max_length=16,
            description="Changes to the pod template, one entry for each manager, applied in order.",
            json_schema_extra=map_list("manager"),
        ),
        each_once("manager"),
    ] = ()

    @property
    def batch_size(self) -> int:
        """Return the global batch size as a number that is never None.

        Call this only for jobs that set ``globalBatchSize``. Only jobs with framework Torchrun or MPI may leave it
        unset. An AssertionError is raised for these.
        """
        assert self.global_batch_size is not None, "only a job without a prediction has no global batch size"
        return self.global_batch_size

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of those unset fields without which no run time can be predicted; usually empty.

        The names are model, dataset, globalBatchSize and epochs (which means: neither epochs nor steps is set). Only a
        job with framework Torchrun or MPI may lack any of them.
        """
        found = {
            "model": self.model.given,
            "dataset": self.dataset.given,
            "globalBatchSize": self.global_batch_size is not None,
            "epochs": self.epochs is not None or self.steps is not None,
        }
        return tuple(name for name, given in found.items() if not given)

    @property
    def elastic_script(self) -> bool:
        """Return True if the job is a script for torchrun that may train on any number of nodes in ``nodes``.

        Without a maximum of its own, the job would start on all nodes of the cluster. Without checkpoints, a start with
        fewer nodes gains nothing.
        """
        return bool(self.trainer.elastic) and self.nodes.min < self.nodes.max < MAX_NODES and self.checkpoint.enabled

    def manifest(self) -> dict[str, Any]:
        """Return the spec as a camelCase dictionary for JSON.

        Null fields are left out, and so are ``model`` and ``dataset`` if the job has none.
        """
        missing = {"model": not self.model.given, "dataset": not self.dataset.given}
        return {name: value for name, value in super().manifest().items() if not missing.get(name)}
