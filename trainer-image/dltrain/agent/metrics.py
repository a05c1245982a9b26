"""The Prometheus metrics of a trainer pod, read from the agent's state at each scrape.

Each label has few different values, such as the ranks of this pod, which limits the number of time series. Values of
ended ranks remain until the next launch of the ranks, so that the last scrape of a job shows its final values.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlcontract import RankMeasure, Record, RunPhase, Uploads
from dltrain.agent.member.local_ranks import LocalRanks
from dltrain.agent.member.member import Member
from dltrain.protocol.rank_messages import Checkpointed, Chosen, Compared, Evaluated, Logged, Probed, Step
from dltrain.record.ledger import Ledger

PREFIX = "dljob_trainer_"
T = TypeVar("T", bound=Record)


@dataclass(frozen=True)
class StepMetric:
    """A gauge that shows one value of a rank's last progress message (``Step``).

    ``name``: the gauge's name without ``PREFIX``. ``text``: its help text. ``value``: returns the value from the
    message, or None if the message lacks it. The gauge then shows nothing for this rank.
    """

    name: str
    text: str
    value: Callable[[Step], float | None]


def _measure(part: Callable[[RankMeasure], float | None]) -> Callable[[Step], float | None]:
    """Return a function that applies ``part`` to the measurement in a progress message, for ``StepMetric.value``.

    ``part``: returns one value of the measurement, such as the seconds of the forward pass. The returned function
    returns None if the message contains no measurement, because the script measured nothing.
    """
    return lambda step: None if step.measure is None else part(step.measure)


STEP_METRICS = (
    StepMetric(
        "step",
        "Steps that this rank has completed. If it does not rise, see last_news_timestamp_seconds and the pod's log.",
        lambda s: s.step,
    ),
    StepMetric("planned_steps", "Steps of the whole training; 0 while unknown.", lambda s: s.steps),
    StepMetric(
        "step_seconds",
        "Mean duration of the last steps. If it is far above expected_step_seconds, look for a straggler.",
        lambda s: s.step_s or None,
    ),
    StepMetric(
        "step_compute_seconds",
        "Part of a step: forward pass, backward pass and update.",
        _measure(lambda m: m.compute_s),
    ),
    StepMetric(
        "step_forward_seconds",
        "Part of step_compute_seconds: forward pass and loss. The rest after forward and backward is the update.",
        _measure(lambda m: m.forward_s or None),
    ),
    StepMetric(
        "step_backward_seconds",
        "Part of step_compute_seconds: backward pass. Absent for model parallelism and asynchronous workers.",
        _measure(lambda m: m.backward_s or None),
    ),
    StepMetric(
        "step_sum_seconds",
        "Time from the start of a step's first all-reduce of gradients to the end of its last all-reduce. Most of this "
        "time overlaps with the backward pass.",
        _measure(lambda m: m.sum_s or None),
    ),
    StepMetric(
        "gradient_bandwidth_bytes_per_second",
        "Bytes of gradients divided by step_sum_seconds. It is below collective_bandwidth_bytes_per_second, which the "
        "probe measured at the start, because the backward pass delays the all-reduce. If it falls while steps take "
        "longer, look for a slow network or a straggler.",
        lambda s: s.gradient_nbytes / s.measure.sum_s if s.measure is not None and s.measure.sum_s else None,
    ),
    StepMetric(
        "step_wait_seconds",
        "Part of a step: waiting for slower ranks. If it is high on most ranks, the rank with a low value is the "
        "straggler.",
        _measure(lambda m: m.wait_s),
    ),
    StepMetric(
        "step_communication_seconds",
        "Part of a step: exposed communication, which does not overlap with computing.",
        _measure(lambda m: m.comm_s),
    ),
    StepMetric(
        "step_agreement_seconds",
        "Part of step_communication_seconds: in an elastic job, ranks agree that every rank has completed the step. 0 "
        "in other jobs.",
        _measure(lambda m: m.agree_s),
    ),
    StepMetric(
        "step_waiting_cpu_seconds",
        "CPU time of this rank's process during step_wait_seconds and step_communication_seconds. If it is close to "
        "the sum of these two metrics, waiting uses up the CPU quota.",
        _measure(lambda m: m.wait_cpu_s),
    ),
    StepMetric(
        "step_data_seconds",
        "Part of a step: waiting for input. If it is more than a tenth of a step, use more loader workers or a faster "
        "volume.",
        _measure(lambda m: m.data_s),
    ),
    StepMetric(
        "step_fetch_seconds",
        "Time in which the rank or a loader worker makes the batch of a step. This time, divided by the number of "
        "loader workers, should be less than step_seconds. The part that delays the step is step_data_seconds.",
        _measure(lambda m: m.fetch_s),
    ),
    StepMetric(
        "share_samples", "Local batch size: samples of each global batch on this rank.", _measure(lambda m: m.share)
    ),
    StepMetric(
        "samples_per_second", "Throughput of the whole job, as this rank sees it.", lambda s: s.samples_per_s or None
    ),
    StepMetric(
        "throughput_per_latency",
        "samples_per_second divided by step_seconds. It rises only if the job gets faster: a larger batch that raises "
        "samples_per_second by less than step_seconds lowers it.",
        lambda s: s.samples_per_s / s.step_s if s.samples_per_s and s.step_s else None,
    ),
    StepMetric("loss", "Last training loss.", lambda s: s.loss),
    StepMetric("learning_rate", "Current learning rate.", lambda s: s.learning_rate),
    StepMetric("gradient_norm", "Last norm of the gradient.", lambda s: s.gradient_norm),
    StepMetric(
        "noise_scale_samples",
        "Gradient noise scale of this run. A batch far below it can be larger at little cost; see spec.batchSizeRange.",
        lambda s: s.noise.samples if s.noise else None,
    ),
    StepMetric(
        "gpu_memory_peak_bytes",
        "Peak GPU memory of this rank's tensors. CUDA's context and NCCL's buffers (about 1 GB) are extra; the plan's "
        "prediction includes both. If it is close to the GPU's memory, a larger batch will fail.",
        lambda s: s.gpu_memory_nbytes,
    ),
    StepMetric(
        "loss_scale",
        "Factor by which the script's GradScaler multiplies losses. Below 1, float16 does not suit the model or a loss "
        "is not finite.",
        lambda s: s.loss_scale,
    ),
    StepMetric(
        "skipped_updates",
        "Steps whose update the script's GradScaler skipped in this run. A few at the start and one in thousands of "
        "steps are normal. If it rises with every step, see loss_scale.",
        lambda s: s.skipped_updates,
    ),
    StepMetric("world_size", "Ranks in the process group.", lambda s: s.world_size),
    StepMetric(
        "update_staleness",
        "Asynchronous training: updates by other workers between this worker's reading of the parameters and its own "
        "update. If it is far above the number of workers, some workers are much slower; see steps_ahead.",
        lambda s: s.staleness,
    ),
    StepMetric(
        "steps_ahead",
        "Asynchronous training: steps that this worker is ahead of the slowest worker. At the staleness bound, this "
        "worker waits for the slowest worker.",
        lambda s: s.ahead,
    ),
)


class TrainerCollector(Collector):
    """Collect the metrics of one pod and, on the coordinator's pod, those of the job.

    ``ledger``: returns the coordinator's record of the job, or None on a pod whose agent is not the coordinator.
    """

    def __init__(self, member: Member, local: LocalRanks, ledger: Callable[[], Ledger | None]) -> None:
        self._member, self._local, self._ledger = member, local, ledger

    def collect(self) -> Iterator[Metric]:
        running = self._local.running
        ranks = self._local.last_ranks
        yield _gauge("rank_up", "1 while this rank's process runs.", {n: float(n in running) for n in ranks})
        yield _gauge(
            "last_news_timestamp_seconds",
            "Time of this rank's last message. If it is old while rank_up is 1, the rank hangs and will be restarted.",
            {n: run.last_message_unix_s for n, run in ranks.items() if run.last_message_unix_s},
        )
        for metric in STEP_METRICS:
            yield _gauge(metric.name, metric.text, {n: metric.value(step) for n, step in self._latest(Step)})
        energy = CounterMetricFamily(
            PREFIX + "energy_joules",
            "Energy that this rank's device used since the rank started, from NVML (its GPU) or RAPL (its pod's part "
            "of the CPUs). Absent if no counter is readable.",
            labels=["rank", "source"],
        )
        for n, step in self._latest(Step):
            if step.energy is not None:
                energy.add_metric([str(n), step.energy.source], step.energy.joules)
        yield energy
        accuracy = {n: evaluated.accuracy for n, evaluated in self._latest(Evaluated)}
        yield _gauge("accuracy_ratio", "Last accuracy on held-out data.", accuracy)
        logged = GaugeMetricFamily(
            PREFIX + "logged_value",
            "Last value of each metric that the script logged with t.log or dltrain.report, at most 16 by name.",
            labels=["rank", "name"],
        )
        for n, message in self._latest(Logged):
            for name, value in message.values.items():
                logged.add_metric([str(n), name], value)
        yield logged
        yield _gauge(
            "parameters_agree",
            "1 if all ranks held the same parameters at the last comparison. 0: memory or a device failed, or the "
            "script changes parameters on some ranks only; see the log.",
            {n: float(compared.agree) for n, compared in self._latest(Compared)},
        )
        saved = dict(self._latest(Checkpointed))
        yield _gauge(
            "checkpoint_timestamp_seconds",
            "Time when the last checkpoint became durable.",
            {n: checkpoint.mark.unix_s for n, checkpoint in saved.items()},
        )
        yield _gauge(
            "checkpoint_duration_seconds",
            "Duration of writing the last checkpoint.",
            {n: checkpoint.duration_s for n, checkpoint in saved.items()},
        )
        yield _gauge("checkpoint_size_bytes", "Size of the last checkpoint.", {n: c.nbytes for n, c in saved.items()})
        yield _gauge(
            "checkpoint_cost_seconds",
            "Training time lost to the last checkpoint: the pause for its copy, and the CPU time of writing it.",
            {n: c.cost_s for n, c in saved.items()},
        )
        yield _gauge(
            "checkpoint_interval_seconds",
            "Time from the start of a checkpoint to the start of the next one. The spec sets this interval, or the "
            "trainer chooses it from checkpoint_cost_seconds and the job's faults.",
            {n: c.interval_s for n, c in saved.items()},
        )
        probed = dict(self._latest(Probed))
        yield _gauge(
            "link_latency_seconds",
            "Latency between ranks, measured at the start.",
            {n: probe.link_latency_s for n, probe in probed.items()},
        )
        yield _gauge(
            "link_bandwidth_bytes_per_second",
            "Bandwidth between ranks, measured at the start.",
            {n: probe.link_bandwidth_Bps for n, probe in probed.items()},
        )
        bandwidth = GaugeMetricFamily(
            PREFIX + "collective_bandwidth_bytes_per_second",
            "All-reduce bandwidth of the strategy that was fastest at the start, for buffers of at least nbytes. If it "
            "is far below earlier runs, look for other traffic on the network.",
            labels=["rank", "strategy", "nbytes"],
        )
        for n, chosen in self._latest(Chosen):
            for sum_ in chosen.sums:
                bandwidth.add_metric([str(n), sum_.strategy, str(sum_.nbytes)], sum_.bandwidth_Bps)
        yield bandwidth
        yield from self._pod_metrics()
        if (ledger := self._ledger()) is not None:
            yield from _job_metrics(ledger)

    def _latest(self, kind: type[T]) -> Iterator[tuple[int, T]]:
        """Yield (rank, last message of the type ``kind``) for each rank of this pod that has sent such a message."""
        for n, run in self._local.last_ranks.items():
            if isinstance(message := run.latest.get(kind), kind):
                yield n, message

    def _pod_metrics(self) -> Iterator[Metric]:
        plan = self._member.plan
        yield _single("coordinator", "1 on the pod whose agent is the coordinator.", float(self._ledger() is not None))
        yield _single("term", "Highest term of a coordinator that this agent has seen.", self._member.term)
        if plan is not None:
            yield _single("plan_number", "Number of the current plan.", plan.number)
            expected_s = plan.expected.step_s
            yield _single("expected_step_seconds", "Predicted step time; 0: no prediction.", expected_s)
        if (peak_nbytes := self._local.watch.memory.peak_nbytes) > 0:
            yield _single(
                "pod_memory_peak_bytes",
                "Most main memory that this pod has needed since its ranks started, without page cache. If it is close "
                "to the memory that the pod requests, a larger batch will fail; if far below, lower "
                "spec.resources.memory.",
                peak_nbytes,
            )


def _job_metrics(ledger: Ledger) -> Iterator[Metric]:
    phases = GaugeMetricFamily(f"{PREFIX}phase", "1 for the phase the job is in.", labels=["phase"])
    for phase in RunPhase:
        phases.add_metric([phase.value], float(phase is ledger.phase))
    yield phases
    restarts = CounterMetricFamily(f"{PREFIX}restarts", "Restarts of the ranks, by cause.", labels=["cause"])
    for cause, count in ledger.restarts.items():
        restarts.add_metric([cause], count)
    yield restarts
    failures = CounterMetricFamily(f"{PREFIX}failures", "Failures that count towards spec.runPolicy.backoffLimit.")
    failures.add_metric([], ledger.failures)
    yield failures
    yield from _upload_metrics(ledger)
    mismatches = len(ledger.mismatches())
    yield _single(
        "device_mismatches",
        "Ranks on a different device than planned. Their measurements are not used in profiles.",
        mismatches,
    )


def _upload_metrics(ledger: Ledger) -> Iterator[Metric]:
    """Yield the metrics of a script whose checkpoint folder is uploaded. Those of other jobs have no values."""
    uploads = ledger.uploads.uploads
    made = uploads or Uploads()
    for name, text, value in (
        ("uploads", "Commits of the script's checkpoint folder to the object store.", made.count),
        (
            "upload_failures",
            "Attempts to upload the checkpoint folder that failed. If it rises, see the condition CheckpointsUploaded.",
            made.failures,
        ),
        (
            "upload_seconds",
            "Seconds of all uploads, each from its start to the commit. Divided by uploads_total, it must be less than "
            "the time between two checkpoints of the script.",
            made.seconds,
        ),
        ("upload_bytes", "Bytes of new files in all commits. Unchanged files are not sent again.", made.nbytes),
    ):
        family = CounterMetricFamily(PREFIX + name, text)
        if uploads is not None:
            family.add_metric([], value)
        yield family
    latest_unix_s = made.last.unix_s if made.last is not None else ledger.startup.launched_unix_s
    for name, text, latest in (
        (
            "upload_timestamp_seconds",
            "Time of the last commit of the script's checkpoint folder; before the first one, time of the first launch "
            "of the ranks. A failure loses all training since then. If it is old, see the condition "
            "CheckpointsUploaded.",
            latest_unix_s if uploads is not None else None,
        ),
        ("upload_size_bytes", "Size of all files of the last commit.", made.last.nbytes if made.last else None),
    ):
        gauge = GaugeMetricFamily(PREFIX + name, text)
        if latest is not None:
            gauge.add_metric([], latest)
        yield gauge


def _gauge(name: str, text: str, values: Mapping[int, float | None]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=["rank"])
    for rank, value in values.items():
        if value is not None:
            family.add_metric([str(rank)], value)
    return family


def _single(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
