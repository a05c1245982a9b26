"""Request types of the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isinf
from typing import Literal, get_args

from dlcontract import DDP_BUCKET_NBYTES, CollectiveName, Precision
from dljob.calibrate.learned import measured_key
from dljob.cluster.catalogue import vendor
from dljob.cluster.domains import ANYWHERE, NO_BORDERS, SAME_AS_OTHERS, Domain, Spot, Topology
from dljob.cluster.energy import ASSUMED_ENERGY, EnergySettings
from dljob.cluster.prices import CATALOGUE_PRICES, Prices
from dljob.perf.resources.data_fetch import SOURCE_BANDWIDTH_Bps
from dljob.perf.step.backends import Backend
from dljob.perf.step.step import BUCKET_NBYTES
from dljob.perf.workload.observed import Structure
from dljob.perf.workload.workload import StatedPairs
from dljob.planner.types.storage import Storage, VolumeLimit

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class FixedChoice:
    """Nodes, ranks and batch size that the user fixes for one type of device (``spec.planning.groups``).

    ``batch_per_rank``: local batch size of each rank, in samples; None if the planner chooses it.
    """

    device: str
    nodes: int
    ranks_per_node: int = 1
    batch_per_rank: int | None = None


@dataclass(frozen=True)
class RunningBatch:
    """The global batch size of a running job, and the gradient noise scale that determined its number of steps.

    Both were chosen when the job began. ``noise``: in samples; None if it was not measured at that time.
    """

    batch: int
    noise: float | None


@dataclass(frozen=True)
class Batches:
    """The range ``low`` to ``high`` of global batch sizes that the planner may choose (``spec.batchSizeRange``)."""

    low: int
    high: int
    data: str
    """Name of the dataset. The planner uses only gradient noise scales that were measured on this dataset."""
    epoch_samples: int | None = None
    running: RunningBatch | None = None
    """The batch size of a job that already runs, which must not change; None for a new job."""


@dataclass(frozen=True)
class Request:
    """The job to plan, as the planner needs it: values of the spec, and limits and prices of the cluster.

    The workload is given in one of four ways: by ``model`` (a built-in model), by ``like`` (a well-known model that
    costs as much as the job's own model), by three figures of the job's own model (``parameters``, ``flops_per_sample``
    and ``activation_nbytes_per_sample``), or by its ``structure``, which an earlier run has shown.
    """

    job: str
    global_batch: int
    """Samples per step; 0 if the spec does not give this number (``missing`` then contains globalBatchSize)."""
    total_steps: int
    """Optimizer steps of the whole training; 0 if the spec does not give them."""
    batches: Batches | None = None
    """Range from which the planner chooses the global batch size; ``global_batch`` and ``total_steps`` are then the
    values in the spec. None: the global batch size is ``global_batch``."""
    model: str | None = None
    profile: str | None = None
    """Name under which measurements of the job's model are stored: the planner's argument ``learned`` has the key
    (profile, device). None: ``model`` is this name."""
    dataset: str | None = None
    """Name of a built-in dataset, whose samples determine the cost of built-in models; None: the model's default."""
    like: str | None = None
    """Name of a model in ``perf.workload.references`` that costs as much as the job's own model; None if unset."""
    trained_parameters: int | None = None
    """Number of trained parameters beside those of ``like``, which are then frozen; None if ``like`` is trained."""
    parameters: int | None = None
    flops_per_sample: float | None = None
    activation_nbytes_per_sample: int | None = None
    checkpointed_nbytes_per_sample: int | None = None
    """``activation_nbytes_per_sample`` with activation checkpointing; None if it is unknown."""
    dense_output_nbytes: int | None = None
    """Bytes of a sample in the output of a model that only figures describe, without convolutions and recurrent layers;
    None if it may have some."""
    largest_activation_nbytes: int | None = None
    """Bytes of a sample in the largest tensor that the forward pass saves, of a model that only figures describe; None
    if it is unknown."""
    largest_parameter_nbytes: int | None = None
    """Bytes of the largest trainable tensor of a model that only figures describe; None if it is unknown."""
    largest_unit: int | None = None
    """Parameters, also frozen ones, of the largest module that ranks gather with strategy Sharded, of a model that only
    figures describe; None if it is unknown."""
    frozen_nbytes: int = 0
    """Bytes of the parameters that are not trained, of a model that only figures describe, or of ``like`` with
    ``trained_parameters``, where 0 means that they are float32."""
    pairs: StatedPairs | None = None
    """What tensor parallelism splits of a model that only figures describe; None if it is unknown."""
    reuses_blocks: bool = False
    """True if ranks allocate tensors so that they fit into the blocks of freed ones, as in the trainer image."""
    sample_nbytes: int | None = None
    dataset_samples: int | None = None
    """Number of samples of a dataset in files; None if it is unknown or the data is built in."""
    optimizer: Literal["SGD", "Adam", "AdamW"] = "SGD"
    momentum: float = 0.9
    nodes_min: int = 1
    nodes_max: int | None = None
    takes_most: bool = False
    """True if a plan without a prediction takes as many nodes as it can, up to ``nodes_max``, instead of
    ``nodes_min``."""
    gpus_max: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of GPUs in the plan by vendor, because of a quota. A vendor that is not in it has no maximum."""
    cpus_max: float | None = None
    """Maximum number of CPUs of all pods together, because of a quota; None: no maximum. A pod on a CPU node whose
    ranks compute with at most one CPU in total does not count, because it may request less."""
    devices: tuple[str, ...] = ()
    """Allowed device types; empty for any."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    cpu_per_pod: float | None = None
    cpu_limit_per_pod: float | None = None
    threads_per_rank: int | None = None
    """Number of threads with which each rank on CPUs computes, because the user sets it (``OMP_NUM_THREADS``)."""
    memory_per_pod_nbytes: int | None = None
    memory_least_nbytes: int = 0
    """Main memory in bytes that each pod gets at least, whatever is predicted, because pods with less reached their
    limit, or an earlier run needed as much. It has no effect if ``memory_per_pod_nbytes`` is set."""
    memory_admitted: bool = False
    """True if Kueue has admitted the memory of the pods, so that measurements must not raise it."""
    memory_measured: bool = False
    """True if ``memory_least_nbytes`` follows from the measured memory of earlier runs."""
    minimize: Literal["Time", "Energy", "Cost", "Carbon"] = "Time"
    deadline_s: float | None = None
    measured_start_s: float | None = None
    """Seconds from new pods to the first step, without fetching data, in earlier runs of the job's model; None:
    unknown. ``plan`` sets this field."""
    paced: bool = False
    """True if ``deadline_s`` is not the user's deadline, but the seconds that a whole training may take so that its
    remaining steps end in time. Texts then give ratios, which also hold for the remaining steps, instead of times."""
    collective: CollectiveName | None = None
    """The collective that the user requests; None: the planner chooses."""
    reduced_by_script: bool = False
    """True if the job's script reduces gradients itself (torchrun, MPI), whatever the collective of the plan is."""
    strategy: Literal["Data", "Optimizer", "Sharded", "Pipeline", "Tensor", "Auto"] = "Data"
    """The strategy that the user requests. Auto: the planner chooses."""
    no_split_reason: str | None = None
    """With Auto, the reason why model parallelism is not allowed; None if it is allowed."""
    stages: int | None = None
    """Number of pipeline stages that the user requests; None if the user requests no number."""
    replicas: int | None = 1
    """Number of replicas of a model that is split; None if the planner chooses it (strategy Auto)."""
    micro_batches: int = 1
    """Number of micro-batches of a pipeline. In data-parallel plans, also the number of micro-batches whose gradients
    are accumulated, unless ``chooses_micro_batches`` is true."""
    deferred_init: bool = False
    """True if ranks with strategy Sharded create a unit of the model at a time, not the whole model."""
    may_divide_further: bool = False
    """True if the batch of a pipeline may have more micro-batches than ``micro_batches`` if memory needs it."""
    chooses_micro_batches: bool = False
    """True if the planner may choose the number of micro-batches of data-parallel plans (gradient accumulation)."""
    may_accumulate: bool = False
    """True if the job can use gradient accumulation and its spec fixes no number of micro-batches. If no plan fits into
    memory, the message then suggests gradient accumulation, unless ``chooses_micro_batches`` is true."""
    precision: Precision | None = "FP32"
    """Precision of forward and backward pass; None if the planner chooses it by the devices of a plan."""
    float32_reason: str | None = None
    """Reason why a job with ``precision: Auto`` computes in float32 on all devices; None if it need not."""
    may_scale_loss: bool = True
    """True if the planner may choose FP16, which needs loss scaling."""
    recomputation: Literal["Never", "Auto", "Always"] = "Never"
    """Use of activation checkpointing. Auto: the planner chooses."""
    no_recomputation_reason: str | None = None
    """Why the job cannot use activation checkpointing; None if it can."""
    compressed: bool = False
    """True if gradients are sent as BF16 or FP16, which halves their bytes."""
    synchronization: Literal["Synchronous", "Asynchronous", "StaleSynchronous"] = "Synchronous"
    staleness_bound: int | None = None
    uneven: bool = True
    fixed: tuple[FixedChoice, ...] = ()
    cautious: bool = False
    """True to compare the times of plans by their p90. ``plan`` sets this field if multi-device steps were measured.
    Predictions then differ in certainty, and the plan with the smallest median often has the largest error."""
    candidates_kept: int = 5
    asks_unsupported: bool = False
    """True if the result should name better plans that the trainer cannot run yet, which takes a search of its own."""
    prices: Prices = CATALOGUE_PRICES
    energy: EnergySettings = ASSUMED_ENERGY
    begin_s: float = 0.0
    """Seconds from midnight UTC to the start of the training, for carbon intensities by hour of the day."""
    topology: Topology = NO_BORDERS
    spot: Spot = SAME_AS_OTHERS
    avoid_spot: bool = False
    """True if no rank may run on a spot node (``spec.scheduling.spot``)."""
    checkpoints: bool = True
    """False if the job writes no checkpoints."""
    checkpoints_in_store: bool = False
    """True if the checkpoints are in an object store. Pods then need memory for its client or clients."""
    checkpoint_interval_s: float | None = None
    """The checkpoint interval that the user fixes; None: the trainer chooses it."""
    domain: Domain = ANYWHERE
    """The part of the cluster to plan for, such as a zone. The function ``plan`` sets this field."""
    backend: Backend | None = None
    """Communication backend by whose measured ratios the latency and bandwidth of links are multiplied. None: links are
    used as they are."""
    storage: Storage | None = None
    """The space for data that is fetched to each node, and the size of the data; None if none is fetched to nodes."""
    data_source_Bps: float = SOURCE_BANDWIDTH_Bps
    """Bandwidth of the server or object store from which nodes fetch data, for all nodes together."""
    volumes: tuple[VolumeLimit, ...] = ()
    """The claims of the job that only some nodes can mount."""
    refused_ranks: frozenset[int] = frozenset()
    """Numbers of ranks on which the job's script has failed, so that no plan may have them."""
    bound_ranks: int | None = None
    """The only number of ranks with which the training can continue, because each rank has its own position in a data
    stream; None: any number. No rank may then become a parameter server, unless ``collective`` is one."""
    structure: Structure | None = None
    """Costs of the job's script, if an earlier run was observed and the spec has no model; otherwise None."""
    missing: tuple[str, ...] = ()
    """Fields that the spec lacks and without which no time can be predicted, such as model; empty if it has them all.

    If a field is missing, ``plan`` uses the nodes that the request asks for, without a search."""

    def at_pace(self, pace_s: float) -> "Request":
        """Return the request with the deadline ``pace_s``.

        These are the seconds that a whole training may take if the remaining steps of the job are to end in time.
        ``paced`` becomes True, so that texts give ratios instead of times. Infinite: the request has no deadline.
        """
        return replace(self, deadline_s=None) if isinf(pace_s) else replace(self, deadline_s=pace_s, paced=True)

    def allows_ranks(self, ranks: int) -> bool:
        """Return True if a plan may have this number of ranks (``refused_ranks``, ``bound_ranks``)."""
        return ranks not in self.refused_ranks and self.bound_ranks in (None, ranks)

    def allows_gpus(self, device: str, count: int) -> bool:
        """Return True if the vendor's quota (``gpus_max``) allows a plan with ``count`` GPUs of the type ``device``."""
        return count <= self.gpus_max.get(vendor(device), count)

    @property
    def counts_carbon(self) -> bool:
        """Return True if predictions include carbon: the job minimizes it, or the administrator set its intensity."""
        return self.minimize == "Carbon" or not self.energy.carbon.assumed

    def carbon_g(self, energy_J: float, total_s: float) -> float | None:
        """Return the grams of CO2 equivalent for ``energy_J`` joules over a training of ``total_s`` seconds.

        Return None if predictions do not include carbon (``counts_carbon``).
        """
        return self.energy.carbon.grams(energy_J, self.begin_s, total_s) if self.counts_carbon else None

    def key(self, precision: Precision = "FP32", recomputes: bool = False) -> str:
        """Return the name under which measurements of the job's model in this precision are stored.

        ``recomputes``: True for measurements with activation checkpointing.
        """
        return measured_key(self.profile or self.model or "", precision, recomputes)

    @property
    def keys(self) -> frozenset[str]:
        """Return all names under which measurements of the job's model are stored."""
        return frozenset(self.key(precision, again) for precision in PRECISIONS for again in (False, True))

    @property
    def may_recompute(self) -> bool:
        """Return True if the job could use activation checkpointing but does not ask for it."""
        return self.recomputation == "Never" and self.no_recomputation_reason is None and not self.missing

    @property
    def bucket_nbytes(self) -> int:
        """Return the size in bytes of a bucket: a part of the gradients that is reduced at once."""
        if self.backend is not None:
            return self.backend.bucket_nbytes
        return DDP_BUCKET_NBYTES if self.collective == "DDP" else BUCKET_NBYTES

    def wire_nbytes(self, gradient_nbytes: int) -> int:
        """Return the bytes to send for a gradient of ``gradient_nbytes`` bytes: half of them with compression."""
        return gradient_nbytes // 2 if self.compressed else gradient_nbytes
