"""Measured constants of one model on one type of device."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dlcontract import Precision
from dljob.calibrate.memory import MemoryPoint
from dljob.calibrate.noise import NoiseOf
from dljob.cluster.hardware import KEY, Hardware
from dljob.perf.fit.scaling import Contention
from dljob.perf.workload.observed import Structure
from dljob.perf.workload.workload import Workload

_SUFFIXES: Mapping[Precision, str] = {"BF16": ".bf16", "FP16": ".fp16"}
_CHECKPOINTED = ".checkpointed"


def measured_key(name: str, precision: Precision, recomputes: bool = False) -> str:
    """Return the key under which measurements of the model ``name`` in this precision are stored.

    ``recomputes``: True for measurements with activation checkpointing. The key of float32 without activation
    checkpointing is ``name`` itself, as in profiles of older releases, which measured nothing else.
    """
    return name + _SUFFIXES.get(precision, "") + _CHECKPOINTED * recomputes


def parts_of_key(key: str) -> tuple[str, Precision, bool]:
    """Split a key of ``measured_key`` into (model name, precision, True for activation checkpointing)."""
    recomputes = key.endswith(_CHECKPOINTED)
    key = key.removesuffix(_CHECKPOINTED)
    for precision, suffix in _SUFFIXES.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix), precision, recomputes
    return key, "FP32", recomputes


@dataclass(frozen=True)
class LearnedPoint:
    batch: int
    """Samples on the device."""
    compute_s: float
    """Mean seconds of forward pass, backward pass and update if one device trains alone."""
    observations: int = 1
    """Number of measured steps."""
    cores: int | None = None
    """CPUs of the rank. None: the device is a GPU, or a release measured it that did not store this number."""
    ranks: int = 1
    """Number of ranks on each node of the run, if the device is a CPU. They share the node's memory bandwidth."""
    machine_nodes: int = 1
    """Number of the run's nodes that shared the cores of one machine, if the device is a CPU."""


@dataclass(frozen=True)
class Place:
    """Placement of a run on several devices of one type, and the algorithm (collective) that reduced the gradients.

    ``node_devices``: number of the run's devices on each of its nodes, the same on all of them.
    """

    nodes: int
    node_devices: int
    collective: str = "Ring"
    sharded: bool = False
    """True for a sharded optimizer (strategy Optimizer)."""
    cores: int | None = None
    """CPUs of each rank. None: the devices are GPUs, or a release measured the run that did not store this number."""
    machine_nodes: int = 1
    """Number of the run's nodes that shared the cores of one machine, if the devices are CPUs."""

    @property
    def devices(self) -> int:
        return self.nodes * self.node_devices

    @property
    def uses_network(self) -> bool:
        """Return False if all nodes of the run, if it had several, were on one machine. They use its shared memory."""
        return self.nodes == 1 or self.machine_nodes < self.nodes


@dataclass(frozen=True)
class StepPoint:
    """Measured step time of runs on several devices that have equal placements and batches.

    ``step_s``: geometric mean of the runs' step times in seconds, without the time in which a step waits for input
    data. ``observations``: number of runs that count in this mean. ``batch``: number of samples on the device with the
    most samples.
    """

    place: Place
    batch: int
    step_s: float
    observations: int = 1


@dataclass(frozen=True)
class SplitPoint:
    """Measured step time of runs whose ranks each held a part of the model, with equal placements and batches.

    ``step_s``: geometric mean of the runs' step times in seconds, without the time in which a step waits for input
    data. ``batch``: number of samples of all ranks. ``observations``: number of runs that count in the mean.
    ``workload``: the workload of the runs, if it is not that of the profile but one in another precision, or with or
    without activation checkpointing; otherwise None.
    """

    strategy: Literal["Sharded", "Pipeline", "Tensor"]
    place: Place
    batch: int
    step_s: float
    micro_batches: int = 1
    replicas: int = 1
    observations: int = 1
    workload: Workload | None = field(default=None, compare=False)

    @property
    def samples(self) -> float:
        """Return the mean number of samples of a rank, or of a replica's ranks, in a micro-batch."""
        divided = self.replicas if self.strategy != "Sharded" else self.place.devices
        return self.batch / divided / self.micro_batches

    def like(self, other: "SplitPoint") -> bool:
        """Return True if ``other`` has an equal placement and batch."""
        return replace(self, step_s=other.step_s, observations=other.observations) == other


@dataclass(frozen=True)
class Repeats:
    """How far the computing times of runs were from those of earlier equal runs. ``runs``: number of such runs.

    ``deviation``: root mean square of log(time / earlier time).
    """

    runs: int
    deviation: float


@dataclass(frozen=True)
class Learned:
    """Measured constants of one model on one type of device, from a DLProfile."""

    points: tuple[LearnedPoint, ...] = ()
    link_latency_s: float | None = None
    link_bandwidth_Bps: float | None = None
    contention: Contention = field(default_factory=Contention)
    compute_spread: float | None = None
    """Standard deviation of log(measured / predicted) for computing time; None without multi-device measurements."""
    link_spread: float | None = None
    """Standard deviation of log(measured / predicted) for communication; None without multi-device measurements."""
    steps: tuple[StepPoint, ...] = ()
    """Measured step times of runs on several devices."""
    split_steps: tuple[SplitPoint, ...] = ()
    """Measured step times of runs whose ranks each held a part of the model, the newest last."""
    noise: NoiseOf | None = None
    """Gradient noise scale, which does not depend on the device."""
    computing_W: float | None = None
    """Power in watts of one device, or of one CPU, while it computes; without the host and the data centre."""
    hardware: Hardware | None = None
    """Measured hardware of the device type. Only profiles with the model key ``hardware`` have it; otherwise None."""
    fetch_s: float | None = None
    """Seconds that a rank or a data-loading process needs to prepare a sample and copy it into a batch."""
    start_s: float | None = None
    """Seconds from new pods to the first step, without fetching data; None: not measured."""
    structure: Structure | None = None
    """Observed costs of a script that no spec describes; None for other models."""
    memory: tuple[MemoryPoint, ...] = ()
    """Measured main memory of the pods of a training script; empty for other models."""
    repeats: Repeats | None = None
    """None until a run has repeated an earlier one."""
    doubts: tuple[str, ...] = ()
    """Measurements that plans leave out because they are implausible, with reasons, for users."""

    @property
    def is_of_other_workloads(self) -> bool:
        """Return True if this has nothing but steps that were measured with other workloads than its own."""
        own = any(point.workload is None for point in self.split_steps)
        return not own and self == Learned(split_steps=self.split_steps)


def hardware_of(device: str, learned: Mapping[tuple[str, str], Learned]) -> Hardware | None:
    """Return the measured hardware of a device type, or None if it was not measured.

    ``learned``: measured constants by (model key, device type).
    """
    found = learned.get((KEY, device))
    return found.hardware if found else None
