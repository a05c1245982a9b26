"""The operator's decisions, made by its own code: order, plans, back-fill, growth, and the assignment of devices.

The simulator takes the place of the cluster: pods are bound at once. The operator's planner makes all plans, on the
nodes that its ledger shows.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

from benchmarks.scheduling.foresight import Foresight
from benchmarks.scheduling.joint_foresight import (
    JointForesight,
    Knowledge,
    candidate,
    joint_jobs,
    next_s,
    options,
)
from benchmarks.scheduling.plans import PLANS
from benchmarks.scheduling.simulator import SHORT_S, Run, State
from benchmarks.scheduling.workload import START_S, view

from dljob.cluster import ClusterView
from dljob.planner.types import Choice
from dljob.reconcile.planning.resize import MIN_STEPS
from dljob.scheduling import (
    MIN_LEFT_S,
    BoundPod,
    Holder,
    Interval,
    Ledger,
    NodeCapacity,
    PossiblePlan,
    QueuedJob,
    QueuePolicy,
    Requests,
    Reservation,
    RunningJob,
    Shadow,
    Shares,
    StartSearch,
    Use,
    Waiter,
    dominant_share,
    forecast,
    gain,
    in_order_of_ends,
    interval,
    latest_start,
    shadow,
    start_in_s,
    start_up,
)
from dljob.scheduling.assignment import Candidate, Choices, Held, Option, assign, assign_all
from dljob.scheduling.assignment.together import fastest_fitting
from dljob.scheduling.gain import MIN_BETWEEN_S
from dljob.scheduling.pace import MEASURED_P90
from dljob.scheduling.parts import free_devices, left_for, part_of

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Placed:
    """A plan with its nodes: (node, devices) of each pod."""

    choice: Choice
    pods: tuple[tuple[str, int], ...]

    @property
    def what(self) -> tuple[tuple[str, int], ...]:
        return self.pods


@dataclass
class Operator:
    """The policy. ``spread``: ratio of the 90th percentile of predicted times to the median.

    Jobs are planned one after another, as with ``queue.assignment: InOrder``. ``together``: waiting jobs are assigned
    together, unless a job is alone. ``all_jobs``: all jobs are assigned together, and running ones move, as with
    ``Together``. ``clairvoyant``: the assignment knows true run times. ``finish_by``: all jobs have
    ``spec.scheduling.finishBy``. ``rested_s``: when jobs may move (``all_jobs``). ``joint``: also has the quota of each
    namespace, which only ``all_jobs`` respects.
    """

    spread: float
    together: bool = False
    all_jobs: bool = False
    clairvoyant: bool = False
    finish_by: bool = False
    tick_s: float = 60.0
    now_s: float = 0.0
    placed: dict[str, Placed] = field(default_factory=dict)
    moved_s: dict[str, float] = field(default_factory=dict)
    rested_s: dict[str, float] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    foresight: Foresight = field(default_factory=Foresight)
    joint: JointForesight = field(default_factory=JointForesight)
    knows: Knowledge = Knowledge.PREDICTIONS

    def __post_init__(self) -> None:
        for node in view().nodes:
            total = Requests(round(node.cpu * 1000), node.free_memory_nbytes, node.devices)
            self.ledger.put_node(node.name, NodeCapacity(node, total))

    def decide(self, now_s: float, active: Sequence[State]) -> Mapping[str, Run | None]:
        self.now_s = now_s
        states = {state.job.name: state for state in active}
        for gone in self.placed.keys() - states.keys():
            self._release(gone)
        before = dict(self.placed)
        if self.all_jobs:
            self._share(now_s, active, states)
            self.tick_s = next_s(now_s, [self.rested_s[name] for name in self.placed], changed=self.placed != before)
        waiting = [state for state in active if state.job.name not in self.placed]
        if not self.all_jobs:
            self._start(now_s, waiting, states)
        if not self.clairvoyant:
            self._foresee(now_s, active, states)
        if not self.all_jobs and all(state.job.name in self.placed for state in active):
            self._grow(now_s, active)
        return {name: self._run(states[name]) for name in states}

    def _run(self, state: State) -> Run | None:
        placed = self.placed.get(state.job.name)
        if placed is None:
            return None
        steps, predicted = state.job.request.total_steps, placed.choice.prediction
        devices = sum(count for _, count in placed.pods)
        return Run(placed.what, devices, predicted.step_s * steps, (predicted.energy_J or 0.0) * steps)

    # Starts

    def _start(self, now_s: float, waiting: Sequence[State], states: Mapping[str, State]) -> None:
        """Start waiting jobs in the order of the queue, with back-fill behind the first that cannot start."""
        left = list(waiting)
        first: State | None = None
        while left:
            left.sort(key=lambda state: self._queued(state, states).place)
            state, free = left[0], self.ledger.view()
            part = self._parts(left)[0] if self.together and len(states) > 1 else None
            left.pop(0)
            if part is not None:
                free = part_of(free, part)
            choice = PLANS.of(state.job.model, free)
            if choice is None:
                # The search for its shadow reservation plans many times. Usually no job could overtake it.
                first = first if first is not None or PLANS.of(state.job.model, view()) is None else state
            elif first is not None:
                before = self._shadow(now_s, first, states)
                if before is not None and not before.after(now_s, self._p90_s(state, choice)):
                    choice = PLANS.of(state.job.model, before.beside(free))
            if choice is not None:
                self._place(state.job.name, choice)
                self.moved_s[state.job.name] = now_s

    def _queued(self, state: State, states: Mapping[str, State]) -> QueuedJob:
        mine, total = Requests(0, 0, self._used(state.job.namespace, states)), self.ledger.total()
        part = dominant_share(mine, Requests(0, 0, total.devices))
        created = EPOCH + timedelta(seconds=state.job.arrival_s)
        return QueuedJob((state.job.namespace, state.job.name), state.job.name, 0, part, created, self._latest(state))

    def _used(self, namespace: str, states: Mapping[str, State]) -> int:
        """Return the number of devices that the jobs of a namespace hold."""
        mine = (placed for name, placed in self.placed.items() if states[name].job.namespace == namespace)
        return sum(count for placed in mine for _, count in placed.pods)

    def _latest(self, state: State) -> datetime | None:
        """Return when a job must start to meet its deadline with its fastest plan."""
        if not self.finish_by:
            return None
        due = EPOCH + timedelta(seconds=state.job.deadline_s)
        fastest_s = min(use.seconds for use in state.job.uses) * self.spread * state.left
        return latest_start(due, fastest_s, EPOCH + timedelta(seconds=self.now_s))

    def _parts(self, waiting: Sequence[State]) -> Choices:
        return assign([Candidate(0, options(state)) for state in waiting], free_devices(self.ledger.view()))

    def _p90_s(self, state: State, choice: Choice) -> float:
        return choice.prediction.step_s * state.job.request.total_steps * self.spread * state.left

    def _shadow(self, now_s: float, state: State, states: Mapping[str, State]) -> Shadow | None:
        """Return the shadow reservation of the first in line, as ``controller.planning.queueing`` finds it."""
        ends = in_order_of_ends(
            RunningJob((states[name].job.namespace, name), self._left(states[name]).p90) for name in self.placed
        )
        found = PLANS.of(state.job.model, self._after(ends))
        if found is None:
            return None
        search = StartSearch(0, len(ends))
        while not search.done:
            earlier = PLANS.of(state.job.model, self._after(ends[: search.probe]))
            found = earlier or found
            search = search.after(feasible=earlier is not None)
        needs = [_reservation(group.device, group.nodes, group.ranks_per_node) for group in found.groups]
        return shadow(
            now_s + start_in_s(ends, search.possible), self._after(ends[: search.possible]), needs, self._after(())
        )

    def _after(self, ended: Collection[RunningJob]) -> ClusterView:
        return self.ledger.view([uid for job in ended for uid in self._uids(job.key[1])])

    # Forecasts

    def _foresee(self, now_s: float, active: Sequence[State], states: Mapping[str, State]) -> None:
        """Forecast the starts of the jobs that begin to wait now."""
        waiting = [state for state in active if state.job.name not in self.placed]
        for state in active:
            if self.all_jobs:
                self.joint.arrived(state, options(state), self.spread)
            else:
                self.foresight.arrived(state.job, self._waiter(state, states))
        self.joint.calibration.learn([state.job.name for state in waiting], now_s)
        if all(state.job.name in self.foresight.start for state in waiting):
            return
        if self.all_jobs:
            queue = sorted(active, key=lambda state: self._queued(state, states).place)
            held = partial(self._held, now_s)
            jobs = joint_jobs(
                now_s, queue, self._options, held, self.moved_s, self.rested_s, self.spread,
                partial(self._due_s, now_s), self.joint.allowed,
            )  # fmt: skip
            free = free_devices(self.ledger.view())
            measured = {state.job.name for state in active if self._is_measured(state)}
            for name, start in self.joint.forecast(now_s, jobs, free, self.knows, self.tick_s, measured).items():
                self.foresight.note(name, now_s, start)
            return
        waiting.sort(key=lambda state: self._queued(state, states).place)
        starts_up = start_up(START_S for name in self.placed if states[name].left < 1)
        holders = []
        for name, placed in self.placed.items():
            state = states[name]
            left = self._left(state) if state.left < 1 else self._left(state).plus(starts_up)
            uses = tuple(Use(node, count, 0.0, 0) for node, count in placed.pods)
            holders.append(Holder((state.job.namespace, name), left, uses))
        shares = Shares(Requests(0, 0, self.ledger.total().devices), QueuePolicy())
        line = [self._waiter(state, states) for state in waiting]
        found = forecast(self.ledger.view(), holders, line, shares, self.foresight.recent(now_s), starts_up)
        for (_, name), each in found.items():
            self.foresight.note(name, now_s, each.start)

    def _left(self, state: State) -> Interval:
        """Return percentiles of the remaining seconds of a running job's training, as ``job.remaining`` predicts them.

        The measured step time shows the job's noise as soon as it trains.
        """
        run = self._run(state)
        assert run is not None
        return interval(state.left * run.seconds * (state.job.noise if state.left < 1 else 1.0), self.spread)

    def _waiter(self, state: State, states: Mapping[str, State]) -> Waiter:
        uses = sorted(state.job.uses, key=lambda use: use.seconds)
        plans = tuple(
            PossiblePlan(
                interval(use.seconds * state.left, self.spread),
                (_reservation(use.device, use.nodes, use.devices // use.nodes),),
            )
            for use in uses
        )
        return Waiter((state.job.namespace, state.job.name), plans, self._queued(state, states))

    # All jobs together

    def _share(self, now_s: float, active: Sequence[State], states: Mapping[str, State]) -> None:
        """Assign devices to waiting and running jobs together, as the controller does.

        Running jobs move if that pays or if others wait. A waiting job whose part is not free yet waits while jobs
        move; otherwise it takes what the parts of the others leave.
        """
        line = sorted(active, key=lambda state: self._queued(state, states).place)
        parts: Choices = (None,) * len(line)
        moves: tuple[bool, ...] = (False,) * len(line)
        if len(line) > 1:  # A job that is alone may use all devices, also of several types.
            jobs = [
                candidate(
                    now_s, state, self._options(state), self._due_s(now_s, state), state.job.name in self.placed,
                    self.joint.allowed,
                )
                for state in line
            ]  # fmt: skip
            held = [self._held(now_s, state) for state in line]
            found = assign_all(jobs, held, free_devices(view()), START_S)
            parts, moves = found.parts, found.moves
            for state, moved in zip(line, moves, strict=True):
                if moved:
                    self._release(state.job.name)
        # A job that moves has reserved its part before it stops, so that no waiting job can take it.
        for state, part, _ in sorted(zip(line, parts, moves, strict=True), key=lambda each: not each[2]):
            if state.job.name not in self.placed and part is not None:
                self._start_on(now_s, state, self._within_quota(state, states, part_of(self.ledger.view(), part)))
        waiting = [pair for pair in zip(line, parts, strict=True) if pair[0].job.name not in self.placed]
        for state, _ in () if any(moves) else waiting:
            others = [part for other, part in waiting if other is not state and other.job.name not in self.placed]
            self._start_on(now_s, state, self._within_quota(state, states, left_for(self.ledger.view(), others)))

    def _within_quota(self, state: State, states: Mapping[str, State], view: ClusterView) -> ClusterView:
        """Return the nodes with what a job may use: what its fastest option within the quota needs, if there is one."""
        if not self.joint.allowed:
            return view
        left = self.joint.allowed[0] - self._used(state.job.namespace, states)
        most = {device: min(left, count) for device, count in free_devices(view).items()}
        option = fastest_fitting(self._options(state), most)
        return ClusterView(()) if option is None else part_of(view, option)

    def _start_on(self, now_s: float, state: State, view: ClusterView) -> None:
        choice = PLANS.of(state.job.model, view)
        if choice is not None:
            self._place(state.job.name, choice)
            # The report of the 20th step ends the first rest. Forecasts cannot know its time beforehand.
            first_s, name = START_S + MIN_STEPS * choice.prediction.step_s * state.job.noise, state.job.name
            self.rested_s[name] = now_s + (MIN_BETWEEN_S if name in self.moved_s else first_s)
            self.moved_s[name] = now_s

    def _due_s(self, now_s: float, state: State) -> float | None:
        """Return the most predicted seconds with which a job meets its deadline; None: the operator knows none."""
        if not self.finish_by:
            return None
        start_s = 0.0 if state.job.name in self.placed else START_S
        spread = min(self.spread, MEASURED_P90) if self._is_measured(state) else self.spread
        return (state.job.deadline_s - now_s - start_s) / spread

    def _is_measured(self, state: State) -> bool:
        """Return True if the operator knows the step time of a job, because it trains."""
        return state.job.name in self.placed and state.left < 1

    def _known_noise(self, state: State) -> float:
        """Return true run time / predicted run time of a job, as far as the policy knows it."""
        return state.job.noise if self.clairvoyant or self._is_measured(state) else 1.0

    def _options(self, state: State) -> tuple[Option, ...]:
        """Return the options of a job. One that is slower than predicted is as slow with each, as ``slowdown`` says."""
        known = self._known_noise(state)
        return options(state, known if self.clairvoyant else max(1.0, known))

    def _held(self, now_s: float, state: State) -> Held:
        placed, run = self.placed.get(state.job.name), self._run(state)
        if placed is None or run is None:
            return Held({})
        held = Counter[str]()
        for group in placed.choice.groups:
            held[group.device] += group.nodes * group.ranks_per_node
        left_s = state.left * run.seconds * self._known_noise(state)
        movable = now_s >= self.rested_s[state.job.name] - SHORT_S and left_s >= MIN_LEFT_S
        return Held(held, left_s, movable, (held.total(),))

    def _grow(self, now_s: float, active: Sequence[State]) -> None:
        """Move running jobs to better plans, one after another, while no job waits."""
        for state in active:
            name = state.job.name
            old = self._run(state)
            assert old is not None
            if now_s - self.moved_s[name] < MIN_BETWEEN_S or state.left * old.seconds < MIN_LEFT_S:
                continue
            choice = PLANS.of(state.job.model, self.ledger.view(self._uids(name)))
            assert choice is not None
            steps = round(state.left * state.job.request.total_steps)
            now = self.placed[name].choice.prediction.step_s
            # The measured step time shows the job's noise. The operator then scales its prediction by it.
            measured = now * state.job.noise
            found = gain(steps, measured, predicted_s=now, other_s=choice.prediction.step_s, restart_s=START_S)
            if found.worthwhile:
                self._release(name)
                self._place(name, choice)
                self.moved_s[name] = now_s

    # The cluster

    def _uids(self, name: str) -> list[str]:
        return [f"{name}/{i}" for i in range(len(self.placed[name].pods))]

    def _place(self, name: str, choice: Choice) -> None:
        """Bind the pods of a plan to the nodes with the most free devices."""
        pods: list[tuple[str, int]] = []
        for group in choice.groups:
            fitting = [
                node
                for node in self.ledger.view().nodes
                if node.device == group.device and node.free_devices >= group.ranks_per_node
            ]
            fitting.sort(key=lambda node: (-node.free_devices, node.name))
            assert len(fitting) >= group.nodes, (choice.summary, fitting)
            for node in fitting[: group.nodes]:
                requests = Requests(0, 0, group.ranks_per_node)
                self.ledger.put_pod(f"{name}/{len(pods)}", BoundPod(node.name, requests))
                pods.append((node.name, group.ranks_per_node))
        self.placed[name] = Placed(choice, tuple(pods))

    def _release(self, name: str) -> None:
        for uid in self._uids(name):
            self.ledger.drop_pod(uid)
        del self.placed[name]


def _reservation(device: str, nodes: int, devices: int) -> Reservation:
    return Reservation(device, nodes, devices, 0.0, 0)
