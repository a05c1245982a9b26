"""What the planner is asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dlcontract import CollectiveName


@dataclass(frozen=True)
class FixedChoice:
    """A group the user dictates (spec.planning.groups)."""

    device: str
    nodes: int
    ranks_per_node: int = 1
    batch_per_rank: int | None = None


@dataclass(frozen=True)
class RunningBatch:
    """The batch that a job began with, and the noise scale that its number of steps came from."""

    batch: int
    noise: float | None


@dataclass(frozen=True)
class Batches:
    """What the planner may choose the global batch from (spec.batchSizeRange), ``least`` to ``most``."""

    least: int
    most: int
    data: str
    """What the noise scale must have been measured on."""
    epoch_samples: int | None = None
    kept: RunningBatch | None = None
    """The job goes on with this one."""


@dataclass(frozen=True)
class Request:
    """What to plan. Exactly one of ``model``, ``like`` and the three hints describes the workload."""

    job: str
    global_batch: int
    total_steps: int
    """Optimizer steps of the whole training."""
    batches: Batches | None = None
    """None: ``global_batch`` it is; else that is what the training was meant for, and ``total_steps`` are its."""
    model: str | None = None
    profile: str | None = None
    """Key of the learned constants: ``learned[profile, device]``; None: ``model``."""
    dataset: str | None = None
    """A built-in dataset: sizes the input of built-in models that adapt to it."""
    like: str | None = None
    """A model of ``perf.references`` that costs as much."""
    parameters: int | None = None
    flops_per_sample: float | None = None
    activation_nbytes_per_sample: int | None = None
    sample_nbytes: int | None = None
    dataset_samples: int | None = None
    """Of data in files; None: built in."""
    optimizer: Literal["SGD", "Adam", "AdamW"] = "SGD"
    momentum: float = 0.9
    nodes_min: int = 1
    nodes_max: int | None = None
    devices: tuple[str, ...] = ()
    """Allowed device types; empty: any."""
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
    """With Auto, why no rank may hold but a part of the model; None: they may."""
    stages: int | None = None
    """Of a pipeline."""
    micro_batches: int = 1
    compressed: bool = False
    """Whether gradients travel in half their bytes."""
    synchronization: Literal["Synchronous", "Asynchronous", "StaleSynchronous"] = "Synchronous"
    staleness_bound: int | None = None
    uneven: bool = True
    fixed: tuple[FixedChoice, ...] = ()
    cautious: bool = False
    """Time is compared by its 90th percentile. ``plan`` sets it once steps on several devices were measured: the least
    median among predictions of unlike certainty is most often the one that is furthest off."""
    candidates_kept: int = 5

    def wire_nbytes(self, gradient_nbytes: int) -> int:
        """What of a gradient travels."""
        return gradient_nbytes // 2 if self.compressed else gradient_nbytes
