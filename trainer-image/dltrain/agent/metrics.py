"""Every metric of a trainer pod, read from the agent's state at each scrape.

The only labels are ``rank`` (the pod's own, a handful), enumerations, and sizes in powers of four. Values of ranks
that ended stay until the next launch, so that the last scrape of a job shows its end.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlcontract import Record, RunPhase
from dltrain.agent.member.local_ranks import LocalRanks
from dltrain.agent.member.member import Member
from dltrain.protocol.rank_messages import Checkpointed, Chosen, Compared, Evaluated, Probed, Step
from dltrain.record.ledger import Ledger

PREFIX = "dljob_trainer_"
T = TypeVar("T", bound=Record)


@dataclass(frozen=True)
class OfStep:
    """A gauge that shows a figure of a rank's last ``Step``."""

    name: str
    text: str
    value: Callable[[Step], float | None]


OF_STEP = (
    OfStep(
        "step",
        "Steps done by this rank. Not rising: see last_news_timestamp_seconds and the pod's log.",
        lambda s: s.step,
    ),
    OfStep("planned_steps", "Steps in all; 0 while unknown.", lambda s: s.steps),
    OfStep(
        "step_seconds",
        "Duration of a step, mean of the last ones. Far above expected_step_seconds: look for a slow rank.",
        lambda s: s.step_s,
    ),
    OfStep("step_compute_seconds", "Of a step: forward, backward and update.", lambda s: s.measure.compute_s),
    OfStep(
        "step_forward_seconds",
        "Of step_compute_seconds: forward, with the loss. What neither this nor backward is of it is the update.",
        lambda s: s.measure.forward_s or None,
    ),
    OfStep(
        "step_backward_seconds",
        "Of step_compute_seconds: backward. Not told of models in parts and of workers without lockstep.",
        lambda s: s.measure.backward_s or None,
    ),
    OfStep(
        "step_sum_seconds",
        "From the start of a step's first sum of gradients to the end of its last: most of it hides behind backward.",
        lambda s: s.measure.sum_s or None,
    ),
    OfStep(
        "gradient_bandwidth_bytes_per_second",
        "Gradients by step_sum_seconds. Below collective_bandwidth_bytes_per_second, the probe's at the start, by what "
        "backward holds back; falling while steps grow longer: the network, or a slow rank.",
        lambda s: s.gradient_nbytes / s.measure.sum_s if s.measure.sum_s else None,
    ),
    OfStep(
        "step_wait_seconds",
        "Of a step: waiting for slower ranks. High on most ranks: the one with little of it is the slow one.",
        lambda s: s.measure.wait_s,
    ),
    OfStep(
        "step_communication_seconds",
        "Of a step: communication that did not hide behind compute.",
        lambda s: s.measure.comm_s,
    ),
    OfStep(
        "step_agreement_seconds",
        "Of a step's communication: agreeing that it commits, where ranks may go on without lost ones. Else 0.",
        lambda s: s.measure.agree_s,
    ),
    OfStep(
        "step_waiting_cpu_seconds",
        "Of a step: CPU time spent while waiting and communicating. Near that time: waiting burns the CPU quota.",
        lambda s: s.measure.wait_cpu_s,
    ),
    OfStep(
        "step_data_seconds",
        "Of a step: waiting for input. More than a tenth of a step: use more loader workers or a faster volume.",
        lambda s: s.measure.data_s,
    ),
    OfStep(
        "step_fetch_seconds",
        "Making a step's batch, by the rank or whoever did it ahead. By the number of workers it should be less than a "
        "step; what is felt of it is step_data_seconds.",
        lambda s: s.measure.fetch_s,
    ),
    OfStep("share_samples", "Samples of each global batch that this rank computes.", lambda s: s.measure.share),
    OfStep(
        "samples_per_second", "Samples per second of the whole job, as this rank sees it.", lambda s: s.samples_per_s
    ),
    OfStep("loss", "Training loss, last known.", lambda s: s.loss),
    OfStep("learning_rate", "Learning rate in use.", lambda s: s.learning_rate),
    OfStep("gradient_norm", "Norm of the gradient, last known.", lambda s: s.gradient_norm),
    OfStep(
        "noise_scale_samples",
        "Gradient noise scale of this run: batches far below it may be larger at little cost; see spec.batchSizeRange.",
        lambda s: s.noise.samples if s.noise else None,
    ),
    OfStep(
        "gpu_memory_peak_bytes",
        "Most of its GPU's memory that this rank's tensors took. CUDA's context and NCCL's buffers (about 1 GB) come "
        "on top, and the plan predicts both; near the GPU's own size: the next larger batch fails.",
        lambda s: s.gpu_memory_nbytes,
    ),
    OfStep(
        "loss_scale",
        "What the script's GradScaler multiplies losses by. Below 1: float16 does not suit the model, or a loss is not "
        "finite.",
        lambda s: s.loss_scale,
    ),
    OfStep(
        "skipped_updates",
        "Steps whose update the script's GradScaler has left out in this run. A few at the start and one in thousands "
        "of steps are usual; rising with every step: see loss_scale.",
        lambda s: s.skipped_updates,
    ),
    OfStep("world_size", "Ranks that take part.", lambda s: s.world_size),
    OfStep(
        "update_staleness",
        "Without lockstep: updates by other workers between this one's reading of the parameters and its own update. "
        "Far above the number of workers: some are much slower; see steps_ahead.",
        lambda s: s.staleness,
    ),
    OfStep(
        "steps_ahead",
        "Without lockstep: steps that this worker has done more than the slowest one. At the bound: it waits for that "
        "one.",
        lambda s: s.ahead,
    ),
)


class TrainerCollector(Collector):
    """Metrics of one pod; on the coordinator's pod those of the job, too."""

    def __init__(self, member: Member, local: LocalRanks, ledger: Callable[[], Ledger | None]) -> None:
        self._member, self._local, self._ledger = member, local, ledger

    def collect(self) -> Iterator[Metric]:
        running = self._local.running
        ranks = self._local.last_ranks
        yield _gauge("rank_up", "1 while this rank's process runs.", {n: float(n in running) for n in ranks})
        yield _gauge(
            "last_news_timestamp_seconds",
            "When this rank said something last. Long ago while rank_up is 1: it hangs, and is relaunched.",
            {n: run.heard_unix_s for n, run in ranks.items() if run.heard_unix_s},
        )
        for metric in OF_STEP:
            yield _gauge(metric.name, metric.text, {n: metric.value(step) for n, step in self._latest(Step)})
        energy = CounterMetricFamily(
            PREFIX + "energy_joules",
            "Energy that this rank's device used since the rank began, by NVML (its GPU) or RAPL (its node's CPUs). "
            "None where no counter can be read.",
            labels=["rank", "source"],
        )
        for n, step in self._latest(Step):
            if step.energy is not None:
                energy.add_metric([str(n), step.energy.source], step.energy.joules)
        yield energy
        accuracy = {n: evaluated.accuracy for n, evaluated in self._latest(Evaluated)}
        yield _gauge("accuracy_ratio", "Accuracy on held-out data, last known.", accuracy)
        yield _gauge(
            "parameters_agree",
            "1 if all ranks held the same parameters when last compared. 0: memory or a device erred; see the log.",
            {n: float(compared.agree) for n, compared in self._latest(Compared)},
        )
        saved = dict(self._latest(Checkpointed))
        yield _gauge(
            "checkpoint_timestamp_seconds",
            "When the last checkpoint became durable.",
            {n: checkpoint.mark.unix_s for n, checkpoint in saved.items()},
        )
        yield _gauge(
            "checkpoint_duration_seconds",
            "What the last checkpoint took.",
            {n: checkpoint.duration_s for n, checkpoint in saved.items()},
        )
        yield _gauge("checkpoint_size_bytes", "Size of the last checkpoint.", {n: c.nbytes for n, c in saved.items()})
        yield _gauge(
            "checkpoint_cost_seconds",
            "What the last checkpoint cost the training: standing still for its copy, and the CPU time of writing it.",
            {n: c.cost_s for n, c in saved.items()},
        )
        yield _gauge(
            "checkpoint_interval_seconds",
            "From one checkpoint to the next: as given, or chosen by that cost and the job's faults.",
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
            "Bytes of gradients summed per second by the strategy found fastest at the start, from that size on. Far "
            "below what it was before: look for other traffic on the network.",
            labels=["rank", "strategy", "nbytes"],
        )
        for n, chosen in self._latest(Chosen):
            for sum_ in chosen.sums:
                bandwidth.add_metric([str(n), sum_.strategy, str(sum_.nbytes)], sum_.bandwidth_Bps)
        yield bandwidth
        yield from self._of_the_pod()
        if (ledger := self._ledger()) is not None:
            yield from _of_the_job(ledger)

    def _latest(self, kind: type[T]) -> Iterator[tuple[int, T]]:
        """Every rank's last news of a kind."""
        for n, run in self._local.last_ranks.items():
            if isinstance(news := run.latest.get(kind), kind):
                yield n, news

    def _of_the_pod(self) -> Iterator[Metric]:
        plan = self._member.plan
        yield _single("coordinator", "1 on the pod whose agent coordinates the job.", float(self._ledger() is not None))
        yield _single("term", "Highest coordinator's term seen.", self._member.term)
        if plan is not None:
            yield _single("plan_number", "Number of the plan in force.", plan.number)
            expected_s = plan.expected.step_s
            yield _single("expected_step_seconds", "Step time that the operator predicted; 0: none.", expected_s)


def _of_the_job(ledger: Ledger) -> Iterator[Metric]:
    phases = GaugeMetricFamily(f"{PREFIX}phase", "1 for the phase the job is in.", labels=["phase"])
    for phase in RunPhase:
        phases.add_metric([phase.value], float(phase is ledger.phase))
    yield phases
    restarts = CounterMetricFamily(f"{PREFIX}restarts", "Relaunches of the ranks, by cause.", labels=["cause"])
    for cause, count in ledger.restarts.items():
        restarts.add_metric([cause], count)
    yield restarts
    failures = CounterMetricFamily(f"{PREFIX}failures", "Failures that count against the back-off limit.")
    failures.add_metric([], ledger.failures)
    yield failures
    mismatches = len(ledger.mismatches())
    yield _single("device_mismatches", "Ranks on another device than planned; they teach no profile.", mismatches)


def _gauge(name: str, text: str, values: Mapping[int, float | None]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=["rank"])
    for rank, value in values.items():
        if value is not None:
            family.add_metric([str(rank)], value)
    return family


def _single(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
