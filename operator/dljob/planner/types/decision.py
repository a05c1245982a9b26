"""Result types of the planner."""

from dataclasses import dataclass
from typing import Literal

from dlcontract import CollectiveName

Strategy = Literal["Data", "Optimizer"]
"""Parallelism of ranks that hold the whole model: data parallelism without or with a sharded optimizer (ZeRO-1)."""

Parallelism = Literal["Data", "Optimizer", "Pipeline", "Tensor"]
"""The same, and model parallelism: pipeline (consecutive layers) or tensor (parts of linear layers)."""


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
    """The dominant part of the step time, such as 'communication 63 %: Ring over the network, 10 Gbit/s'."""
    basis: Literal["catalogue", "profile"]
    host_memory_nbytes: int = 0
    """Main memory of the largest pod with all its ranks: what its container should request."""
    efficiency: float = 1.0
    """Throughput divided by the sum of the throughputs of the same devices, each training alone; in (0, 1]."""
    data_s: float = 0.0
    """Exposed input time per step on the slowest rank."""
    total_p90_s: float = 0.0
    """p90 of the time of the whole training; deadlines are compared with it."""


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
    """Local batch size of each rank of the group, ``nodes * ranks_per_node`` values; 0 for a parameter server. With
    model parallelism, each rank has the whole batch."""
    cpu_per_pod: float
    """CPUs that a pod's ranks keep busy: what its container should request."""


@dataclass(frozen=True)
class Choice:
    """A candidate that fits, with its prediction."""

    summary: str
    """Text such as '3 x cpu, Ring, 40+40+40'."""
    groups: tuple[Group, ...]
    collective: CollectiveName
    prediction: Prediction
    strategy: Parallelism = "Data"
    micro_batches: int = 1
    """Micro-batches of a pipeline."""

    @property
    def splits_model(self) -> bool:
        """Return True for model parallelism: each rank holds a part of the model and sees the whole batch."""
        return self.strategy in ("Pipeline", "Tensor")


@dataclass(frozen=True)
class Refusal:
    """A kind of candidate that was rejected, and the reason, such as '8 x t4' and 'does not fit: ...'."""

    summary: str
    reason: str


@dataclass(frozen=True)
class BatchOption:
    """A global batch size that was considered."""

    batch: int
    steps: int
    """Steps with the same progress as the spec's steps with the spec's batch."""
    efficiency: float
    """Progress per sample, divided by the progress per sample with the spec's batch."""
    prediction: Prediction | None
    """Prediction of the best plan with this batch; None if there is no plan."""
    reason: str = ""
    """Reason why there is no plan."""


@dataclass(frozen=True)
class BatchDecision:
    """The choice of the global batch size from a range (``spec.batchSizeRange``)."""

    base: int
    """The spec's ``globalBatchSize``."""
    chosen: int
    steps: int
    """Steps of the whole training."""
    noise: float | None
    """The gradient noise scale in samples; None if it was not measured."""
    text: str
    """Reason for the choice."""
    options: tuple[BatchOption, ...] = ()
    """The considered batches in rising order."""


@dataclass(frozen=True)
class Decision:
    chosen: Choice
    candidates: tuple[Choice, ...]
    """The best candidates, the chosen one first."""
    refusals: tuple[Refusal, ...] = ()
    warning: str | None = None
    """A warning, such as by how much the chosen plan misses a deadline that no candidate meets."""
    next_measurement: str | None = None
    """The run that would reduce the uncertainty of predictions most; None if enough is measured."""
    power_advice: str | None = None
    """Power limits that would save energy; only for plans that minimize energy."""
    batch: BatchDecision | None = None
    """None if the request fixes the batch."""
    trade_offs: tuple[Choice, ...] = ()
    """The Pareto front of time, energy and cost with the chosen plan, fastest first."""


@dataclass(frozen=True)
class Infeasible:
    """No plan is possible now. ``transient``: another state of the cluster may allow one."""

    reason: str
    """Condition reason in CamelCase, such as NoSuchDevice, TooFewNodes, DoesNotFit, BatchTooSmall or DeviceBusy."""
    field: str
    """Path of the spec field to change, such as spec.devices."""
    message: str
    """Found value, expected value and remedy."""
    transient: bool = False
    refusals: tuple[Refusal, ...] = ()
