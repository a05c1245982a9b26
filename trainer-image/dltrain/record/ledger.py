"""The coordinator's record of the job's progress. It produces the job's report. It does no I/O and reads no clock."""

from collections import Counter
from collections.abc import Iterable, Mapping

from dlcontract import (
    MAX_METRICS,
    MAX_PARTS,
    MAX_POD_NBYTES,
    MAX_REFUSED_SIZES,
    CheckpointMark,
    Failure,
    MeasuredEnergy,
    Mismatch,
    Outcome,
    Plan,
    PodMemory,
    ProbePoint,
    RankMeasure,
    RefusedSize,
    Report,
    Role,
    RunPhase,
    StartupMarks,
    Structure,
    reasons,
)
from dltrain.protocol.rank_messages import (
    Checkpointed,
    CheckpointSkipped,
    Evaluated,
    Finished,
    Hello,
    Logged,
    Mark,
    Observed,
    Probed,
    RankMessage,
    Resharded,
    Shrunk,
    Step,
)
from dltrain.protocol.upload_messages import NotUploaded, Uploaded
from dltrain.record.hang_detection import HANG_MIN_S, HangDetector
from dltrain.record.upload_record import UploadRecord

MAX_MEASURES = 1024
"""Maximum number of ranks whose measurements are in the report. A rank takes up to 370 bytes, and the operator reads at
most 512 KiB."""
MAX_MISMATCHES = 256
"""Maximum number of ranks in the report whose device is not the planned one.

One such rank suffices to set the job's condition and to leave the profiles (stored measurements) unchanged.
"""


def _first_worker(plan: Plan) -> int:
    """Return the lowest rank that computes gradients. A server as rank 0 evaluates and logs nothing."""
    return next(rank.rank for rank in plan.ranks if rank.role is Role.WORKER)


def _sampled(measures: list[RankMeasure]) -> tuple[RankMeasure, ...]:
    """Return at most ``MAX_MEASURES`` of the ranks' measurements, in their order.

    These are the first measurement of each device type, and measurements at equal distances in the list.
    """
    if len(measures) <= MAX_MEASURES:
        return tuple(measures)
    chosen = {measure.device: n for n, measure in reversed(list(enumerate(measures)))}
    places = {*chosen.values()}
    rest = MAX_MEASURES - len(places)
    places |= {n * len(measures) // rest for n in range(rest)}
    return tuple(measures[n] for n in sorted(places)[:MAX_MEASURES])


class Ledger:
    """Accumulate the messages that ranks send, from which ``report`` makes the job's report to the operator.

    The ledger belongs to the coordinator, the agent that directs the job. Its counters, such as that of restarts,
    continue after a restart of the ranks, and when another pod becomes coordinator.
    """

    def __init__(self, plan: Plan, previous: Report | None, hang_min_s: float = HANG_MIN_S) -> None:
        """Create the record of a job. ``previous``: the last report of an earlier coordinator, or None.

        ``hang_min_s``: least silence in seconds after which a rank counts as hung.
        """
        self.plan = self._placed = plan
        self.term = plan.term
        self.phase = RunPhase.WAITING
        self.restarts: dict[str, int] = {}
        self._stops = 0
        """Restarts by the stop of pods that count when the ranks are launched again."""
        self.failures = 0
        self.failure: Failure | None = None
        self.outcome: Outcome | None = None
        self.steps_repeated = 0
        """Number of steps that were computed twice so far, because a restart resumed before them.

        The owner of the ledger copies it from the run report.
        """
        self.energy: MeasuredEnergy | None = None
        """Energy of the ranks' devices so far; None: no counter was readable.

        The owner of the ledger copies it from the run report."""
        self.checkpoints_skipped = 0
        self.startup = StartupMarks()
        self.refused_sizes: tuple[RefusedSize, ...] = ()
        """Numbers of ranks with which an elastic script failed. It is not launched with these again."""
        self._structure: Structure | None = None
        self.pod_memory: PodMemory | None = None
        """The most memory that a pod has needed with ``plan``, in all attempts; None: unknown."""
        self._before: Report | None = None
        self._step: Step | None = None
        self._evaluated: Evaluated | None = None
        self._metrics: dict[str, float] = {}
        self._checkpoint: CheckpointMark | None = None
        self.uploads = UploadRecord()
        self._measures: dict[int, RankMeasure] = {}
        self._found: dict[int, str] = {}
        self._probes: dict[tuple[str, int], ProbePoint] = {}
        self._link: tuple[float | None, float | None] = (None, None)
        self._world_size = 0
        self._reporting: set[int] = set()
        """Ranks of this attempt (launch of all ranks) that call ``dltrain.report``."""
        self.leader = _first_worker(plan)
        """The rank whose progress represents the job: the lowest remaining worker, or the lowest rank that reports if
        the script does not call ``dltrain.init``."""
        self._hangs = HangDetector(hang_min_s)
        if previous is not None and previous.uid == plan.uid:
            self._resume(previous)
        self.refused_sizes = with_earlier(plan, self.refused_sizes)

    def _resume(self, previous: Report) -> None:
        self._before = previous
        self.restarts = dict(previous.restarts)
        self.failures = previous.failures
        self.failure = previous.failure
        self.outcome = previous.outcome
        self.steps_repeated = previous.steps_repeated
        self.checkpoints_skipped = previous.checkpoints_skipped
        self.energy = previous.energy
        self._metrics = dict(previous.metrics)
        self.startup = previous.startup
        self._checkpoint, self.uploads = previous.last_checkpoint, UploadRecord(previous.uploads)
        self._probes = {(point.device, point.batch): point for point in previous.probes}
        self._link = (previous.link_latency_s, previous.link_bandwidth_Bps)
        self._structure = previous.structure
        if previous.plan_digest == self.plan.digest():
            self.refused_sizes, self.pod_memory = previous.refused_sizes, previous.pod_memory

    @property
    def step(self) -> int:
        """Return the number of completed steps; 0 before the first step.

        Before the first update of this coordinator's ranks, this is the number that an earlier coordinator reported
        last.
        """
        last = self._step or self._before
        return last.step if last is not None else 0

    @property
    def bound_ranks(self) -> int | None:
        """Return the only number of ranks with which the training can continue; None: any number.

        Each of them has a position of its own in a data stream. Before the first update of this coordinator's ranks,
        return what an earlier coordinator reported last.
        """
        last = self._step or self._before
        return last.bound_ranks if last is not None else None

    def begin_attempt(self, plan: Plan, now_s: float) -> None:
        """Begin an attempt (a launch of all ranks) with the ranks of ``plan``. Discard the state of earlier ranks.

        ``now_s``: present time on a monotonic clock.
        """
        self._placed = plan
        self.restarts = dict(Counter(self.restarts) + Counter({reasons.POD_STOPPED: self._stops}))
        self._stops = 0
        self._hangs.begin_attempt(self.restarts.get(reasons.HUNG, 0), now_s)
        self.uploads.launched(now_s)
        self._measures.clear()
        self._found.clear()
        self._reporting.clear()
        self._world_size = 0
        self.leader = _first_worker(plan)

    def mark_start(self, **marks: float) -> None:
        """Set the times at which milestones of the job's start were reached. After the first step, do nothing.

        ``marks``: keyword arguments, each with the name of a field of ``StartupMarks`` and the Unix time in seconds.
        """
        if self.startup.first_step_unix_s is None:
            self.startup = self.startup.model_copy(update=marks)

    def record(self, message: RankMessage, now_s: float) -> bool:
        """Record one message of a rank. Return True if the job's report should be sent at once because of it.

        ``now_s``: time of arrival on a monotonic clock.
        """
        if isinstance(message, Observed):  # It is not a progress update, so silence after it is no hang.
            transition, self._structure = self._structure is None, message.structure
            return transition
        if isinstance(message, (Uploaded, NotUploaded)):  # The process that uploads sends it, not the rank.
            return self.uploads.record(message)
        transition = False
        self._hangs.record(message, now_s)
        match message:
            case Hello():
                self._found[message.rank] = message.device
                transition = any(m.rank == message.rank for m in self.mismatches())
            case Mark():
                transition = self._marked(message)
            case Step():
                if message.measure is not None:
                    self._measures[message.rank] = message.measure
                if message.reported:
                    self._reporting.add(message.rank)
                    self.leader = min(self._reporting)
                if message.rank == self.leader:
                    transition = self._world_size == 0  # The first update of an attempt.
                    self._world_size = message.world_size
                    self._step = message
                    self.uploads.stepped(message.step, now_s)
            case Evaluated() if message.rank == self.leader or message.rank not in self._reporting:
                self._evaluated = message
            case Logged() if message.rank == self.leader:
                merged = self._metrics | message.values
                self._metrics = dict(list(merged.items())[:MAX_METRICS])
            case Checkpointed():
                self._checkpoint = message.mark
                transition = True
            case CheckpointSkipped():
                self.checkpoints_skipped += 1
                transition = True
            case Probed():
                self._probed(message)
            case Resharded():
                transition = True
            case Shrunk():
                transition = self._world_size != len(message.alive)
                self.leader, self._world_size = min(message.alive), len(message.alive)
                self._measures = {n: measure for n, measure in self._measures.items() if n in message.alive}
            case Finished():
                self.outcome = message.outcome
        return transition

    def count(self, cause: str) -> None:
        """Count a restart by its ``cause``, a reason such as ``reasons.HUNG``.

        The loss of a rank also counts as a restart if the other ranks continue. A restart by the stop of pods counts
        when the ranks are launched again: if the operator stops all pods of the job, for example to move it to other
        nodes, those of others may stop some seconds before that of the coordinator, and nothing restarts.
        """
        if cause == reasons.POD_STOPPED:
            self._stops += 1
        else:
            self.restarts = dict(Counter(self.restarts) + Counter([cause]))

    def record_memory(self, pod: str, nbytes: int, of_ranks: Mapping[int, int]) -> None:
        """Record that a pod has needed so many bytes of main memory in the present attempt.

        ``of_ranks``: bytes that each of its ranks has needed. The largest of the ranks with the same part of a split
        model counts.
        """
        ranks = [rank.rank for rank in self._placed.ranks if rank.pod == pod]
        if not ranks or not 0 < nbytes <= MAX_POD_NBYTES:
            return
        known = self.pod_memory or PodMemory(pod=pod, ranks=len(ranks), peak_nbytes=nbytes)
        if nbytes > known.peak_nbytes:
            known = known.model_copy(update={"pod": pod, "ranks": len(ranks), "peak_nbytes": nbytes})
        self.pod_memory = known.model_copy(update={"parts": self._parts_memory(ranks, known.parts, of_ranks)})

    def _parts_memory(self, ranks: list[int], known: tuple[int, ...], found: Mapping[int, int]) -> tuple[int, ...]:
        plan = self._placed
        if not plan.splits_model or plan.split_over > MAX_PARTS:
            return ()
        count = plan.split_over
        parts = list(known) if len(known) == count else [0] * count
        for rank in ranks:
            if found.get(rank, 0) <= MAX_POD_NBYTES:
                parts[rank % count] = max(parts[rank % count], found.get(rank, 0))
        return tuple(parts)

    def forget_rank(self, number: int) -> None:
        """Exclude a rank that has ended from hang detection, because it sends no more messages."""
        self._hangs.forget(number)

    def silent_rank(self, now_s: float) -> tuple[int, float] | None:
        """Return (rank that hangs, seconds since its last message), or None if no rank hangs.

        ``now_s``: present time on the monotonic clock that ``record`` uses.
        """
        return self._hangs.hung(now_s)

    def excuse(self, seconds: float) -> None:
        """Do not count ``seconds`` of the ranks' silence as a hang, because ranks or agents could not run in this time.

        This applies to all ranks, because they wait for the one that cannot run. For each rank, at most ten times its
        time limit is excused.
        """
        self._hangs.excuse(seconds)

    def gain_s(self, missing: int, ranks: int) -> float | None:
        """Return the seconds that the job would save if its ``missing`` lost ranks returned now.

        ``ranks``: number of planned ranks. The estimate is the time for the remaining steps, multiplied by ``missing``
        / ``ranks``. It is None before the first step, and if the number of steps is unknown.
        """
        step = self._step
        if step is None or not step.steps:
            return None
        return (step.steps - step.step) * step.step_s * missing / ranks

    def mismatches(self) -> tuple[Mismatch, ...]:
        """Return the ranks whose device differs from the planned one, among those that have reported their device."""
        return tuple(
            Mismatch(rank=n, planned=self._placed.ranks[n].device[:63], found=found[:63])
            for n, found in sorted(self._found.items())
            if found and n < len(self._placed.ranks) and found != self._placed.ranks[n].device
        )

    def report(self, unix_s: float) -> Report:
        """Return the present state of the job for the operator. ``unix_s``: present Unix time, stored in the report."""
        step, evaluated, before = self._step or self._before, self._evaluated, self._before
        # Another plan, such as on other devices, has other step times.
        timed = step if self._step or (before and before.plan_number == self.plan.number) else None
        accuracy = before.accuracy if before else None
        if evaluated or self.outcome:
            accuracy = self.outcome.accuracy if self.outcome else evaluated.accuracy if evaluated else None
        return Report(
            uid=self.plan.uid,
            plan_number=self.plan.number,
            plan_digest=self.plan.digest(),
            term=self.term,
            phase=self.phase,
            unix_s=unix_s,
            step=self.step,
            steps=step.steps if step else self.plan.steps or 0,
            epoch=step.epoch if step else None,
            loss=step.loss if step else None,
            accuracy=accuracy,
            metrics=self._metrics,
            step_s=timed.step_s if timed else None,
            samples_per_s=timed.samples_per_s if timed else None,
            world_size=self._world_size or self._launched,
            ranks=_sampled([self._measures[n] for n in sorted(self._measures)]),
            restarts=self.restarts,
            failures=self.failures,
            failure=self.failure,
            last_checkpoint=self._checkpoint,
            uploads=self.uploads.uploads,
            steps_repeated=self.steps_repeated,
            checkpoints_skipped=self.checkpoints_skipped,
            startup=self.startup,
            outcome=self.outcome,
            mismatches=self.mismatches()[:MAX_MISMATCHES],
            probes=tuple(self._probes.values())[:1024],
            link_latency_s=self._link[0],
            link_bandwidth_Bps=self._link[1],
            noise=step.noise if step else None,
            energy=self.energy,
            refused_sizes=self.refused_sizes[:MAX_REFUSED_SIZES],
            structure=self._structure,
            pod_memory=self.pod_memory,
            bound_ranks=self.bound_ranks,
        )

    @property
    def _launched(self) -> int:
        """Return the number of ranks of an elastic script that runs, but reports no steps; 0 for other jobs."""
        return len(self._placed.ranks) if self.plan.model.elastic and self.phase is RunPhase.RUNNING else 0

    def _marked(self, mark: Mark) -> bool:
        name = f"{mark.what}_unix_s"
        latest = max(mark.unix_s, getattr(self.startup, name) or 0.0)
        if mark.what == "first_step":
            if mark.rank != 0 or self.startup.first_step_unix_s is not None:
                return False
            latest = mark.unix_s
        self.mark_start(**{name: latest})
        return mark.what == "first_step"

    def _probed(self, probed: Probed) -> None:
        if all(mismatch.rank != probed.rank for mismatch in self.mismatches()):
            self._probes |= {(point.device, point.batch): point for point in probed.points}
        latency_s, bandwidth_Bps = self._link
        self._link = (
            probed.link_latency_s if probed.link_latency_s is not None else latency_s,
            probed.link_bandwidth_Bps if probed.link_bandwidth_Bps is not None else bandwidth_Bps,
        )


def with_earlier(plan: Plan, sizes: Iterable[RefusedSize]) -> tuple[RefusedSize, ...]:
    """Return the numbers of ranks that the script refuses, with those that it refused under earlier plans."""
    known = {size.ranks: size for size in sizes}
    earlier = {
        ranks: RefusedSize(ranks=ranks, message="it did so with an earlier plan") for ranks in plan.refused_ranks
    }
    return tuple((earlier | known).values())
