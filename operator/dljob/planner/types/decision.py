"""What the planner answers."""

from dataclasses import dataclass
from typing import Literal

from dlcontract import CollectiveName

Strategy = Literal["Data", "Optimizer"]
"""What ranks share out besides the batch: nothing, or the update with the optimizer's state."""

Parallelism = Literal["Data", "Optimizer", "Pipeline", "Tensor"]
"""The same, and what of the model: its layers, or the inside of some."""


@dataclass(frozen=True)
class Prediction:
    step_s: float
    step_p90_s: float
    compute_s: float
    communication_s: float
    total_s: float
    samples_per_s: float
    memory_nbytes: int
    energy_J: float | None
    cost_usd: float | None
    bottleneck: str
    """Such as 'communication 63 %: ring over 10 GbE'."""
    basis: Literal["catalogue", "profile"]
    host_memory_nbytes: int = 0
    """Main memory of the largest pod, all its ranks together: what its container should request."""
    efficiency: float = 1.0
    """Throughput over that of the same devices, each training alone, added up; in (0, 1]."""
    data_s: float = 0.0
    """Of a step, fetching data on the slowest rank."""
    total_p90_s: float = 0.0
    """Time of the whole training that nine of ten such runs need at most; deadlines are held against it."""


@dataclass(frozen=True)
class Group:
    """Nodes of one device type; ranks are numbered contiguously by group, then node, then local rank."""

    name: str
    """DNS label, unique in the decision: suffix of the group's StatefulSet."""
    device: str
    is_gpu: bool
    nodes: int
    ranks_per_node: int
    shares: tuple[int, ...]
    """Samples per step of each rank of the group, ``nodes * ranks_per_node`` of them; 0 for a parameter server. Where
    ranks split the model, each has all."""
    cpu_per_pod: float
    """CPUs that a pod's ranks keep busy: what its container should request."""


@dataclass(frozen=True)
class Choice:
    """A candidate that fits, with its prediction."""

    summary: str
    """Such as '3 x cpu, Ring, 40+40+40'."""
    groups: tuple[Group, ...]
    collective: CollectiveName
    prediction: Prediction
    strategy: Parallelism = "Data"
    micro_batches: int = 1
    """Of a pipeline."""

    @property
    def in_parts(self) -> bool:
        """Whether each rank holds a part of the model and sees the whole batch."""
        return self.strategy in ("Pipeline", "Tensor")


@dataclass(frozen=True)
class Refusal:
    """A kind of candidate that was ruled out: '8 x T4' — 'does not fit: 21 GiB of 16 GiB'."""

    summary: str
    reason: str


@dataclass(frozen=True)
class BatchOption:
    """A global batch that was looked at."""

    batch: int
    steps: int
    """That get as far as the spec's of its own batch."""
    efficiency: float
    """Progress of a sample over that in the spec's own batch."""
    prediction: Prediction | None
    """Of the best plan with this batch ..."""
    reason: str = ""
    """... or why there is none."""


@dataclass(frozen=True)
class BatchDecision:
    """The global batch where it was left open."""

    base: int
    """The spec's own."""
    chosen: int
    steps: int
    """Of the whole training."""
    noise: float | None
    """The noise scale in samples; None: not measured."""
    text: str
    """Why this one."""
    options: tuple[BatchOption, ...] = ()
    """By rising batch."""


@dataclass(frozen=True)
class Decision:
    chosen: Choice
    candidates: tuple[Choice, ...]
    """The best ones, chosen first."""
    refusals: tuple[Refusal, ...] = ()
    warning: str | None = None
    """Such as a deadline that no candidate meets: by how much the chosen one misses it."""
    next_measurement: str | None = None
    """The run that would teach most about this job's places, and how much; None when enough is known."""
    power_advice: str | None = None
    """Of plans for least energy: power limits that would save some."""
    batch: BatchDecision | None = None
    """None: the request named the batch."""
    trade_offs: tuple[Choice, ...] = ()
    """The chosen one and those that no other one beats in time, energy and cost alike (Pareto front), fastest first."""


@dataclass(frozen=True)
class Infeasible:
    """No plan is possible now. ``transient``: another state of the cluster may allow one."""

    reason: str
    """CamelCase, for a condition: NoSuchDevice, TooFewNodes, DoesNotFit, BatchTooSmall, DeviceBusy."""
    field: str
    """Path of the spec field to change, such as spec.devices."""
    message: str
    """What was found, what was expected, what to do."""
    transient: bool = False
    refusals: tuple[Refusal, ...] = ()
