"""DLProfile: measurements of one model on one device type, or of the hardware itself. It outlives jobs."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from dljob.api.base import MAX_S, FiniteModel
from dljob.api.profiles.script import MAX_MEMORY, MeasuredMemory, ObservedStructure
from dljob.api.profiles.steps import (
    MAX_EXPONENT,
    MAX_SPLIT_STEPS,
    ComputePoint,
    NextMeasurement,
    ScalingConstants,
    ScalingPoint,
    SplitStep,
)

MAX_NOTE = 512
MAX_LINKS = 32


class NoiseScale(FiniteModel):
    """The gradient noise scale: the batch size at which noise and gradient are equally large, for batchSizeRange."""

    data: Annotated[
        str, Field(max_length=253, description="Dataset of the measurement: its name, or the digest of its URI.")
    ]
    samples: Annotated[
        float,
        Field(
            gt=0,
            le=1e15,
            description="The gradient noise scale in samples, averaged over the steps of each run and over runs.",
        ),
    ]
    steps: Annotated[int, Field(ge=1, description="Number of measured steps.")]
    runs: Annotated[int, Field(ge=1, description="Number of measured runs.")] = 1


class ProbedStep(FiniteModel):
    """Measured training step of one of the probe's small networks."""

    net: Annotated[str, Field(max_length=96)]
    batch: Annotated[int, Field(ge=1)]
    cores: Annotated[int, Field(ge=1)] = 1
    seconds: Annotated[float, Field(gt=0, le=MAX_S)]
    precision: Annotated[
        Literal["FP32", "BF16", "FP16"], Field(description="Number format of forward and backward pass.")
    ] = "FP32"


class ProbedLink(FiniteModel):
    """Measured latency and bandwidth of messages between two processes."""

    latency_seconds: Annotated[float, Field(gt=0, le=MAX_S)]
    bandwidth_bytes_per_second: Annotated[float, Field(gt=0)]
    measured: Annotated[
        datetime | None,
        Field(
            description="Time of the measurement of a link between nodes. The operator measures the link again if this "
            "is unset, or earlier than status.updated."
        ),
    ] = None


class HardwareFactors(FiniteModel):
    """Measured time divided by the time that the data sheet predicts, for each part of a step."""

    host: Annotated[float, Field(gt=0, description="Overhead of the framework.")] = 1.0
    convolution: Annotated[float, Field(gt=0, description="Arithmetic of convolutions.")] = 1.0
    product: Annotated[float, Field(gt=0, description="Arithmetic of matrix products.")] = 1.0
    half: Annotated[float, Field(gt=0, description="Arithmetic on units for 16-bit numbers.")] = 1.0
    activation: Annotated[float, Field(gt=0, description="Memory traffic of activations.")] = 1.0
    weight: Annotated[float, Field(gt=0, description="Memory traffic of parameters and optimizer state.")] = 1.0


Factor = Annotated[float, Field(gt=0, le=1e6)]
MedianError = Annotated[
    float | None,
    Field(ge=0, le=1e6, description="Median of |predicted / measured - 1| over networks that the fit did not see."),
]


class ProbedRanks(FiniteModel):
    """Random networks that the probe trained on a number of ranks of one node, each on one core."""

    ranks: Annotated[int, Field(ge=1, le=10_000, description="Number of ranks.")]
    networks: Annotated[int, Field(ge=0, le=10**6, description="Number of measured networks.")]
    error: Annotated[
        MedianError, Field(description="Median error of the steps of networks that the fit did not see.")
    ] = None
    watts: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="Median power of the node's CPU packages due to these ranks. Unset: not measured, because no "
            "counter (RAPL) is readable.",
        ),
    ] = None


class RefittedRegression(FiniteModel):
    """The structure regression of a CPU type, refitted to random networks (dljob probe --structures)."""

    networks: Annotated[int, Field(ge=1, le=10**6, description="Number of measured networks.")]
    time_factors: Annotated[
        dict[str, Factor],
        Field(
            max_length=16,
            description="Measured time divided by the constant, for each term of a step. Empty: the factors of the "
            "reference networks predict unseen networks better.",
        ),
    ] = {}
    memory_factors: Annotated[
        dict[str, Factor],
        Field(
            max_length=16,
            description="Measured memory divided by the constant, for each term of a rank's memory. Empty: the "
            "constants predict unseen networks better.",
        ),
    ] = {}
    time_error: MedianError = None
    time_error_before: Annotated[MedianError, Field(description="The same without this fit.")] = None
    memory_error: MedianError = None
    memory_error_before: Annotated[MedianError, Field(description="The same without this fit.")] = None
    on_ranks: Annotated[
        tuple[ProbedRanks, ...], Field(max_length=8, description="Errors and power by the number of ranks of a node.")
    ] = ()
    fits_ranks: Annotated[
        bool,
        Field(
            description="True if steps on several ranks, without communication, count in the fit. They do if those "
            "of networks that it did not see are then predicted better, and steps on one core no worse."
        ),
    ] = False


class HardwareProfile(FiniteModel):
    """Measured hardware of a device type. Plans use it in place of data sheets until a run has measured the model."""

    origin: Annotated[str, Field(max_length=32, description="Source of the measurements: probe.")] = "probe"
    kind: Literal["cpu", "gpu"] = "cpu"
    product: Annotated[str, Field(max_length=96, description="Name of the processor or GPU.")] = ""
    node: Annotated[str, Field(max_length=253, description="Node on which the probe ran.")] = ""
    cores: Annotated[float, Field(gt=0, description="CPUs that the probe could use.")] = 1.0
    node_cores: Annotated[int, Field(ge=1, description="CPUs of the node.")] = 1
    kernel: Annotated[str, Field(max_length=96)] = ""
    driver: Annotated[str, Field(max_length=96, description="Version of the GPU's driver.")] = ""
    torch: Annotated[str, Field(max_length=96, description="Version of PyTorch.")] = ""
    factors: HardwareFactors = HardwareFactors()
    regression: Annotated[
        RefittedRegression | None,
        Field(description="Regression over random networks. It takes precedence over the factors."),
    ] = None
    deviation: Annotated[
        float,
        Field(ge=0, le=MAX_EXPONENT, description="Standard deviation of log(measured / fitted) over steps."),
    ] = 0.0
    serial_fraction: Annotated[
        float | None, Field(ge=0, le=1, description="Part of the arithmetic that more cores do not speed up.")
    ] = None
    memory_cores: Annotated[
        float | None, Field(gt=0, description="Number of cores that use the whole memory bandwidth of the node.")
    ] = None
    memory_bytes_per_second: Annotated[
        float | None, Field(gt=0, description="Bandwidth of copies by one core, or by a GPU.")
    ] = None
    disk_read_bytes_per_second: Annotated[
        float | None,
        Field(gt=0, description="Rate of reads that bypass the page cache. Unset if the file system allows none."),
    ] = None
    disk_write_bytes_per_second: Annotated[float | None, Field(gt=0)] = None
    node_link: Annotated[ProbedLink | None, Field(description="Link between two MPI ranks on one node.")] = None
    network_link: Annotated[ProbedLink | None, Field(description="TCP link between two pods on different nodes.")] = (
        None
    )
    links_to: Annotated[
        dict[str, ProbedLink], Field(max_length=MAX_LINKS, description="TCP links to nodes of other types, by type.")
    ] = {}
    crowded: Annotated[
        float, Field(ge=1, description="Elapsed time of steps on one core, divided by their CPU time.")
    ] = 1.0
    background_cores: Annotated[
        float | None,
        Field(
            ge=0,
            description="CPUs that other processes of the machine used while the probe ran, such as daemons and other "
            "pods. Plans leave these CPUs to them. Unset: not measured.",
        ),
    ] = None
    steps: Annotated[tuple[ProbedStep, ...], Field(max_length=48, description="Measured steps.")] = ()
    notes: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_NOTE)], ...],
        Field(max_length=8, description="What was not measured, and why."),
    ] = ()


class RepeatedRuns(FiniteModel):
    """How far the computing times of runs were from those of earlier equal runs."""

    runs: Annotated[int, Field(ge=1, description="Number of runs that repeated an earlier one. At most 20 count.")]
    deviation: Annotated[
        float, Field(ge=0, le=MAX_EXPONENT, description="Root mean square of log(time / earlier time).")
    ]


class DLProfileSpec(FiniteModel):
    model: Annotated[
        str,
        Field(
            description="Model: spec.model.name, or a digest of the training script. hardware: the device itself, for "
            "plans of models that were never measured."
        ),
    ]
    device: Annotated[str, Field(description="Device type.")]
    namespace: Annotated[
        str | None,
        Field(
            max_length=63,
            description="Namespace of the jobs whose measurements are in this profile. Only plans of this namespace "
            "use the profile. Unset: plans of all namespaces use the profile. The operator writes profiles without a "
            "namespace if the administrator shares profiles.",
        ),
    ] = None


class DLProfileStatus(FiniteModel):
    compute: Annotated[tuple[ComputePoint, ...], Field(max_length=64, description="Measured compute times.")] = ()
    scaling: Annotated[
        tuple[ScalingPoint, ...], Field(max_length=64, description="Measured steps on several devices.")
    ] = ()
    split_steps: Annotated[
        tuple[SplitStep, ...] | None,
        Field(
            max_length=MAX_SPLIT_STEPS,
            description="Measured steps of runs whose ranks each held a part of the model. Unset: none.",
        ),
    ] = None
    constants: ScalingConstants | None = None
    next_measurement: Annotated[
        NextMeasurement | None,
        Field(
            description="The run on several devices that would most reduce the uncertainty of predictions for up to "
            "twice the largest measured number of nodes. Unset once five placements are measured."
        ),
    ] = None
    noise_scale: Annotated[
        NoiseScale | None,
        Field(
            description="Gradient noise scale, which does not depend on the device. Unset until a run on at least two "
            "ranks has measured the noise scale."
        ),
    ] = None
    repeats: Annotated[
        RepeatedRuns | None,
        Field(
            description="How far equal runs were apart. The intervals of predictions from profiles follow it. "
            "Unset until a run has repeated an earlier one."
        ),
    ] = None
    fetch_seconds_per_sample: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_S,
            description="Time to read, decode and batch one sample. Only the part of this time that does not overlap "
            "with computing lengthens a step.",
        ),
    ] = None
    computing_watts: Annotated[
        float | None,
        Field(
            ge=0,
            le=1e5,
            description="Power of one device, or of one CPU, while it computes. Unset until a run could read an energy "
            "counter (NVML, RAPL).",
        ),
    ] = None
    link_latency_seconds: Annotated[
        float | None, Field(ge=0, le=MAX_S, description="Latency (alpha) of a message.")
    ] = None
    link_bandwidth_bytes_per_second: Annotated[
        float | None, Field(gt=0, description="Effective bandwidth (1/beta) between ranks.")
    ] = None
    hardware: Annotated[HardwareProfile | None, Field(description="Measured hardware, if spec.model is hardware.")] = (
        None
    )
    structure: Annotated[
        ObservedStructure | None,
        Field(
            description="Observed structure of a script whose jobs have no spec.model. Plans of this namespace use it "
            "in place of spec.model."
        ),
    ] = None
    memory: Annotated[
        tuple[MeasuredMemory, ...] | None,
        Field(
            max_length=MAX_MEMORY,
            description="Main memory of pods in earlier runs of a training script. Plans of this namespace request it. "
            "Unset for other models.",
        ),
    ] = None
    start_seconds: Annotated[
        float | None,
        Field(
            ge=0,
            le=MAX_S,
            description="Time from new pods to the first step, without fetching data: mean over runs that had no "
            "failure. Plans with a deadline count it if it is longer than 20 s. Unset: not measured.",
        ),
    ] = None
    observed_jobs: Annotated[int, Field(ge=0, description="Runs whose measurements are in this profile.")] = 0
    updated: datetime | None = None


class DLProfile(FiniteModel):
    spec: DLProfileSpec
    status: DLProfileStatus = DLProfileStatus()
