"""Result types of the planner."""

from dataclasses import dataclass
from typing import Literal

from dlcontract import CollectiveName, Precision
from dljob.cluster.domains import ANYWHERE, Domain
from dljob.perf.workload.observed import Structure

Strategy = Literal["Data", "Optimizer"]
"""Strategies in which each rank holds the whole model: data parallelism without or with sharded optimizer (ZeRO-1)."""

Parallelism = Literal["Data", "Optimizer", "Sharded", "Pipeline", "Tensor"]
"""All strategies: those in ``Strategy``, and the two model-parallel ones.

With Pipeline, each rank holds some consecutive layers. With Tensor, each rank holds a part of the split layers."""

Basis = Literal["catalogue", "probe", "profile"]
"""Where the constants of a prediction come from: data sheets, measured hardware, or runs of the job's model."""


@dataclass(frozen=True)
class Prediction:
    """Predictions for a plan. Times are in seconds, and medians unless the name has p90.

    ``step_s`` is the time of a step. ``compute_s``, ``communication_s`` and ``data_s`` are parts of it. ``total_s``,
    ``energy_J`` and ``cost_usd`` are those of the whole training. ``memory_nbytes``: largest memory that a rank needs.
    It is GPU memory or, on CPUs, main memory.
    """

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
    """Text that names the part of the step that takes the most time.

    Example: 'communication 63 %: Ring over the network, 10 Gbit/s'."""
    basis: Basis
    host_memory_nbytes: int = 0
    """Main memory in bytes of the pod that needs the most, with all its ranks. Its container should request it."""
    pods_nbytes: tuple[int, ...] = ()
    """Main memory in bytes of a pod of each group, in the order of the groups. Empty: the same for all pods."""
    efficiency: float = 1.0
    """Throughput divided by the sum of the throughputs of the same devices, each training alone; in (0, 1]."""
    data_s: float = 0.0
    """Seconds of a step in which the slowest rank waits for its input, because prefetching does not hide them."""
    total_p90_s: float = 0.0
    """90th percentile of the time of the whole training. A deadline must allow this time."""
    evaluations_s: float = 0.0
    """Part of ``total_s``: evaluations of a built-in model at the end of each epoch and of the training."""
    fetch_s: float = 0.0
    """Part of ``total_s``: the nodes fetch the job's data before the first step; 0 if its size is unknown."""
    carbon_g: float | None = None
    """Grams of CO2 equivalent of the whole training; None if the request does not ask for it (``counts_carbon``)."""
    interruptions: float = 0.0
    """Expected number of interruptions of nodes in the whole training; 0 without spot nodes."""
    interruption_s: float = 0.0
    """Part of ``total_s``: restarts and repeated steps because of these interruptions."""
    checkpoints_s: float = 0.0
    """Part of ``total_s``: the training time that checkpoints cost; 0 if the job's script writes them itself."""
    doubt: str | None = None
    """Text about a measured step with this strategy that nothing explains; None without one."""

    @property
    def step_p10_s(self) -> float:
        """Return the 10th percentile of the step time. Errors of predictions are symmetric in their logarithm."""
        return self.step_s**2 / self.step_p90_s if self.step_p90_s else self.step_s

    @property
    def throughput_per_latency(self) -> float:
        """Return samples per second divided by the step time in seconds; higher is better. 0 if it is not predicted."""
        return self.samples_per_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class Group:
    """The nodes of one device type in a plan. The plan numbers ranks by group, then by node, then by local rank."""

    name: str
    """Suffix of the name of the group's StatefulSet: a DNS label, unique in the plan."""
    device: str
    is_gpu: bool
    nodes: int
    ranks_per_node: int
    shares: tuple[int, ...]
    """Local batch sizes of the group's ``nodes * ranks_per_node`` ranks; 0 for a parameter server. With model
    parallelism, each rank has the whole batch of its replica."""
    cpu_per_pod: float
    """Number of CPUs that the ranks of a pod keep busy. The container of the pod should request this number."""
    cores: float = 1.0
    """Number of CPUs that each rank computes with; it may be a fraction. 1 on GPUs."""

    @property
    def devices(self) -> float:
        """Return the number of GPUs or CPUs of the group; a part of a CPU counts as one."""
        return len(self.shares) * max(1.0, 1.0 if self.is_gpu else self.cores)


@dataclass(frozen=True)
class Choice:
    """A possible plan that fits into memory, with its predicted times, memory and cost."""

    summary: str
    """Text such as '3 x cpu, Ring, 40+40+40'."""
    groups: tuple[Group, ...]
    collective: CollectiveName
    prediction: Prediction
    strategy: Parallelism = "Data"
    micro_batches: int = 1
    """Number of micro-batches: those of a pipeline's batch, or those into which each rank divides its part of a batch
    (gradient accumulation). 1 with strategy Tensor."""
    replicas: int = 1
    """Number of replicas of the model with model parallelism. With p ranks per replica, rank r is in replica r // p."""
    precision: Precision = "FP32"
    """Number format of forward and backward pass."""
    recomputes: bool = False
    """True with activation checkpointing: blocks keep only their inputs, and their forward pass runs twice."""

    @property
    def splits_model(self) -> bool:
        """Return True for model parallelism: each rank holds a part of a replica and sees all of its samples."""
        return self.strategy in ("Pipeline", "Tensor")

    @property
    def in_parts(self) -> bool:
        """Return True if every rank holds only a part of the model (Sharded, Pipeline, Tensor).

        The ranks are then equal, all of them are needed, and profiles learn nothing but the time of a step.
        """
        return self.splits_model or self.strategy == "Sharded"

    @property
    def pods_nbytes(self) -> tuple[int, ...]:
        """Return the main memory in bytes that a pod of each group requests, in the order of the groups."""
        return self.prediction.pods_nbytes or (self.prediction.host_memory_nbytes,) * len(self.groups)


@dataclass(frozen=True)
class Refusal:
    """A rejected candidate, strategy or type of node (such as '8 x t4'), and the reason ('does not fit: ...')."""

    summary: str
    reason: str


@dataclass(frozen=True)
class Unsupported:
    """A plan that would fit or would be better, but that the trainer cannot run yet. It is never chosen.

    ``summary``: text such as '4 x a100 (8 ranks each), ZeRO-3'. ``reason``: text such as 'would fit: 31.2 GiB per rank,
    1.93s per step'.
    """

    summary: str
    reason: str
    prediction: Prediction


@dataclass(frozen=True)
class PowerLimit:
    """The chosen plan under certain power limits of its GPUs.

    ``limits``: text such as '250 W'. ``now``: True for the limits under which the GPUs run. ``advised``: True for the
    best limits.
    """

    limits: str
    prediction: Prediction
    now: bool = False
    advised: bool = False


@dataclass(frozen=True)
class BatchOption:
    """A global batch size that was planned, to compare it with the chosen one."""

    batch: int
    steps: int
    """Number of steps with this batch size that train as far as the spec's steps with the spec's batch size."""
    efficiency: float
    """Training progress per sample, divided by the progress per sample with the batch size in the spec."""
    prediction: Prediction | None
    """Prediction of the best plan with this global batch size; None if no plan is possible with it."""
    reason: str = ""
    """Reason why there is no plan with this batch size; empty if there is one."""


@dataclass(frozen=True)
class BatchDecision:
    """The choice of the global batch size from a range (``spec.batchSizeRange``)."""

    base: int
    """The spec's ``globalBatchSize``."""
    chosen: int
    steps: int
    """Number of steps of the whole training with the chosen batch size."""
    noise: float | None
    """The gradient noise scale in samples; None if it was not measured."""
    text: str
    """Reason for the choice."""
    options: tuple[BatchOption, ...] = ()
    """The global batch sizes that were planned, in rising order.

    It is empty if the planner had no choice: the job already runs, or no gradient noise scale was measured."""


@dataclass(frozen=True)
class Decision:
    """Result of the planner: the chosen plan, other candidates, and the reasons why others were rejected."""

    chosen: Choice
    candidates: tuple[Choice, ...]
    """The best candidates, the chosen one first."""
    refusals: tuple[Refusal, ...] = ()
    warning: str | None = None
    """A warning, for example that no candidate meets the deadline; None if there is nothing to warn about."""
    next_measurement: str | None = None
    """The run whose measurement would most reduce the uncertainty of predictions; None if no run is worth it."""
    power_advice: str | None = None
    """Power limits of GPUs that would save energy, cost or carbon; None for plans that minimize time."""
    power_limits: tuple[PowerLimit, ...] = ()
    """The chosen plan under its power limits and under others, if ``power_advice`` names better ones."""
    links: str | None = None
    """The slowest links between the ranks of the chosen plan; None for one rank, and with model parallelism."""
    precision_reason: str | None = None
    """The precision of the chosen plan and the reason for it; None for float32 if the job asks for no other."""
    recomputation_reason: str | None = None
    """Why the plan uses activation checkpointing or does not; None if the job does not ask for it."""
    batch: BatchDecision | None = None
    """The choice of the global batch size; None if the spec fixes it."""
    trade_offs: tuple[Choice, ...] = ()
    """The Pareto front in time, energy and cost, including the chosen plan; fastest first."""
    domain: Domain = ANYWHERE
    """The part of the cluster for which the chosen plan was predicted. The plan's pods must be bound to this part."""
    checkpoint_s: float = 0.0
    """Predicted seconds to write a checkpoint; 0 if the model is unknown."""
    unsupported: tuple[Unsupported, ...] = ()
    """Better plans that the trainer cannot run yet; empty unless the request asks for them (``asks_unsupported``)."""
    data_text: str | None = None
    """Text with the space of the plan's data on each node and the time to fetch it; None without such data."""
    structure: Structure | None = None
    """The observed structure of the job's script from which the times are predicted; None if the spec has a model."""
    memory_text: str | None = None
    """What earlier runs have shown about the memory of pods, if pods request so much because of it; otherwise None."""
    missing: tuple[str, ...] = ()
    """The fields that the spec lacks, and without which there was no search for the best plan."""


@dataclass(frozen=True)
class Infeasible:
    """Reason why no plan is possible now.

    ``transient``: True if a change of the cluster may make a plan possible; False if only a change of the spec can.
    ``refusals``: the reasons why nodes and candidates were rejected.
    """

    reason: str
    """Condition reason in CamelCase, such as NoSuchDevice, TooFewNodes, DoesNotFit, BatchTooSmall or DeviceBusy."""
    field: str
    """Path of the spec field to change, such as spec.devices."""
    message: str
    """Found value, expected value and remedy."""
    transient: bool = False
    refusals: tuple[Refusal, ...] = ()
    unsupported: tuple[Unsupported, ...] = ()
    """Plans that would fit, but that the trainer cannot run yet; empty unless the request asks for them."""
