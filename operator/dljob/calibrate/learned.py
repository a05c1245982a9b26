"""Measured constants of one model on one device."""

from dataclasses import dataclass, field

from dljob.calibrate.noise import NoiseOf
from dljob.perf.fit.scaling import Contention


@dataclass(frozen=True)
class LearnedPoint:
    batch: int
    """Samples on the device."""
    compute_s: float
    """Mean time of forward, backward and update, on one device alone."""
    observations: int = 1
    """Number of measured steps."""


@dataclass(frozen=True)
class Place:
    """The placement of a run on devices of one kind, with equally many on each node, and its collective."""

    nodes: int
    node_devices: int
    collective: str = "Ring"
    sharded: bool = False
    """True for a sharded optimizer (strategy Optimizer)."""

    @property
    def devices(self) -> int:
        return self.nodes * self.node_devices


@dataclass(frozen=True)
class StepPoint:
    """Mean step seconds of ``observations`` runs with ``batch`` samples on the busiest device, without input time."""

    place: Place
    batch: int
    step_s: float
    observations: int = 1


@dataclass(frozen=True)
class Learned:
    """Constants measured for one (model, device), from a DLProfile."""

    points: tuple[LearnedPoint, ...] = ()
    link_latency_s: float | None = None
    link_bandwidth_Bps: float | None = None
    contention: Contention = field(default_factory=Contention)
    compute_spread: float | None = None
    """Standard deviation of log(measured / predicted) computing time; None without multi-device measurements."""
    link_spread: float | None = None
    """The same for communication time."""
    steps: tuple[StepPoint, ...] = ()
    """Multi-device steps."""
    noise: NoiseOf | None = None
    """Gradient noise scale, which does not depend on the device."""
    fetch_s: float | None = None
    """Seconds to prepare one sample and its part of a batch, in a rank or a worker."""
