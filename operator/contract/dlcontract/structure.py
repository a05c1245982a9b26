"""The structure of a training script: the costs of one step, as rank 0 has observed them in its own process."""

from typing import Annotated

from pydantic import Field

from dlcontract.record import Count, Seconds, UntrustedRecord


class Work(UntrustedRecord):
    """The operations of one kind in a step: their number, and what they compute and move."""

    kind: Annotated[str, Field(max_length=32, description="convolution, product, pool or other.")]
    count: Annotated[int, Field(ge=1, le=10**6, description="Number of operations in forward passes.")]
    forward_flops: Annotated[float, Field(ge=0, le=1e27)] = 0.0
    moved_nbytes: Annotated[
        int, Field(ge=0, le=10**18, description="Bytes of activations read and written, in both passes.")
    ] = 0


class HostCalls(UntrustedRecord):
    """What one step asks of the host: updates, calls of functions, and the operators of torch by kind."""

    updates: Annotated[Count, Field(description="Updates by optimizers.")] = 0
    functions: Annotated[Count, Field(description="Calls of Python's own and of built-in functions.")] = 0
    different: Annotated[Count, Field(description="Different functions of Python that were called.")] = 0
    views: Annotated[Count, Field(description="Operators that compute nothing, such as views.")] = 0
    operators: Annotated[Count, Field(description="Operators of no other kind.")] = 0
    products: Annotated[Count, Field(description="Products of matrices, in both passes.")] = 0
    convolutions: Annotated[Count, Field(description="Convolutions, in both passes.")] = 0
    messages: Annotated[Count, Field(description="Collectives of torch.distributed.")] = 0
    distributed: Annotated[
        Count, Field(description="Operators of DTensor, which run others on the parts of this rank.")
    ] = 0
    random: Annotated[Count, Field(description="Random numbers that operators draw, such as those of dropout.")] = 0


class CollectiveCount(UntrustedRecord):
    """The collectives of one kind in a step, among several ranks: their number and their bytes."""

    kind: Annotated[
        str,
        Field(
            max_length=32,
            description="all_reduce, all_gather, reduce_scatter, reduce, broadcast, barrier, gather (also scatter), "
            "all_to_all, or message (send and receive).",
        ),
    ]
    count: Annotated[int, Field(ge=1, le=10**6)]
    nbytes: Annotated[
        int,
        Field(ge=0, le=10**18, description="Bytes of all buffers together. Each counts with the parts of all ranks."),
    ] = 0


class Structure(UntrustedRecord):
    """What one step of a script costs on the observed rank. All counts are of one step of this rank, unless stated."""

    parameters: Annotated[int, Field(ge=1, le=10**15, description="Number of trained parameters of the model.")]
    frozen_nbytes: Annotated[
        int, Field(ge=0, le=10**16, description="Bytes of the parameters of the model that are not trained.")
    ] = 0
    samples: Annotated[int, Field(ge=1, le=10**9, description="Number of samples, over all micro-batches.")]
    sample_nbytes: Annotated[int, Field(ge=0, le=10**15, description="Bytes of a sample.")] = 0
    flops: Annotated[
        float, Field(gt=0, le=1e27, description="Floating-point operations of forward and backward passes.")
    ]
    activation_nbytes: Annotated[
        int,
        Field(
            ge=0, le=10**18, description="The most bytes that forward passes keep at the same time for backward passes."
        ),
    ] = 0
    optimizer_slots: Annotated[
        int, Field(ge=0, le=2, description="Values that the optimizer stores for each parameter.")
    ] = 0
    work: Annotated[tuple[Work, ...], Field(max_length=8, description="Work of the step by kind of operation.")] = ()
    host: Annotated[HostCalls | None, Field(description="Calls of the host in the step. None: not counted.")] = None
    collectives: Annotated[
        tuple[CollectiveCount, ...] | None,
        Field(max_length=16, description="Collectives of torch.distributed in the step by kind. None: not counted."),
    ] = None
    steps: Annotated[Count, Field(description="Steps that this process has made so far.")] = 0
    step_s: Annotated[Seconds | None, Field(description="Median time of the steps so far. None: too few steps.")] = None
    world_size: Annotated[int, Field(ge=1, le=100_000, description="Number of ranks.")] = 1
