"""The contract between the operator and the trainer, as JSON with a schema number.

``Plan`` goes from the operator to the agents (ConfigMap ``<job>-plan``, key ``plan.json``); ``Report`` comes
back (ConfigMap ``<job>-report``, key ``report.json``). Reports cross a trust boundary: parse them with
``Report.parse``, which refuses whatever does not fit. Users: ``planner`` and ``render`` write plans,
``reconcile`` and ``status`` read reports; ``dltrain`` reads plans and writes reports, and imports nothing
else of dljob.
"""

import hashlib
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA = 1
PLAN_KEY = "plan.json"
REPORT_KEY = "report.json"

AGENT_PORT = 7470
"""mTLS, between the agents of one job."""
MPI_PORTS = (7500, 7599)
"""First and last TCP port of Open MPI and its daemons; plaintext, the job's pods only."""
METRICS_PORT = 9470
"""Plain HTTP, read-only: /metrics, /healthz and /readyz."""

TLS_DIR = "/etc/dljob/tls"
"""Where the per-job Secret is mounted: ca.crt, tls.crt, tls.key."""
CHECKPOINT_DIR = "/var/lib/dljob/checkpoints"
"""Where the checkpoint volume is mounted."""
DATASET_DIR = "/var/lib/dljob/dataset"
"""Where a pvc:// dataset's claim is mounted, read-only, and where fetched data is."""

MEASURABLE = ("Ring", "MPI", "Tree", "Butterfly", "HalvingDoubling")
"""Collectives in which every rank is a worker and MPI is all they share: ranks may choose among them by themselves."""

CPUS_VARIABLE = "DLTRAIN_CPUS_M"
"""Environment of a trainer pod: CPUs it requested, in thousandths."""
DATASET_SUMS = "SHA256SUMS"
"""Name of a file of checksums, as sha256sum writes it; a dataset's URI that ends in it means all files it lists."""
DATASET_VARIABLE = "DLJOB_DATASET"
"""Environment of a trainer pod: path of the data behind ``spec.dataset.uri``."""

EXIT_BAD_INPUT = 64
"""Exit code of ranks and of the dataset's init container: the job as written cannot succeed."""

MAX_LOG_TAIL = 4096
MOST_NOISE = 1e9
"""Samples; a larger noise scale is an error of measurement: the largest told of trainings are 1e7 (McCandlish et al.
2018, figure 4)."""
_Text = Annotated[str, Field(max_length=8192)]
_Name = Annotated[str, Field(min_length=1, max_length=253)]
# What a report may claim is bounded: JSON's integers are not, and a date or a float made of 10**400 is an error.
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Seconds = Annotated[float, Field(ge=0, le=1e9)]
_UnixTime = Annotated[float, Field(ge=0, le=2.5e11, description="Seconds; up to the year 9892.")]


def config_map_names(job: str) -> tuple[str, str]:
    """Names of a job's plan and report ConfigMaps."""
    return f"{job}-plan", f"{job}-report"


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Told(Record):
    """Part of a report. A trainer may be newer than the operator, such as after a rollback or with an image of the
    user's: what it says beyond this is passed over, or its jobs would never end. A plan is obeyed whole or not at all.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Role(StrEnum):
    WORKER = "worker"
    SERVER = "server"


class Rank(Record):
    """One rank: where it runs and its share of the global batch."""

    rank: Annotated[int, Field(ge=0)]
    pod: _Name
    host: Annotated[_Name, Field(description="DNS name of the pod, reachable before the pod is ready.")]
    group: _Name
    device: _Name
    local_rank: Annotated[int, Field(ge=0, description="Index among the ranks of the pod; its GPU, if any.")] = 0
    gpu: Annotated[bool, Field(description="Whether device is a GPU's product name; else a class of CPU nodes.")] = (
        False
    )
    share: Annotated[
        int,
        Field(
            ge=0,
            description="Samples of the global batch: its own, or all of them where it has a part of the model; 0 for "
            "a parameter server.",
        ),
    ]
    role: Role = Role.WORKER


class ModelRef(Record):
    name: str | None = None
    command: tuple[str, ...] = ()
    framework: Literal["DLTrain", "Torchrun"] = "DLTrain"
    sync_batch_norm: bool = False


class DatasetRef(Record):
    """A built-in dataset by name, or a path in the pod."""

    name: str | None = None
    path: str | None = None
    samples: int | None = None


class OptimizerRef(Record):
    name: Literal["SGD", "Adam", "AdamW"] = "SGD"
    learning_rate: Annotated[float, Field(gt=0)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    find_rate: Annotated[bool, Field(description="Whether a range test replaces learning_rate.")] = False
    scaling: Literal["Linear", "SquareRoot", "AdaScale"] | None = None
    base_batch: Annotated[int | None, Field(ge=1, description="Batch that learning_rate is for, with scaling.")] = None

    @model_validator(mode="after")
    def _scaling_has_a_base(self) -> Self:
        if (self.scaling is None) != (self.base_batch is None):
            raise ValueError(f"optimizer: found scaling {self.scaling}, base_batch {self.base_batch}: expected both")
        return self


class CheckpointRef(Record):
    enabled: bool = True
    directory: str = CHECKPOINT_DIR
    interval_s: Annotated[float, Field(gt=0)] = 60.0
    choose_interval: Annotated[
        bool,
        Field(description="Whether ranks choose it once they know what a checkpoint costs; interval_s until then."),
    ] = False
    keep: Annotated[int, Field(ge=1)] = 3
    faults: Annotated[int, Field(ge=0, description="Of the run before this launch; filled in by the agents.")] = 0
    trained_s: Annotated[float, Field(ge=0, description="In steps before it; filled in by the agents.")] = 0.0


class Expectation(Record):
    """What the operator predicted, so that the trainer can export it beside what it measures."""

    step_s: Annotated[float, Field(ge=0)] = 0.0
    step_p90_s: Annotated[float, Field(ge=0)] = 0.0
    total_s: Annotated[float, Field(ge=0)] = 0.0


class Plan(Record):
    """What the operator decided, complete: a trainer needs nothing else but the volume.

    Laws: ranks are numbered 0..n-1 in order, shares sum to ``global_batch`` (where ranks split the model, each is it),
    every worker has a share >= 1, exactly one of ``epochs`` and ``steps`` is set.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    job: _Name
    namespace: _Name
    uid: _Name
    number: Annotated[int, Field(ge=1)]
    term: Annotated[int, Field(ge=1, description="Raised by the operator when it fences a lost node.")] = 1
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1)]
    global_batch: Annotated[int, Field(ge=1)]
    collective: Literal["Ring", "MPI", "Tree", "Butterfly", "HalvingDoubling", "ParameterServer", "Torch"] = "Ring"
    measure_collective: Annotated[
        bool,
        Field(
            description="Whether ranks measure strategies at their start and use the fastest for each bucket's size."
        ),
    ] = False
    """``collective`` is then what the operator expects of them."""
    compression: Annotated[
        Literal["BF16", "FP16"] | None,
        Field(description="How gradients travel, with error feedback; None: as they are."),
    ] = None
    parallelism: Literal["Data", "Optimizer", "Pipeline", "Tensor"] = "Data"
    synchronization: Literal["Synchronous", "Asynchronous", "StaleSynchronous"] = "Synchronous"
    staleness_bound: Annotated[
        int | None, Field(ge=1, description="Steps that workers may be apart; with StaleSynchronous.")
    ] = None
    micro_batches: Annotated[int, Field(ge=1, description="Parts of a batch that follow each other, in Pipeline.")] = 1
    bucket_nbytes: Annotated[int, Field(ge=4096)] = 4 * 2**20
    segment_nbytes: Annotated[int, Field(ge=1024)] = 128 * 2**10
    model: ModelRef
    dataset: DatasetRef
    optimizer: OptimizerRef = OptimizerRef()
    epochs: Annotated[int | None, Field(ge=1)] = None
    steps: Annotated[int | None, Field(ge=1)] = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    rebalance: Annotated[bool, Field(description="Whether the trainer may move shares by measured speed.")] = True
    checkpoint: CheckpointRef = CheckpointRef()
    compare_steps: Annotated[
        int, Field(ge=0, description="Steps between comparisons of all ranks' parameters; 0: only before checkpoints.")
    ] = 100
    min_ranks: Annotated[int, Field(ge=1, description="The trainer may go on with so few; elastic when < ranks.")] = 1
    backoff_limit: Annotated[int, Field(ge=0)] = 3
    grace_s: Annotated[float, Field(gt=0)] = 60.0
    expected: Expectation = Expectation()

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="after")
    def _laws_hold(self) -> Self:
        if [r.rank for r in self.ranks] != list(range(len(self.ranks))):
            raise ValueError(f"ranks: found {[r.rank for r in self.ranks]}, expected 0..{len(self.ranks) - 1} in order")
        if self.splits_model:
            self._splits_lawfully()
        elif (total := sum(r.share for r in self.ranks)) != self.global_batch:
            raise ValueError(f"ranks: shares sum to {total}, expected global_batch {self.global_batch}")
        for r in self.ranks:
            if (r.share == 0) != (r.role is Role.SERVER):
                raise ValueError(f"ranks: rank {r.rank} is a {r.role} with share {r.share}; only servers have share 0")
        servers = [r.rank for r in self.ranks if r.role is Role.SERVER]
        if servers and (self.collective != "ParameterServer" or 0 in servers):
            raise ValueError(
                f"ranks: {servers} are parameter servers with collective {self.collective}; expected ParameterServer, "
                "and rank 0 to be a worker: it speaks for the job"
            )
        if self.collective == "ParameterServer" and len(self.ranks) > 1 and not servers:
            raise ValueError("ranks: none is a parameter server, expected at least one with collective ParameterServer")
        if self.compression and (self.collective != "Ring" or self.parallelism != "Data" or self.measure_collective):
            raise ValueError(
                f"compression: found collective {self.collective} with parallelism {self.parallelism}, expected Ring, "
                "which it stands for, with Data, and nothing to measure"
            )
        if self.measure_collective and (self.collective not in MEASURABLE or self.parallelism != "Data"):
            raise ValueError(
                f"measure_collective: found collective {self.collective} with parallelism {self.parallelism}, "
                f"expected one of {', '.join(MEASURABLE)} with Data"
            )
        if self.parallelism == "Optimizer" and self.collective not in ("Ring", "Torch") and len(self.ranks) > 1:
            raise ValueError(f"collective: found {self.collective} with parallelism Optimizer, expected Ring or Torch")
        if self.parallelism != "Data" and self.optimizer.scaling == "AdaScale":
            raise ValueError(f"optimizer.scaling: found AdaScale with parallelism {self.parallelism}, expected Data")
        if self.micro_batches > (self.global_batch if self.parallelism == "Pipeline" else 1):
            raise ValueError(
                f"micro_batches: found {self.micro_batches} with parallelism {self.parallelism}, expected at most "
                f"global_batch {self.global_batch} with Pipeline, else 1"
            )
        if (self.staleness_bound is not None) != (self.synchronization == "StaleSynchronous"):
            raise ValueError(
                f"staleness_bound: found {self.staleness_bound} with {self.synchronization}, expected one with "
                "StaleSynchronous alone"
            )
        if self.synchronization != "Synchronous":
            self._apart_lawfully()
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs {self.epochs} and steps {self.steps}: expected exactly one of them")
        if self.min_ranks > len(self.ranks):
            raise ValueError(f"min_ranks {self.min_ranks}: expected at most the {len(self.ranks)} ranks of the plan")
        return self

    def _apart_lawfully(self) -> None:
        """Workers that do not wait for each other, but for one parameter server."""
        servers = sum(r.role is Role.SERVER for r in self.ranks)
        if servers != 1:
            raise ValueError(f"ranks: found {servers} parameter servers with {self.synchronization}, expected 1")
        if self.parallelism != "Data" or self.model.command or self.optimizer.find_rate or self.rebalance:
            raise ValueError(
                f"synchronization: found {self.synchronization} with parallelism {self.parallelism}, a command, "
                "find_rate or rebalance, expected a built-in model with shares that stay as they are"
            )
        if self.optimizer.scaling == "AdaScale":
            raise ValueError(f"optimizer.scaling: found AdaScale with {self.synchronization}, expected Synchronous")

    def _splits_lawfully(self) -> None:
        if any(r.share != self.global_batch for r in self.ranks):
            found = sorted({r.share for r in self.ranks})
            raise ValueError(f"ranks: shares {found} with parallelism {self.parallelism}, expected {self.global_batch}")
        if self.model.command or self.optimizer.find_rate or self.rebalance or self.min_ranks < len(self.ranks):
            raise ValueError(
                f"parallelism: found {self.parallelism} with a command, find_rate, rebalance or min_ranks below "
                f"{len(self.ranks)}, expected a built-in model on ranks that stay as they are"
            )
        if self.collective == "ParameterServer":
            raise ValueError(f"collective: found ParameterServer with parallelism {self.parallelism}, expected another")

    @property
    def splits_model(self) -> bool:
        """Whether ranks hold parts of the model and each sees the whole batch."""
        return self.parallelism in ("Pipeline", "Tensor")

    @property
    def pods(self) -> tuple[str, ...]:
        """Pod names in rank order, each once."""
        return tuple(dict.fromkeys(r.pod for r in self.ranks))

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal text."""
        return self.model_dump_json(by_alias=True)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """A plan from JSON. Raises ValueError (pydantic's) naming the field when it is not one."""
        return cls.model_validate_json(text)

    def digest(self) -> str:
        """12 hex digits over everything but the plan's number, term and expectation: same digest, same training."""
        body = self.model_copy(update={"number": 1, "term": 1, "expected": Expectation()})
        return hashlib.sha256(body.to_json().encode()).hexdigest()[:12]


class RunPhase(StrEnum):
    """Where the job is, as its coordinator sees it."""

    WAITING = "Waiting"
    LAUNCHING = "Launching"
    RUNNING = "Running"
    RELAUNCHING = "Relaunching"
    STOPPED = "Stopped"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class RankMeasure(Told):
    """Means over the last steps of one rank, in seconds."""

    rank: Annotated[int, Field(ge=0, le=100_000)]
    device: Annotated[str, Field(max_length=63)] = ""
    share: _Count = 0
    compute_s: _Seconds = 0.0
    wait_s: _Seconds = 0.0
    comm_s: _Seconds = 0.0
    data_s: _Seconds = 0.0
    forward_s: Annotated[_Seconds, Field(description="Of compute_s: before backward, with the loss.")] = 0.0
    backward_s: Annotated[_Seconds, Field(description="Of compute_s; 0: not told, such as of parts of a model.")] = 0.0
    sum_s: Annotated[_Seconds, Field(description="From the start of a step's first sum to the end of its last.")] = 0.0
    agree_s: Annotated[_Seconds, Field(description="Of comm_s: agreeing that a step commits; 0 if not elastic.")] = 0.0
    wait_cpu_s: Annotated[_Seconds, Field(description="CPU time that wait_s and comm_s cost the process.")] = 0.0
    fetch_s: Annotated[_Seconds, Field(description="Making a batch, by whoever did; data_s is what is felt.")] = 0.0


class ProbePoint(Told):
    """Compute time of one step (forward, backward, update; no communication) measured on a rank's real device."""

    device: Annotated[str, Field(max_length=63)]
    batch: Annotated[int, Field(ge=1, le=2**53)]
    compute_s: Annotated[float, Field(gt=0, le=1e9)]


class Noise(Told):
    """The gradient noise scale of a run (``dltrain.optim.noise_scale``): in samples, from so many of its steps."""

    samples: Annotated[float, Field(ge=0, le=MOST_NOISE)]
    steps: _Count


class Failure(Told):
    """Why the ranks ended, in the words a user needs."""

    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    message: _Text
    rank: _Count | None = None
    host: Annotated[str, Field(max_length=253)] = ""
    exit_code: Annotated[int | None, Field(ge=-(2**31), lt=2**32)] = None
    log_tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)] = ""
    counts: Annotated[bool, Field(description="Whether it counts against backoff_limit.")] = True
    retry: Annotated[bool, Field(description="false: the same plan cannot succeed (bad input).")] = True


class CheckpointMark(Told):
    step: _Count
    unix_s: _UnixTime
    path: Annotated[str, Field(max_length=1024)] = ""


class StartupMarks(Told):
    """Unix times of the start, for the breakdown in status."""

    agents_up_unix_s: _UnixTime | None = None
    launched_unix_s: _UnixTime | None = None
    imported_unix_s: _UnixTime | None = None
    rendezvous_unix_s: _UnixTime | None = None
    first_step_unix_s: _UnixTime | None = None


class Outcome(Told):
    steps: _Count
    seconds: _Seconds
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1)] = None
    checkpoint: Annotated[str | None, Field(max_length=1024)] = None
    report: Annotated[str | None, Field(max_length=1024, description="Path of the run's report, a page.")] = None


class Mismatch(Told):
    """A rank that found another device than its plan names."""

    rank: _Count
    planned: Annotated[str, Field(max_length=63)]
    found: Annotated[str, Field(max_length=63)]


class Report(Told):
    """News of a job from its coordinator; untrusted input for the operator."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    uid: _Name
    plan_number: Annotated[int, Field(ge=1, le=2**53)]
    plan_digest: Annotated[str, Field(max_length=64)]
    term: Annotated[int, Field(ge=1, le=2**53)]
    phase: RunPhase
    unix_s: _UnixTime
    step: _Count = 0
    steps: Annotated[_Count, Field(description="0 while unknown.")] = 0
    epoch: _Count | None = None
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1)] = None
    step_s: Annotated[_Seconds | None, Field(description="Mean over the last steps.")] = None
    samples_per_s: Annotated[float | None, Field(ge=0, le=1e15)] = None
    world_size: _Count = 0
    ranks: Annotated[tuple[RankMeasure, ...], Field(max_length=4096)] = ()
    restarts: Annotated[dict[_Name, _Count], Field(max_length=32)] = {}
    failures: Annotated[_Count, Field(description="Failures that counted against backoff_limit.")] = 0
    failure: Failure | None = None
    last_checkpoint: CheckpointMark | None = None
    startup: StartupMarks = StartupMarks()
    outcome: Outcome | None = None
    mismatches: Annotated[tuple[Mismatch, ...], Field(max_length=4096)] = ()
    probes: Annotated[tuple[ProbePoint, ...], Field(max_length=1024, description="Never from a mismatched rank.")] = ()
    link_latency_s: Annotated[_Seconds | None, Field(description="Measured between ranks at start.")] = None
    link_bandwidth_Bps: Annotated[float | None, Field(gt=0, le=1e15)] = None
    noise: Annotated[Noise | None, Field(description="None: not measured, such as on one rank.")] = None

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """A report from JSON of at most 1 MiB. Raises ValueError naming the field when it is not one."""
        if len(text) > 2**20:
            raise ValueError(f"report: found {len(text)} bytes, expected at most {2**20}")
        return cls.model_validate_json(text)


def schema_of(text: str | bytes) -> Any:
    """The schema number a document claims, or None: to tell 'newer than I know' from 'broken'."""
    import json

    document = json.loads(text)
    return document.get("schema") if isinstance(document, dict) else None
