"""DLJobSpec: what a user asks for. Field descriptions are what ``kubectl explain`` prints."""

from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel
from dljob.api.spec.checkpoint import Checkpoint
from dljob.api.spec.dataset import Dataset
from dljob.api.spec.model import ModelSpec
from dljob.api.spec.optimizer import Optimizer
from dljob.api.spec.parallelism import Collective, GradientCompression, Parallelism
from dljob.api.spec.planning import BatchSizeRange, NodeRange, Objective, Planning
from dljob.api.spec.pods import PodTemplateOverride, Resources, RunPolicy, Scheduling, map_list
from dljob.api.spec.rules import RULES
from dljob.api.spec.trainer import Trainer


class DLJobSpec(ApiModel):
    """What to train, by when, and within which bounds."""

    rules = RULES

    model: Annotated[ModelSpec, Field(description="What to train.")]
    dataset: Annotated[Dataset, Field(description="What to train on.")]
    global_batch_size: Annotated[int, Field(ge=1, le=2**31 - 1, description="Samples per step, over all ranks.")]
    batch_size_range: Annotated[
        BatchSizeRange | None,
        Field(
            description="The planner may choose another batch than globalBatchSize within this range, where the "
            "gradient's noise scale, once a run has measured it, promises the same progress sooner (or for less, as "
            "objective says). epochs, steps and learningRate remain those for globalBatchSize. Default: no choice."
        ),
    ] = None
    epochs: Annotated[int | None, Field(ge=1, le=10**6, description="Passes over the dataset.")] = None
    steps: Annotated[int | None, Field(ge=1, le=10**12, description="Optimizer steps.")] = None
    optimizer: Annotated[Optimizer, Field(description="How parameters are updated.")] = Optimizer()
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="Seed of initialization and sampling.")] = 0
    trainer: Annotated[Trainer, Field(description="The program that trains.")] = Trainer()
    nodes: Annotated[NodeRange, Field(description="How many nodes the job may use.")] = NodeRange()
    devices: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=63)], ...],
        Field(
            max_length=32,
            description="Device types the plan may use, as nodes are labelled: nvidia.com/gpu.product, or "
            "dljob.dev/device for nodes without GPUs (no label: cpu). Default: all the cluster has.",
        ),
    ] = ()
    objective: Annotated[Objective, Field(description="What the plan is to achieve.")] = Objective()
    planning: Annotated[Planning, Field(description="Who plans.")] = Planning()
    collective: Annotated[
        Collective, Field(description="How gradients are summed over ranks; Auto: as is fastest when the ranks start.")
    ] = Collective.AUTO
    gradient_compression: Annotated[
        GradientCompression | None,
        Field(
            description="Send gradients in 16 bits a number, with error feedback; for slow networks, on CPUs. "
            "Default: as they are."
        ),
    ] = None
    parallelism: Annotated[Parallelism, Field(description="What ranks share out besides the batch.")] = Parallelism()
    checkpoint: Annotated[Checkpoint, Field(description="How training state is kept.")] = Checkpoint()
    suspend: Annotated[bool, Field(description="true: checkpoint and remove the pods; false: run or resume.")] = False
    run_policy: Annotated[RunPolicy, Field(description="Limits and clean-up.")] = RunPolicy()
    scheduling: Annotated[Scheduling, Field(description="Where pods may run.")] = Scheduling()
    resources: Annotated[Resources, Field(description="Resources of one pod.")] = Resources()
    pod_template_overrides: Annotated[
        tuple[PodTemplateOverride, ...],
        Field(
            max_length=16,
            description="Changes to the pod template, one entry per manager, applied in order.",
            json_schema_extra=map_list("manager"),
        ),
    ] = ()
