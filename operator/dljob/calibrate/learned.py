"""What measurements taught of one (model, device): points, not formulas."""

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
    """Steps behind the figure."""


@dataclass(frozen=True)
class Place:
    """Where a job ran: on devices of one kind, as many on each node; and what summed its gradients."""

    nodes: int
    node_devices: int
    collective: str = "Ring"
    sharded: bool = False
    """Ranks shared out the update (strategy Optimizer)."""

    @property
    def devices(self) -> int:
        return self.nodes * self.node_devices


@dataclass(frozen=True)
class StepPoint:
    """Seconds of a step of ``batch`` samples on the busiest device, data at hand; the mean of so many runs."""

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
    """Standard deviation of log(measured / predicted) computing time; None: nothing on several devices was measured."""
    link_spread: float | None = None
    """The same of communication."""
    steps: tuple[StepPoint, ...] = ()
    """Of several devices."""
    noise: NoiseOf | None = None
    """The gradient's, whatever the device."""
    fetch_s: float | None = None
    """Making a sample and its part of a batch, by whoever did."""
