"""Measured times of steps in a DLProfile, and the constants that are fitted to them."""

from typing import Annotated, Literal

from pydantic import Field

from dljob.api.base import MAX_S, FiniteModel

MAX_EXPONENT = 100.0
MAX_GAMMA = 1e6
MAX_SPLIT_STEPS = 16
"""Maximum number of stored steps of models that ranks divide."""


class ComputePoint(FiniteModel):
    """Measured compute time of one step at one batch size."""

    batch: Annotated[int, Field(ge=1, description="Samples on the device.")]
    seconds: Annotated[float, Field(gt=0, le=MAX_S, description="Mean time of forward, backward and update.")]
    observations: Annotated[int, Field(ge=1, description="Number of measured steps.")] = 1
    cores: Annotated[
        int | None,
        Field(
            ge=1,
            description="CPUs of the rank. Unset: the device is a GPU, or an earlier release that did not store this "
            "number made the measurement.",
        ),
    ] = None
    ranks_per_node: Annotated[
        int, Field(ge=1, description="Ranks that shared a CPU node, and with it the bandwidth of its memory.")
    ] = 1
    machine_nodes: Annotated[
        int,
        Field(ge=1, description="Nodes of the run that shared the cores of a machine (node label dljob.dev/machine)."),
    ] = 1


class ScalingPoint(FiniteModel):
    """Measured time of one step on several devices, without waiting for input data."""

    nodes: Annotated[int, Field(ge=1)]
    node_devices: Annotated[int, Field(ge=1, description="Largest number of the job's devices on one node.")]
    devices: Annotated[int, Field(ge=2)]
    collective: Annotated[str, Field(max_length=32, description="Collective that reduced the gradients.")] = "Ring"
    sharded: Annotated[bool, Field(description="true: the optimizer was sharded (strategy Optimizer).")] = False
    cores: Annotated[
        int | None, Field(ge=1, description="CPUs of each rank. Unset on GPUs, and in points of earlier releases.")
    ] = None
    machine_nodes: Annotated[int, Field(ge=1, description="Nodes of the run that shared the cores of a machine.")] = 1
    batch: Annotated[int, Field(ge=1, description="Samples on the busiest device.")]
    seconds: Annotated[float, Field(gt=0, le=MAX_S, description="Mean time of a step.")]
    observations: Annotated[int, Field(ge=1, description="Number of measured runs.")] = 1


class ScalingConstants(FiniteModel):
    """Constants of steps on several devices, fitted to measured steps; docs/design/0006 has the formulas."""

    sharing: Annotated[
        float,
        Field(
            ge=-MAX_EXPONENT,
            le=MAX_EXPONENT,
            description="Slowdown of devices that share a node. With k devices on a node, computing takes exp(2 (1 - "
            "1/k) sharing) k^crowding times as long as with one device.",
        ),
    ]
    crowding: Annotated[
        float,
        Field(ge=-MAX_EXPONENT, le=MAX_EXPONENT, description="Exponent of k in the formula of the field sharing."),
    ]
    inter_node_seconds: Annotated[
        float, Field(gt=0, le=MAX_S, description="Time to send the gradients once between nodes.")
    ]
    intra_node_seconds: Annotated[
        float, Field(gt=0, le=MAX_S, description="Time to reduce the gradients over two devices of a node.")
    ]
    latency_seconds: Annotated[
        float, Field(gt=0, le=MAX_S, description="Time that each additional device adds to an all-reduce.")
    ]
    overlap_gamma: Annotated[
        float,
        Field(
            ge=1,
            le=MAX_GAMMA,
            description="Overlap of computing and communication. 1: the two times add up. Large values: the longer "
            "time hides the shorter time.",
        ),
    ]
    compute_deviation: Annotated[
        float,
        Field(gt=0, le=MAX_EXPONENT, description="Standard deviation of log(measured / predicted) computing time."),
    ]
    communication_deviation: Annotated[
        float,
        Field(gt=0, le=MAX_EXPONENT, description="Standard deviation of log(measured / predicted) communication time."),
    ]


class NextMeasurement(FiniteModel):
    """The most informative next run: its measurement would reduce the uncertainty about all placements most."""

    nodes: Annotated[int, Field(ge=1)]
    node_devices: Annotated[int, Field(ge=1, description="Devices on each node.")]
    batch: Annotated[int, Field(ge=1, description="Samples on each device.")]


class SplitStep(FiniteModel):
    """Measured time of a step of ranks that each hold a part of the model, without waiting for input data."""

    strategy: Annotated[Literal["Sharded", "Pipeline", "Tensor"], Field(description="Parallelism strategy.")]
    nodes: Annotated[int, Field(ge=1)]
    node_devices: Annotated[int, Field(ge=1, description="Ranks on each node.")]
    cores: Annotated[int | None, Field(ge=1, description="CPUs of each rank. Unset on GPUs.")] = None
    machine_nodes: Annotated[int, Field(ge=1, description="Nodes of the run that shared the cores of a machine.")] = 1
    collective: Annotated[str, Field(max_length=32, description="Collective of the run.")] = "Torch"
    batch: Annotated[int, Field(ge=1, description="Samples in a step of all ranks.")]
    micro_batches: Annotated[int, Field(ge=1)] = 1
    replicas: Annotated[int, Field(ge=1, description="Replicas of the model.")] = 1
    seconds: Annotated[float, Field(gt=0, le=MAX_S, description="Mean time of a step.")]
    observations: Annotated[int, Field(ge=1, description="Number of measured runs.")] = 1
