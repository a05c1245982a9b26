"""Accumulate the messages of a run into its report, in bounded memory. The module does no I/O and reads no clock.

If steps are repeated after a restart, they replace the earlier ones, so that a series contains each step once.
"""

from collections import Counter
from collections.abc import Mapping

from dlcontract import Failure, MeasuredEnergy, Outcome, Plan, Rank, RankMeasure, RunPhase, Upload, reasons
from dltrain.protocol.rank_messages import (
    Analyzed,
    Checkpointed,
    CheckpointSkipped,
    Chosen,
    Evaluated,
    Logged,
    RankMessage,
    Resharded,
    Shrunk,
    Step,
)
from dltrain.protocol.upload_messages import Uploaded
from dltrain.record.run_report.document import (
    CAPACITY,
    AttemptRecord,
    Checkpoint,
    Document,
    Evaluation,
    Fault,
    HeldOutAnalysis,
    LoggedValues,
    PlanEntry,
    Point,
    RankTotal,
    Split,
    merged,
    place,
    thinned,
)
from dltrain.record.run_report.learning_curves import diagnose
from dltrain.record.run_report.logged_series import with_logged

SHARES = 20_000
"""Maximum number of local batch sizes that one report stores, summed over all changes of the split and all ranks."""


class History:
    """Accumulate the messages and events of one run for its run report.

    ``unix_s``: Unix time at which a new report begins. ``previous``: the report that an earlier coordinator (the agent
    that directs the job) has written and that is continued; None: begin a new report.
    """

    def __init__(self, plan: Plan, unix_s: float, previous: Document | None = None) -> None:
        self._plan = self._placed = plan
        self._document = previous or Document(
            job=plan.job,
            namespace=plan.namespace,
            uid=plan.uid,
            model=plan.model.name or " ".join(plan.model.command),
            dataset=plan.dataset.name or plan.dataset.path or "",
            global_batch=plan.global_batch,
            seed=plan.seed,
            term=plan.term,
            phase=RunPhase.WAITING,
            started_unix_s=unix_s,
            updated_unix_s=unix_s,
        )
        before = self._document
        self._points, self._min_steps = list(before.points), before.least_steps
        self._evaluations, self._checkpoints = list(before.evaluations), list(before.checkpoints)
        self._metrics, self._analysis = list(before.metrics), before.analysis
        self._plans, self._splits, self._attempts = list(before.plans), list(before.splits), list(before.attempts)
        self._faults, self._sums = list(before.faults), before.sums
        self._totals = before.totals
        self._ranks = {total.place: total for total in before.ranks}
        self._measures: dict[int, RankMeasure] = {}
        self._last_steps: dict[int, int] = {}
        """Step number that each rank reported in its last update of this attempt (launch of all ranks)."""
        self._used_J: dict[int, float] = {}
        """Energy in joules that each rank reported in its last update of this attempt (launch of all ranks)."""
        self._down_since: float | None = next((f.unix_s for f in self._faults if f.resumed_unix_s is None), None)
        self._split_known = False
        self._led = False
        """True if a rank has reported a step for the job in this attempt. A lower rank may report for it from then on,
        and be some steps behind."""
        self._launched_at = 0
        """Number of completed steps when the ranks of the current attempt were launched."""
        self.step, self._steps, self._epoch = before.step, before.steps, before.epoch

    @property
    def faults(self) -> int:
        """Number of faults so far."""
        return sum(self._totals.faults.values())

    @property
    def lost(self) -> int:
        """Number of faults so sudden that no checkpoint could be saved before them.

        These are all faults except stops of pods by SIGTERM.
        """
        return self.faults - self._totals.faults.get(reasons.POD_STOPPED, 0)

    @property
    def steps_repeated(self) -> int:
        """Number of steps that were done twice so far, because a restart resumed before them."""
        return self._totals.steps_repeated

    @property
    def energy(self) -> MeasuredEnergy | None:
        """Return the measured energy of the whole run; None if no counter was readable in it."""
        if self._totals.energy_J is None:
            return None
        ranks = self._placed.ranks
        read = {n for n in self._used_J if n < len(ranks)}
        nodes = {ranks[n].pod for n in read if not ranks[n].gpu}  # One rank reads the counters of its node's CPUs.
        covered = sum(n in read or (not rank.gpu and rank.pod in nodes) for n, rank in enumerate(ranks))
        return MeasuredEnergy(joules=min(self._totals.energy_J, 1e18), part=covered / len(ranks))

    def continue_from(self, step: int, steps_repeated: int) -> None:
        """Continue from the numbers that an earlier coordinator has reported to the operator last.

        ``step``: number of completed steps. ``steps_repeated``: number of steps that were computed twice. The run
        report that this history continues may be older than these numbers.
        """
        self.step = max(self.step, step)
        repeated = max(self._totals.steps_repeated, steps_repeated)
        self._totals = self._totals.model_copy(update={"steps_repeated": repeated})

    @property
    def trained_s(self) -> float:
        """Seconds that the training has spent in steps so far, including steps that were repeated later."""
        return self._totals.training_s

    @property
    def farthest_step(self) -> int:
        """The largest step that a rank has reported in this attempt (launch of all ranks); 0 before the first."""
        return max(self._last_steps.values(), default=0)

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Return the values of a metric so far, as (step, value) in the order of the steps.

        ``metric``: accuracy, loss, or the name of a metric that the script logs.
        """
        if metric == "accuracy" and self._evaluations:
            return [(entry.step, entry.accuracy) for entry in self._evaluations]
        if metric == "loss":
            return [(point.step, point.loss) for point in self._points if point.loss is not None]
        return [(entry.step, entry.values[metric]) for entry in self._metrics if metric in entry.values]

    def begin_attempt(self, whole: Plan, placed: Plan, unix_s: float) -> None:
        """Record that an attempt (a launch of all ranks) of the plan ``whole`` begins at the Unix time ``unix_s``.

        ``placed``: the same plan with only the ranks of the present pods. The rank numbers in the messages of this
        attempt are those in ``placed``.
        """
        self._plan, self._placed = whole, placed
        self._measures, self._last_steps, self._used_J, self._split_known = {}, {}, {}, False
        self._led = False
        expected, digest = whole.expected, whole.digest()
        if not self._plans or (self._plans[-1].number, self._plans[-1].digest) != (whole.number, digest):
            entry = PlanEntry(
                number=whole.number,
                digest=digest,
                unix_s=unix_s,
                step=self.step,
                ranks=len(whole.ranks),
                collective=whole.collective,
                predicted_step_s=expected.step_s or None,
                predicted_total_s=expected.total_s or None,
            )
            self._plans = thinned([*self._plans, entry])

    def record(self, message: RankMessage, leader: int, unix_s: float) -> None:
        """Record a message of a rank, which arrived at the Unix time ``unix_s``.

        ``leader``: the rank whose progress represents the job.
        """
        match message:
            case Step():
                self._stepped(message, leader, unix_s)
            case Evaluated() if message.rank == leader:
                entry = Evaluation(step=message.step, unix_s=unix_s, accuracy=message.accuracy, loss=message.loss)
                self._evaluations = thinned([*self._evaluations, entry])
            case Logged() if message.rank == leader:
                logged = LoggedValues(step=message.step, unix_s=unix_s, values=message.values)
                self._metrics = with_logged(self._metrics, logged)
            case Analyzed():
                self._analysis = HeldOutAnalysis(step=message.step, unix_s=unix_s, analysis=message.analysis)
            case Chosen() if message.rank == leader and not self._sums:
                self._sums = message.sums
            case Checkpointed(mark=mark):
                self._saved(mark.step, mark.unix_s, message.duration_s, message.nbytes)
            case Uploaded(upload=Upload(duration_s=float(spent_s)) as made):
                step = self.step if made.step is None else made.step
                self._saved(step, made.unix_s, spent_s, made.nbytes)
            case CheckpointSkipped():
                skipped = self._totals.checkpoints_skipped + 1
                self._totals = self._totals.model_copy(update={"checkpoints_skipped": skipped})
            case Resharded() if message.rank == leader and len(message.shares) == len(self._placed.ranks):
                self._split(dict(enumerate(message.shares)), message.step, unix_s, message.reason)
            case Shrunk():
                self._measures = {rank: measure for rank, measure in self._measures.items() if rank in message.alive}

    def fault(self, failure: Failure, unix_s: float) -> None:
        """Record a fault at the Unix time ``unix_s``. The time from then until the next step counts as downtime."""
        fault = Fault(step=self.step, unix_s=unix_s, failure=failure)
        self._faults = thinned([*self._faults, fault])
        counts = Counter(self._totals.faults) + Counter([failure.reason])
        self._totals = self._totals.model_copy(update={"faults": dict(counts)})
        if self._down_since is None:
            self._down_since = unix_s

    def halted(self, unix_s: float) -> None:
        """Record that no rank trains from the Unix time ``unix_s`` on, until a rank reports the next step."""
        self._sized(0, unix_s)

    def document(self, phase: RunPhase, term: int, unix_s: float, outcome: Outcome | None = None) -> Document:
        """Return the present run report.

        ``phase``, ``term``: the job's phase and its coordinator's term. ``unix_s``: present Unix time. ``outcome``: the
        result of the run; None if it has not finished.
        """
        document = self._document.model_copy(
            update={
                "phase": phase,
                "term": term,
                "updated_unix_s": unix_s,
                "step": self.step,
                "steps": self._steps,
                "epoch": self._epoch,
                "outcome": outcome,
                "totals": self._totals,
                "least_steps": self._min_steps,
                "points": tuple(self._points),
                "evaluations": tuple(self._evaluations),
                "metrics": tuple(self._metrics),
                "analysis": self._analysis,
                "plans": tuple(self._plans),
                "splits": tuple(self._splits),
                "sums": self._sums,
                "attempts": tuple(self._attempts),
                "faults": tuple(self._faults),
                "checkpoints": tuple(self._checkpoints),
                "ranks": tuple(self._ranks[name] for name in sorted(self._ranks)),
            }
        )
        return document.model_copy(update={"findings": diagnose(document)})

    def _stepped(self, message: Step, leader: int, unix_s: float) -> None:
        before = self._last_steps.get(message.rank)
        steps = 1 if before is None else message.step - before  # The first update of an attempt reports one step.
        if steps < 1 or message.step < 1 or message.rank >= len(self._placed.ranks):
            return
        if not self._last_steps:
            self._launched_at = message.step - 1
        self._last_steps[message.rank] = message.step
        if message.measure is not None:
            self._measures[message.rank] = message.measure
        self._count(self._placed.ranks[message.rank], message.measure, steps)
        self._add_energy(message)
        if not self._split_known and len(self._measures) == len(self._placed.ranks):
            self._split({n: m.share for n, m in self._measures.items()}, self._launched_at, unix_s, "launched")
        if message.rank != leader:
            return
        if before is None:
            self._go_back(message.step - 1, repeated=not self._led)
        self._led = True
        self._resumed(unix_s)
        self._sized(message.world_size, unix_s)
        self.step, self._steps, self._epoch = message.step, message.steps, message.epoch
        measures = self._measures.values()
        mean = {
            name: sum(getattr(measure, name) for measure in measures) / len(measures)
            for name in ("compute_s", "comm_s", "wait_s", "data_s")
            if measures
        }
        self._add(
            Point(
                step=message.step,
                steps=steps,
                unix_s=unix_s,
                loss=message.loss,
                learning_rate=message.learning_rate,
                gradient_norm=message.gradient_norm,
                step_s=message.step_s,
                predicted_s=self._plan.expected.step_s or None,
                samples_per_s=message.samples_per_s,
                world_size=message.world_size,
                noise_samples=message.noise.samples if message.noise else None,
                **mean,
            )
        )
        training_s = self._totals.training_s + steps * message.step_s
        self._totals = self._totals.model_copy(
            update={"training_s": training_s, "skipped_updates": message.skipped_updates}
        )

    def _count(self, rank: Rank, measure: RankMeasure | None, steps: int) -> None:
        name = place(rank)
        old = self._ranks.get(name) or RankTotal(place=name)
        parts = {
            part: getattr(old, part) + steps * getattr(measure, part)
            for part in ("compute_s", "comm_s", "wait_s", "data_s")
            if measure is not None
        }
        device = measure.device if measure is not None else ""
        self._ranks[name] = old.model_copy(update=parts | {"device": device or rank.device, "steps": old.steps + steps})

    def _add_energy(self, message: Step) -> None:
        """Add the energy that the rank has used since its last update to the totals of the rank and of the run.

        The energy of steps that are repeated after a restart counts each time.
        """
        if message.energy is None:
            return
        more_J = max(0.0, message.energy.joules - self._used_J.get(message.rank, 0.0))
        self._used_J[message.rank] = message.energy.joules
        name, totals = place(self._placed.ranks[message.rank]), self._totals
        old = self._ranks[name]
        self._ranks[name] = old.model_copy(update={"energy_J": (old.energy_J or 0.0) + more_J})
        sources = tuple(sorted({*totals.energy_sources, message.energy.source}))
        self._totals = totals.model_copy(
            update={"energy_J": (totals.energy_J or 0.0) + more_J, "energy_sources": sources}
        )

    def _add(self, point: Point) -> None:
        if self._points and self._points[-1].steps + point.steps <= self._min_steps:
            self._points[-1] = merged(self._points[-1], point)
        else:
            self._points.append(point)
        if len(self._points) <= CAPACITY:
            return
        self._min_steps = max(2 * self._min_steps, 2 * sum(point.steps for point in self._points) // CAPACITY)
        merged_points: list[Point] = []
        for each in self._points:
            if merged_points and merged_points[-1].steps + each.steps <= self._min_steps:
                merged_points[-1] = merged(merged_points[-1], each)
            else:
                merged_points.append(each)
        self._points = merged_points

    def _go_back(self, step: int, *, repeated: bool) -> None:
        """Discard points, evaluations and metrics after ``step``, so that each series contains each step once.

        ``repeated``: True if the discarded steps are computed again, because a restart resumed before them; add them to
        the total of repeated steps. False if another rank reports them.
        """
        if repeated and step < self.step:
            count = self._totals.steps_repeated + self.step - step
            self._totals = self._totals.model_copy(update={"steps_repeated": count})
        self._points = [point for point in self._points if point.step <= step]
        self._evaluations = [entry for entry in self._evaluations if entry.step <= step]
        self._metrics = [entry for entry in self._metrics if entry.step <= step]
        self._analysis = None if self._analysis and self._analysis.step > step else self._analysis

    def _resumed(self, unix_s: float) -> None:
        if self._down_since is None:
            return
        self._faults = [
            fault if fault.resumed_unix_s is not None else fault.model_copy(update={"resumed_unix_s": unix_s})
            for fault in self._faults
        ]
        down_s = self._totals.down_s + max(0.0, unix_s - self._down_since)
        self._totals = self._totals.model_copy(update={"down_s": down_s})
        self._down_since = None

    def _sized(self, size: int, unix_s: float) -> None:
        if (self._attempts[-1].size if self._attempts else 0) != size:
            self._attempts = thinned([*self._attempts, AttemptRecord(step=self.step, unix_s=unix_s, size=size)])

    def _split(self, shares: Mapping[int, int], step: int, unix_s: float, reason: str) -> None:
        if sum(shares.values()) != self._plan.global_batch:
            return  # The local batch sizes were reported at different times.
        self._split_known = True
        by_place = {place(self._placed.ranks[rank]): share for rank, share in sorted(shares.items())}
        if self._splits and self._splits[-1].shares == by_place and self._splits[-1].step <= step:
            return
        capacity = max(16, min(CAPACITY, SHARES // len(by_place)))
        entry = Split(step=step, unix_s=unix_s, shares=by_place, reason=reason)
        self._splits = thinned([*self._splits, entry], capacity)
        self._totals = self._totals.model_copy(update={"splits": self._totals.splits + 1})

    def _saved(self, step: int, unix_s: float, duration_s: float, nbytes: int) -> None:
        entry = Checkpoint(step=step, unix_s=unix_s, duration_s=duration_s, nbytes=nbytes)
        self._checkpoints = thinned([*self._checkpoints, entry])
        totals = self._totals
        self._totals = totals.model_copy(
            update={
                "checkpoints": totals.checkpoints + 1,
                "checkpoint_s": totals.checkpoint_s + duration_s,
                "checkpoint_nbytes": totals.checkpoint_nbytes + nbytes,
            }
        )
