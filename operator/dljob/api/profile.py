"""DLProfile: what was learned about one model on one device type; written by the operator, kept across jobs."""

from datetime import datetime
from typing import Annotated

from pydantic import ConfigDict, Field

from dljob.api.base import ApiModel

MAX_S = 1e12
"""Above what a report may say (``contract``), and low enough that no sum of such times is beyond all numbers."""
MAX_EXPONENT = 100.0
MAX_GAMMA = 1e6


class ParsedJob(ApiModel):
    """What profiles are made of: finite numbers, also where a file says ``.inf``."""

    model_config = ConfigDict(allow_inf_nan=False)


class ComputePoint(ParsedJob):
    """Measured compute time of one step at one batch size."""

    batch: Annotated[int, Field(ge=1, description="Samples on the device.")]
    seconds: Annotated[float, Field(gt=0, le=MAX_S, description="Mean time of forward, backward and update.")]
    observations: Annotated[int, Field(ge=1, description="Steps behind the figure.")] = 1


class ScalingPoint(ParsedJob):
    """Measured time of one step on several devices, without waiting for data."""

    nodes: Annotated[int, Field(ge=1)]
    node_devices: Annotated[int, Field(ge=1, description="Devices of the job on the node that holds most of them.")]
    devices: Annotated[int, Field(ge=2)]
    collective: Annotated[str, Field(max_length=32, description="What summed the gradients.")] = "Ring"
    sharded: Annotated[bool, Field(description="Whether ranks shared out the update: strategy Optimizer.")] = False
    batch: Annotated[int, Field(ge=1, description="Samples on the busiest device.")]
    seconds: Annotated[float, Field(gt=0, le=MAX_S, description="Mean time of a step.")]
    observations: Annotated[int, Field(ge=1, description="Runs behind the figure.")] = 1


class ScalingConstants(ParsedJob):
    """Constants of steps on several devices, learned from the measured ones; docs/design/0006 has the formulas."""

    sharing: Annotated[
        float,
        Field(
            ge=-MAX_EXPONENT,
            le=MAX_EXPONENT,
            description="k devices on a node slow computing down by exp(2 (1 - 1/k) sharing) k^crowding.",
        ),
    ]
    crowding: Annotated[float, Field(ge=-MAX_EXPONENT, le=MAX_EXPONENT, description="See sharing.")]
    inter_node_seconds: Annotated[float, Field(gt=0, le=MAX_S, description="Moving the gradients once between nodes.")]
    intra_node_seconds: Annotated[float, Field(gt=0, le=MAX_S, description="Summing them over two devices of a node.")]
    latency_seconds: Annotated[float, Field(gt=0, le=MAX_S, description="What each further device adds to summing.")]
    overlap_gamma: Annotated[
        float,
        Field(ge=1, le=MAX_GAMMA, description="1: computing and communication add up; large: the longer one counts."),
    ]
    compute_deviation: Annotated[
        float,
        Field(gt=0, le=MAX_EXPONENT, description="Standard deviation of log(measured / predicted) computing time."),
    ]
    communication_deviation: Annotated[float, Field(gt=0, le=MAX_EXPONENT, description="The same of communication.")]


class NextMeasurement(ParsedJob):
    """Where to run next: what it takes there would say most about all places."""

    nodes: Annotated[int, Field(ge=1)]
    node_devices: Annotated[int, Field(ge=1, description="Devices on each node.")]
    batch: Annotated[int, Field(ge=1, description="Samples on each device.")]


class NoiseScale(ParsedJob):
    """The gradient noise scale: the global batch at which noise is half of the gradient; what batchSizeRange needs."""

    data: Annotated[str, Field(max_length=253, description="What it was measured on: a dataset, or a URI's digest.")]
    samples: Annotated[float, Field(gt=0, le=1e15, description="The noise scale; a mean over runs, and within each.")]
    steps: Annotated[int, Field(ge=1, description="Measured steps behind the figure.")]
    runs: Annotated[int, Field(ge=1, description="Runs behind the figure.")] = 1


class DLProfileSpec(ParsedJob):
    model: Annotated[str, Field(description="Model, as spec.model.name or a digest of the user's program.")]
    device: Annotated[str, Field(description="Device type.")]


class DLProfileStatus(ParsedJob):
    compute: Annotated[tuple[ComputePoint, ...], Field(max_length=64, description="Measured compute times.")] = ()
    scaling: Annotated[
        tuple[ScalingPoint, ...], Field(max_length=64, description="Measured steps on several devices.")
    ] = ()
    constants: ScalingConstants | None = None
    next_measurement: Annotated[
        NextMeasurement | None,
        Field(
            description="What to measure next on several devices to know all places of up to twice as many nodes best; "
            "none once five are known."
        ),
    ] = None
    noise_scale: Annotated[
        NoiseScale | None, Field(description="The gradient's, whatever the device; none before a run on two ranks.")
    ] = None
    fetch_seconds_per_sample: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_S,
            description="Reading, decoding and batching a sample, by whoever did; a step feels what of it does not fit "
            "beside computing.",
        ),
    ] = None
    link_latency_seconds: Annotated[
        float | None, Field(ge=0, le=MAX_S, description="Latency (alpha) of a message.")
    ] = None
    link_bandwidth_bytes_per_second: Annotated[
        float | None, Field(gt=0, description="Effective bandwidth (1/beta) between ranks.")
    ] = None
    observed_jobs: Annotated[int, Field(ge=0, description="Runs that taught this profile.")] = 0
    updated: datetime | None = None


class DLProfile(ParsedJob):
    spec: DLProfileSpec
    status: DLProfileStatus = DLProfileStatus()
