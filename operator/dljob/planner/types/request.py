"""Request types of the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dlcontract import CollectiveName


@dataclass(frozen=True)
class FixedChoice:
    """A group that the user fixes (``spec.planning.groups``)."""

    device: str
    nodes: int
    ranks_per_node: int = 1
    batch_per_rank: int | None = None


@dataclass(frozen=True)
class RunningBatch:
    """The batch size that a job began with, and the noise scale from which its number of steps was computed."""

    batch: int
    noise: float | None


@dataclass(frozen=True)
class Batches:
    """The range ``low`` to ``high`` of global batch sizes that the planner may choose (``spec.batchSizeRange``)."""

    low: int
    high: int
    data: str
    """The data that the noise scale must have been measured on."""
    epoch_samples: int | None = None
    running: RunningBatch | None = None
    """The batch of a job that runs already and must not change it."""


@dataclass(frozen=True)
class Request:
    """The job to plan. Exactly one of ``model``, ``like`` and the three hints describes the workload."""

    job: str
    global_batch: int
    total_steps: int
    """Optimizer steps of the whole training."""
    batches: Batches | None = None
    """Range to choose the batch from. ``global_batch`` and ``total_steps`` are then the spec's own. None: the batch is
    ``global_batch``."""
    model: str | None = None
    profile: str | None = None
    """Key of the learned constants: ``learned[profile, device]``; None: ``model``."""
    dataset: str | None = None
    """A built-in dataset. It determines the input size of built-in models."""
    like: str | None = None
    """A model of ``perf.workload.references`` with the same cost."""
    parameters: int | None = None
    flops_per_sample: float | None = None
    activation_nbytes_per_sample: int | None = None
    sample_nbytes: int | None = None
    dataset_samples: int | None = None
    """Samples of a dataset in files; None for built-in data."""
    optimizer: Literal["SGD", "Adam", "AdamW"] = "SGD"
    momentum: float = 0.9
    nodes_min: int = 1
    nodes_max: int | None = None
    devices: tuple[str, ...] = ()
    """Allowed device types; empty for any."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    cpu_per_pod: float | None = None
    cpu_limit_per_pod: float | None = None
    memory_per_pod_nbytes: int | None = None
    minimize: Literal["Time", "Energy", "Cost"] = "Time"
    deadline_s: float | None = None
    collective: CollectiveName | None = None
    """None: the planner chooses."""
    strategy: Literal["Data", "Optimizer", "Pipeline", "Tensor", "Auto"] = "Data"
    """Auto: the planner chooses."""
    no_split_reason: str | None = None
    """With Auto, the reason why model parallelism is not allowed; None if it is allowed."""
    stages: int | None = None
    """Stages of a pipeline."""
    micro_batches: int = 1
    compressed: bool = False
    """True if gradients are sent as BF16 or FP16, in half their bytes."""
    synchronization: Literal["Synchronous", "Asynchronous", "StaleSynchronous"] = "Synchronous"
    staleness_bound: int | None = None
    uneven: bool = True
    fixed: tuple[FixedChoice, ...] = ()
    cautious: bool = False
    """Compare times by their p90. ``plan`` sets it once multi-device steps were measured. Among predictions of
    different certainty, the one with the smallest median is often the one with the largest error."""
    candidates_kept: int = 5

    def wire_nbytes(self, gradient_nbytes: int) -> int:
        """Return the bytes of a gradient that are sent."""
        return gradient_nbytes // 2 if self.compressed else gradient_nbytes
