"""The parts of a DLProfile that runs of a training script have shown: the costs of a step, and the memory of pods."""

from typing import Annotated

from pydantic import Field

from dlcontract import MAX_PARTS, MAX_POD_NBYTES
from dljob.api.base import MAX_S, FiniteModel

MAX_MEMORY = 8
"""Maximum number of stored memory measurements of a script on a device type."""


class ObservedWork(FiniteModel):
    """Operations of one kind in a step of a script."""

    kind: Annotated[str, Field(max_length=32, description="convolution, product, pool or other.")]
    count: Annotated[int, Field(ge=1, le=10**6, description="Number of operations in the forward pass.")]
    forward_flops_per_sample: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    moved_bytes_per_sample: Annotated[
        float, Field(ge=0, le=1e18, description="Bytes of activations that both passes read and write.")
    ] = 0.0


Calls = Annotated[int, Field(ge=0, le=2**53)]


class ObservedHostCalls(FiniteModel):
    """What a step of a script asks of the host: updates, calls of functions, and operators by kind."""

    updates: Calls = 0
    functions: Annotated[Calls, Field(description="Calls of Python's own and of built-in functions.")] = 0
    different: Annotated[Calls, Field(description="Different functions of Python that were called.")] = 0
    views: Annotated[Calls, Field(description="Operators that compute nothing, such as views.")] = 0
    operators: Annotated[Calls, Field(description="Operators of no other kind.")] = 0
    products: Annotated[Calls, Field(description="Products of matrices, in both passes.")] = 0
    convolutions: Annotated[Calls, Field(description="Convolutions, in both passes.")] = 0
    messages: Annotated[Calls, Field(description="Collectives of torch.distributed.")] = 0
    distributed: Annotated[
        Calls, Field(description="Operators of DTensor, which run others on the parts of a rank.")
    ] = 0
    random: Annotated[Calls, Field(description="Random numbers that operators draw, such as those of dropout.")] = 0


class ObservedCollectives(FiniteModel):
    """Collectives of one kind in a step of a script."""

    kind: Annotated[
        str,
        Field(
            max_length=32,
            description="all_reduce, all_gather, reduce_scatter, reduce, broadcast, barrier, gather, "
            "all_to_all or message.",
        ),
    ]
    count: Annotated[int, Field(ge=1, le=10**6, description="Number of collectives.")]
    total_bytes: Annotated[
        int, Field(ge=0, le=10**18, description="Bytes of all their buffers. Each has the parts of all ranks.")
    ] = 0


class ObservedStructure(FiniteModel):
    """Costs of a step of a script that no spec describes, as rank 0 of a run showed them."""

    parameters: Annotated[int, Field(ge=1, le=10**15, description="Number of trained parameters.")]
    frozen_bytes: Annotated[
        int, Field(ge=0, le=10**16, description="Bytes of the parameters that are not trained.")
    ] = 0
    flops_per_sample: Annotated[
        float, Field(gt=0, le=1e18, description="Floating-point operations of one forward and backward pass.")
    ]
    activation_bytes_per_sample: Annotated[
        float, Field(ge=0, le=1e18, description="Bytes of activations that one sample needs for the backward pass.")
    ] = 0.0
    sample_bytes: Annotated[float, Field(ge=0, le=1e15, description="Bytes of a sample.")] = 0.0
    batch: Annotated[int, Field(ge=1, le=10**9, description="Samples of the rank in a step.")]
    optimizer_slots: Annotated[
        int, Field(ge=0, le=2, description="Values that the optimizer stores for each parameter.")
    ] = 0
    work: Annotated[tuple[ObservedWork, ...], Field(max_length=8, description="Operations by kind.")] = ()
    host_calls: Annotated[
        ObservedHostCalls | None, Field(description="Calls of the host in a step. Unset: not counted.")
    ] = None
    collectives: Annotated[
        tuple[ObservedCollectives, ...] | None,
        Field(max_length=16, description="Collectives of torch.distributed in a step by kind. Unset: not counted."),
    ] = None
    nodes: Annotated[int, Field(ge=1, description="Nodes of the run.")] = 1
    ranks_per_node: Annotated[int, Field(ge=1)] = 1
    cores: Annotated[int | None, Field(ge=1, description="CPUs of each rank. Unset on GPUs.")] = None
    step_seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=MAX_S,
            description="Median time of a step, of the first steps until the run is complete. Unset if its devices are "
            "of several types, or if it was restarted.",
        ),
    ] = None
    steps: Annotated[
        int, Field(ge=0, le=2**53, description="Steps of the whole training. 0: unknown, such as after a restart.")
    ] = 0


Nbytes = Annotated[int, Field(ge=1, le=MAX_POD_NBYTES)]


class MeasuredSplit(FiniteModel):
    """How the ranks of runs split the model, and the main memory that ranks with each part needed."""

    parts: Annotated[int, Field(ge=2, le=10**5, description="Ranks of each replica of the model.")]
    replicas: Annotated[int, Field(ge=1, le=10**5)] = 1
    micro_batches: Annotated[int, Field(ge=1, le=4096)] = 1
    checkpoints: Annotated[bool, Field(description="True if the runs wrote checkpoints.")] = True
    part_bytes: Annotated[
        tuple[Nbytes, ...],
        Field(
            max_length=MAX_PARTS,
            description="The most memory that a rank with each part needed: pipeline stages or tensor-parallel ranks, "
            "in their order. Empty: not measured.",
        ),
    ] = ()


class MeasuredMemory(FiniteModel):
    """Main memory of the pods of a training script in runs with equal ranks per pod, batch, strategy and split."""

    ranks: Annotated[int, Field(ge=1, le=4096, description="Ranks in the pod.")]
    batch: Annotated[
        int | None,
        Field(
            ge=1,
            description="Largest local batch size in the pod; with gradient accumulation, of a micro-batch. Unset: "
            "the script decides it.",
        ),
    ] = None
    strategy: Annotated[str, Field(max_length=32, description="Parallelism strategy of the runs.")] = "Data"
    peak_bytes: Annotated[
        Nbytes | None,
        Field(
            description="The most memory that a pod needed, without page cache that the kernel can drop. Each complete "
            "run that needed less lowers it by at most a tenth. Unset: not measured."
        ),
    ] = None
    sufficient_bytes: Annotated[
        Nbytes | None,
        Field(description="Least memory of a pod with which a run was complete. Unset: no run was."),
    ] = None
    insufficient_bytes: Annotated[
        Nbytes | None,
        Field(
            description="Most memory of a pod with which pods reached their memory limit and a job failed, since the "
            "last complete run. Unset: no job failed."
        ),
    ] = None
    split: Annotated[MeasuredSplit | None, Field(description="Unset: each rank had the whole model.")] = None
