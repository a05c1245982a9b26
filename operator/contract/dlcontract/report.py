"""The trainer's report about a run, in the ConfigMap ``<job>-report``. It is untrusted input for the operator.

Parse it with ``Report.parse``, which rejects invalid reports.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field

from dlcontract.checkpoint.marks import CheckpointMark, Uploads
from dlcontract.record import Count, Name, Seconds, Text, UnixTime, UntrustedRecord
from dlcontract.structure import Structure

MAX_LOG_TAIL = 4096
MAX_OUTPUT = 32 * 2**10
"""Maximum number of bytes of a rank's last output that are stored in ``<job>-logs``, for ``dljob logs``.

They are stored because the pod, and its log with it, is deleted after the job has ended.
"""
MAX_METRICS, MAX_METRIC_NAME = 16, 48
"""Maximum number of metrics that a script may log, and maximum length of a metric's name."""
MAX_WORST_CLASSES, MAX_FINDINGS, MAX_OTHER_MODELS = 3, 8, 5
MAX_REFUSED_SIZES = 32
MAX_POD_NBYTES = 2**50
"""Largest valid memory of a pod in bytes. No machine has as much."""
MAX_PARTS = 64
"""Maximum number of parts of a split model whose memory is reported, and the maximum number of pipeline stages."""
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_./-]*$", max_length=MAX_METRIC_NAME)]
MAX_NOISE = 1e9
"""Largest valid gradient noise scale, in samples.

The largest published scales are 1e7 (McCandlish et al. 2018, figure 4).
"""


class RunPhase(StrEnum):
    """State of the job, as reported by its coordinator (the agent that directs the job's other agents)."""

    WAITING = "Waiting"
    LAUNCHING = "Launching"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    STOPPED = "Stopped"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class RankMeasure(UntrustedRecord):
    """Measured parts of the step time of one rank, in seconds. Each is the mean over the rank's most recent steps.

    ``share``: the rank's local batch size in samples.
    """

    rank: Annotated[int, Field(ge=0, le=100_000)]
    device: Annotated[str, Field(max_length=63)] = ""
    share: Count = 0
    compute_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    comm_s: Seconds = 0.0
    data_s: Seconds = 0.0
    forward_s: Annotated[Seconds, Field(description="Part of compute_s: forward pass and loss.")] = 0.0
    backward_s: Annotated[
        Seconds, Field(description="Part of compute_s: backward pass. 0: unknown, such as with model parallelism.")
    ] = 0.0
    sum_s: Annotated[
        Seconds,
        Field(description="Time from the start of a step's first all-reduce to the end of its last all-reduce."),
    ] = 0.0
    agree_s: Annotated[
        Seconds,
        Field(
            description="Part of comm_s: in an elastic job, ranks agree that every rank has completed the step. 0 in "
            "other jobs."
        ),
    ] = 0.0
    wait_cpu_s: Annotated[Seconds, Field(description="CPU time of the process during wait_s and comm_s.")] = 0.0
    fetch_s: Annotated[
        Seconds,
        Field(
            description="Time in which the rank or a loader worker makes a batch. data_s is the part of this time that "
            "delays the step."
        ),
    ] = 0.0
    power_W: Annotated[
        float | None,
        Field(
            ge=0,
            le=1e6,
            description="Mean power in watts of the rank's GPU or, on CPUs, of all CPUs that the ranks of its pod use. "
            "None: no counter is readable, or another rank of the pod reports this value.",
        ),
    ] = None


class ProbePoint(UntrustedRecord):
    """Measured compute time of one step (forward, backward and update, without communication) on a rank's device.

    ``batch``: number of samples in the step.
    """

    device: Annotated[str, Field(max_length=63)]
    batch: Annotated[int, Field(ge=1, le=2**53)]
    compute_s: Annotated[float, Field(gt=0, le=1e9)]


class Noise(UntrustedRecord):
    """The gradient noise scale of a run in samples, and the number of steps in which it was measured.

    It is the batch size at which the noise of the gradient is as large as the gradient, so that larger batches save few
    steps. The planner uses it to choose a global batch size. ``dltrain.optim.noise_scale`` defines and measures it.
    """

    samples: Annotated[float, Field(ge=0, le=MAX_NOISE)]
    steps: Count


class Failure(UntrustedRecord):
    """The failure that ended the ranks: a reason in CamelCase, a message for the user, and details if known."""

    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    message: Text
    rank: Count | None = None
    host: Annotated[str, Field(max_length=253)] = ""
    exit_code: Annotated[int | None, Field(ge=-(2**31), lt=2**32)] = None
    log_tail: Annotated[str, Field(max_length=MAX_LOG_TAIL)] = ""
    counts: Annotated[bool, Field(description="True: the failure counts towards backoff_limit.")] = True
    retry: Annotated[bool, Field(description="False: the same plan cannot succeed (invalid input).")] = True
    unreachable: Annotated[
        bool,
        Field(
            description="True: of all pods, only this host's pod was lost, and the host's kernel did not answer. The "
            "node or its network failed."
        ),
    ] = False


class StartupMarks(UntrustedRecord):
    """Unix times at which a job reached the stages of its start-up. None: the job has not reached the stage.

    ``status.startup`` of the DLJob shows these times.
    """

    agents_up_unix_s: UnixTime | None = None
    launched_unix_s: UnixTime | None = None
    imported_unix_s: UnixTime | None = None
    rendezvous_unix_s: UnixTime | None = None
    first_step_unix_s: UnixTime | None = None


class MeasuredEnergy(UntrustedRecord):
    """Energy of the ranks' devices, from hardware counters, since the job began.

    ``joules``: sum over all attempts. ``part``: the part of the running ranks whose devices have readable counters.
    """

    joules: Annotated[float, Field(ge=0, le=1e18)]
    part: Annotated[float, Field(ge=0, le=1)]


class StoppedEarly(UntrustedRecord):
    """The reason why a training was complete before its last step: TargetReached or NoImprovement."""

    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    message: Annotated[str, Field(max_length=512)]


class ClassScore(UntrustedRecord):
    """The F1 of a class on held-out data, and its number of samples there."""

    name: Annotated[str, Field(max_length=64)]
    f1: Annotated[float, Field(ge=0, le=1)]
    samples: Count


class ModelScore(UntrustedRecord):
    """The main metric of another model on the same held-out data."""

    name: Annotated[str, Field(max_length=64)]
    value: float


class AnalysisSummary(UntrustedRecord):
    """The short form of the analysis of predictions on held-out data (``dltrain.evaluate``).

    ``metric``, ``value``: the main metric of the task. ``baseline``: that metric of a model that ignores its inputs.
    """

    task: Annotated[str, Field(pattern=r"^[a-z][a-z-]*$", max_length=32)]
    samples: Count
    metric: MetricName
    value: float
    baseline: float | None = None
    calibration_error: Annotated[
        float | None, Field(ge=0, le=1, description="Expected calibration error, 0 to 1. None: unknown.")
    ] = None
    worst_classes: Annotated[tuple[ClassScore, ...], Field(max_length=MAX_WORST_CLASSES)] = ()
    other_models: Annotated[
        tuple[ModelScore, ...],
        Field(
            max_length=MAX_OTHER_MODELS,
            description="Scores of other models, such as a baseline, on the same held-out data.",
        ),
    ] = ()


class RunFinding(UntrustedRecord):
    """Something that the curves or the predictions of a run show, in words."""

    name: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    message: Annotated[str, Field(max_length=512)]


class Outcome(UntrustedRecord):
    steps: Count
    seconds: Seconds
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1)] = None
    checkpoint: Annotated[str | None, Field(max_length=1024)] = None
    report: Annotated[str | None, Field(max_length=1024, description="Path of the run report.")] = None
    stopped: Annotated[StoppedEarly | None, Field(description="Reason of an early end. None: all steps were made.")] = (
        None
    )
    analysis: Annotated[
        AnalysisSummary | None, Field(description="Scores on held-out data. None: the script analysed none.")
    ] = None
    findings: Annotated[
        tuple[RunFinding, ...], Field(max_length=MAX_FINDINGS, description="Findings, the most important one first.")
    ] = ()


class TargetForecast(UntrustedRecord):
    """The step at which a metric is predicted to reach its target (``spec.until``).

    ``earliest_step`` and ``latest_step`` are the ends of the interval that expresses the uncertainty of the prediction.
    """

    step: Count
    earliest_step: Count
    latest_step: Count


class PatienceState(UntrustedRecord):
    """The values that ``until.patience`` has counted, with which the next coordinator continues to count.

    The run report has only some of many values, and a job without a checkpoint volume has no run report.
    """

    metric: Annotated[str, Field(max_length=MAX_METRIC_NAME)]
    larger_is_better: bool
    best_step: Annotated[Count, Field(description="Step of the best value.")]
    last_step: Annotated[Count, Field(description="Step of the last value.")]
    values_since_best: Annotated[Count, Field(description="Number of values after the best one.")]


class TargetProgress(UntrustedRecord):
    """The last and the best value of the metric of ``spec.until`` so far."""

    value: float
    best: float
    patience: Annotated[
        PatienceState | None, Field(description="Count of the values. None: the trainer is of an earlier release.")
    ] = None
    forecast: Annotated[
        TargetForecast | None, Field(description="Forecast of the target. None: no forecast is possible.")
    ] = None


class Mismatch(UntrustedRecord):
    """A rank that runs on a different device than its plan expects."""

    rank: Count
    planned: Annotated[str, Field(max_length=63)]
    found: Annotated[str, Field(max_length=63)]


class RefusedSize(UntrustedRecord):
    """A number of ranks, smaller than planned, with which an elastic script failed before it made progress."""

    ranks: Count
    message: Annotated[str, Field(max_length=1024, description="The failure of the script.")]


class PodMemory(UntrustedRecord):
    """The most main memory that a pod has needed with the present plan, and the number of ranks in this pod.

    Page cache that the kernel can drop does not count.
    """

    pod: Name
    ranks: Annotated[int, Field(ge=1, le=4096)]
    peak_nbytes: Annotated[int, Field(ge=1, le=MAX_POD_NBYTES)]
    parts: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_POD_NBYTES)], ...],
        Field(
            max_length=MAX_PARTS,
            description="The most that a rank with each part of a split model has needed: pipeline stages or "
            "tensor-parallel ranks, in their order. 0: unknown. Empty: the model is not split, or into more parts.",
        ),
    ] = ()


class Report(UntrustedRecord):
    """The report that a job's coordinator (the agent that directs the job's other agents) writes for the operator.

    It is untrusted input: parse it with ``parse``.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    uid: Name
    plan_number: Annotated[int, Field(ge=1, le=2**53)]
    plan_digest: Annotated[str, Field(max_length=64)]
    term: Annotated[int, Field(ge=1, le=2**53)]
    phase: RunPhase
    unix_s: UnixTime
    step: Count = 0
    steps: Annotated[Count, Field(description="Steps of the whole training. 0 while unknown.")] = 0
    epoch: Count | None = None
    loss: float | None = None
    accuracy: Annotated[float | None, Field(ge=0, le=1)] = None
    metrics: Annotated[dict[MetricName, float], Field(max_length=MAX_METRICS, description="Logged by the script.")] = {}
    step_s: Annotated[Seconds | None, Field(description="Mean step time over the most recent steps.")] = None
    samples_per_s: Annotated[float | None, Field(ge=0, le=1e15)] = None
    world_size: Count = 0
    ranks: Annotated[tuple[RankMeasure, ...], Field(max_length=4096)] = ()
    restarts: Annotated[dict[Name, Count], Field(max_length=32)] = {}
    failures: Annotated[Count, Field(description="Failures that counted towards backoff_limit.")] = 0
    failure: Failure | None = None
    last_checkpoint: CheckpointMark | None = None
    uploads: Annotated[Uploads | None, Field(description="None: no script whose folder is uploaded.")] = None
    steps_repeated: Annotated[Count, Field(description="Steps done twice, because a restart resumed earlier.")] = 0
    checkpoints_skipped: Annotated[
        Count, Field(description="Stops without a checkpoint, because the grace period was too short.")
    ] = 0
    startup: StartupMarks = StartupMarks()
    outcome: Outcome | None = None
    mismatches: Annotated[tuple[Mismatch, ...], Field(max_length=4096)] = ()
    probes: Annotated[
        tuple[ProbePoint, ...],
        Field(max_length=1024, description="Measurements of ranks that run on the planned device."),
    ] = ()
    link_latency_s: Annotated[Seconds | None, Field(description="Latency between ranks, measured at the start.")] = None
    link_bandwidth_Bps: Annotated[float | None, Field(gt=0, le=1e15)] = None
    noise: Annotated[
        Noise | None, Field(description="Gradient noise scale. None: not measured, such as on one rank.")
    ] = None
    energy: Annotated[
        MeasuredEnergy | None, Field(description="Measured energy. None: no energy counter was readable so far.")
    ] = None
    target: Annotated[
        TargetProgress | None, Field(description="Progress to spec.until. None: no target, or no value yet.")
    ] = None
    refused_sizes: Annotated[
        tuple[RefusedSize, ...],
        Field(
            max_length=MAX_REFUSED_SIZES,
            description="Numbers of ranks that an elastic script refused with this plan. They are not tried again.",
        ),
    ] = ()
    waits_for: Annotated[
        Text | None,
        Field(description="What the launch of the ranks waits for, for the user. None: nothing, or nothing unusual."),
    ] = None
    pod_memory: Annotated[
        PodMemory | None,
        Field(description="Of the pod that needed the most. None: unknown, or the trainer is of an earlier release."),
    ] = None
    structure: Annotated[
        Structure | None, Field(description="Observed costs of a step of the script. None: nothing was observed.")
    ] = None
    bound_ranks: Annotated[
        int | None,
        Field(
            ge=1,
            le=2**31,
            description="The only number of ranks with which the training can continue from its checkpoint, because "
            "each rank has a position of its own in a data stream. None: any number, or the trainer is of an earlier "
            "release.",
        ),
    ] = None

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Parse a report from JSON of at most 1 MiB. If it is invalid, raise a ValueError that names the field."""
        if len(text) > 2**20:
            raise ValueError(f"report: found {len(text)} bytes; expected at most {2**20}")
        return cls.model_validate_json(text)
