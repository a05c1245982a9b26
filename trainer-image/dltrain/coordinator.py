"""The coordinator of a job: gathers its pods, launches the ranks, watches, ends and relaunches them, and reports.

It runs in the agent of the plan's first pod, or of the next one that lives while an elastic job's first is lost; who
takes over takes a higher term. Everything that happens arrives in one queue, is noted by ``_take``, and the procedure
in ``_coordinate`` waits on conditions over what is known. Users: ``agent``.
"""

import asyncio
import logging
import time

from dljob.contract import Failure, Outcome, Plan, Report, RunPhase
from dltrain import agentproto as proto
from dltrain import finished
from dltrain.diagnosis import World, delay_s, diagnose, explained, obituary
from dltrain.exchange import Reporter
from dltrain.fewer import fewer
from dltrain.ledger import Ledger
from dltrain.links import Connected, Links, Lost, Said
from dltrain.messages import Failed, Finished, Mark, Resharded, Shrunk, Step
from dltrain.mpirun import Launcher
from dltrain.procedure import Event, LeavingError, Procedure, ReplannedError
from dltrain.processes import Exit, Reaper
from dltrain.roll import Roll, term_after
from dltrain.runreport import files as runreport
from dltrain.settings import Settings
from dltrain.tls import Identity

log = logging.getLogger(__name__)

SETTLE_S = 0.5
"""After the first sign of trouble: time for the cause to arrive after its echo."""
FAREWELL_S = 10.0
"""After the result: time for all ranks to end by themselves."""
END_S = 10.0
GATHER_S = 1.0
"""Before an elastic job goes on without a pod: time for it to be back, as one is whose agent merely restarted."""
SHRINK_S = 3.0
"""After the death of a rank: time for the others to say that they go on without it."""
RELAUNCH_COST_S = 5.0
"""A relaunch that brings ranks back must gain more than this."""
LEAVE_MARGIN_S = 3.0
"""Of a pod's grace period, kept for ending what did not end by itself."""
COORDINATOR_LOST = Failure(reason="CoordinatorLost", message="another one has taken over", counts=False)
TERMINAL = (RunPhase.SUCCEEDED, RunPhase.FAILED)


class Coordinator(Procedure):
    """Coordinates one plan after another, from ``run`` on, until it is told to leave or superseded."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        reaper: Reaper,
        env: dict[str, str],
        reporter: Reporter,
        plan: Plan,
        previous: Report | None,
        *,
        acting: bool = False,
    ) -> None:
        """``acting``: in the place of the plan's first pod, which was lost."""
        super().__init__()
        self.settings, self.reaper, self.env, self.reporter = settings, reaper, env, reporter
        self.plan = plan
        self.ledger = Ledger(plan, previous)
        self._account = runreport.Keeper(self.ledger, time.time())
        self.done = asyncio.Event()
        self.reporter.compose = lambda: self.ledger.report(time.time())
        self._previous = previous
        self._links = Links(identity.client, settings.agent_port, self._events.put_nowait)
        self._roll = Roll(settings, self._links, plan, term_after(plan, previous), acting=acting)
        self.ledger.term = self._roll.term
        self._prepared: set[str] = set()
        self._ending: set[str] = set()
        self._world: World | None = None
        self._worlds = 0
        self._trained = False
        """Whether ranks have made a step under this plan, by whichever coordinator they were launched."""
        self._fruitless = 0
        self._launcher = Launcher(settings, reaper, env, self._links)
        self._stopping = False

    # What others ask of it

    async def launch_daemon(self, host: str, command: str) -> tuple[int, str]:
        """In the place of ``ssh HOST COMMAND``: until the peer's MPI daemon ends; its exit code and last output."""
        return await self._launcher.launch_daemon(host, command)

    # The procedure

    async def run(self) -> None:
        """Returns after ``leave``. Raises SupersededError."""
        try:
            while True:
                try:
                    await self._coordinate()
                except ReplannedError:
                    await self._stop_world(self.plan.grace_s)
                    self._adopt()
        except LeavingError:
            over = self.ledger.phase in TERMINAL
            self._phase(self.ledger.phase if over else RunPhase.STOPPED)
            await self._stop_world(max(1.0, self.plan.grace_s - LEAVE_MARGIN_S))
            if not over:
                await self._account.write(RunPhase.STOPPED, time.time())
            self.reporter.urge()
        finally:
            self._launcher.end()
            await self._links.close()
            self.done.set()

    async def _coordinate(self) -> None:
        """One plan, up to its end and beyond: afterwards it stays, since a restarted pod wants to know."""
        self._roll.call(self.plan)
        if (outcome := finished.read(self.plan)) is not None:
            self.ledger.outcome = outcome
            await self._idle(RunPhase.SUCCEEDED)
        previous, self._previous = self._previous, None
        if previous is not None and previous.uid == self.plan.uid:
            if previous.phase in TERMINAL and previous.plan_digest == self.plan.digest():
                await self._idle(previous.phase)
            if previous.phase in (RunPhase.LAUNCHING, RunPhase.RUNNING, RunPhase.RELAUNCHING):
                if not 0 < previous.world_size < len(self.plan.ranks):  # else this pod's loss was counted by who acted
                    self.ledger.count("CoordinatorLost")
                    self._account.history.fault(COORDINATOR_LOST, time.time())
                self._trained = previous.step > 0 and previous.plan_digest == self.plan.digest()
                self._phase(RunPhase.RELAUNCHING)
        while True:
            await self._gather()
            world = await self._launch()
            if await self._went_well(world):
                await self._succeed(world)
            returning = not world.troubled
            if world.left or returning:
                await self._stop_world(max(1.0, self.plan.grace_s - LEAVE_MARGIN_S))
            if returning:
                log.info("lost ranks come back: all start again")
                self._phase(RunPhase.RELAUNCHING)
                continue
            failure = diagnose(world)
            await self._end_world()
            await self._after(failure, world)

    async def _went_well(self, world: World) -> bool:
        """Watch a world until it is over, or until what went wrong with it can be told, or ranks may come back."""
        while True:
            await self._until(lambda: world.over_or_troubled or bool(world.losses) or self._may_return(world))
            if world.troubled and world.survivable:
                await self._until(lambda: not (world.troubled and world.survivable), SHRINK_S)
            if world.over_or_troubled or not world.losses:
                break
            self._mourn(world)
        if world.troubled:
            await self._until(lambda: world.succeeded or explained(world), SETTLE_S)
        if world.outcome is None and not world.succeeded:
            return False
        await self._until(lambda: world.over, FAREWELL_S)
        return True

    def _may_return(self, world: World) -> bool:
        """Whether the ranks that others go on without should come back, at the price of a relaunch."""
        gain_s = self.ledger.gain_s(world.missing(self.plan), len(self.plan.ranks))
        waited = time.monotonic() - world.shrunk_s > self.settings.return_after_s
        return waited and gain_s > RELAUNCH_COST_S and self._roll.complete and self.plan.checkpoint.enabled

    def _mourn(self, world: World) -> None:
        """Tell of ranks that were lost and that the others go on without. The job did not fail: nothing counts."""
        for end in world.losses:
            failure = obituary(world, end).model_copy(update={"counts": False})
            log.warning("%s: %s; the others go on", failure.reason, failure.message)
            self._failed(failure)
            self.ledger.count(failure.reason)
            world.mourned.add(end.rank)
        self.reporter.urge()

    async def _gather(self) -> None:
        """Until every pod of the plan is connected, has the plan, and is not about to leave; or enough of them are,
        where the job has trained before."""
        if self.ledger.phase is not RunPhase.RELAUNCHING:
            self._phase(RunPhase.WAITING)
        if self._trained:
            await self._until(lambda: self._roll.complete, GATHER_S)
            await self._until(lambda: fewer(self.plan, self._roll.present) is not None)
        else:
            await self._until(lambda: self._roll.complete)
        self.ledger.mark_start(agents_up_unix_s=time.time())

    async def _launch(self) -> World:
        self._worlds += 1
        plan = fewer(self.plan, self._roll.present)
        assert plan is not None, "gathered"
        now_s = time.monotonic()
        world = World(plan, f"{self.ledger.term}.{self._worlds}", now_s, shrunk_s=now_s)
        self._world, self._stopping = world, False
        self.ledger.begin_world(plan)
        self._account.history.begin_world(self.plan, plan, time.time())
        self._prepared.clear()
        self._links.send_all(proto.Prepare(world=world.name, pods=plan.pods))
        await self._until(lambda: self._prepared >= set(plan.pods) or world.troubled)
        if world.troubled:
            return world
        self.ledger.mark_start(launched_unix_s=time.time())
        if self.ledger.phase is not RunPhase.RELAUNCHING:
            self._phase(RunPhase.LAUNCHING)
        if self.plan.model.framework == "Torchrun":
            self._links.send_all(proto.StartRanks(world=world.name))
        else:
            try:
                self._start_mpirun(world)
            except (ValueError, OSError) as error:
                failure = Failure(reason="LaunchFailed", message=str(error), retry=not isinstance(error, ValueError))
                world.failures.append((0, failure))
        return world

    async def _succeed(self, world: World) -> None:
        seconds = time.monotonic() - world.started_s
        step = self.ledger.report(time.time()).step
        outcome = world.outcome or Outcome(steps=step, seconds=seconds)
        report = await self._account.write(RunPhase.SUCCEEDED, time.time(), outcome)
        outcome = self.ledger.outcome = outcome.model_copy(update={"report": report})
        finished.write(self.plan, outcome)
        self.ledger.failure = None
        await self._end_world()
        await self._idle(RunPhase.SUCCEEDED)

    async def _after(self, failure: Failure, world: World) -> None:
        """Count, tell, and wait before the next launch; or give up."""
        log.warning("%s: %s", failure.reason, failure.message)
        self._failed(failure)
        self.ledger.failures += failure.counts
        if not failure.retry or self.ledger.failures > self.plan.backoff_limit:
            await self._account.write(RunPhase.FAILED, time.time())
            await self._idle(RunPhase.FAILED)
        self.ledger.count(failure.reason)
        self._fruitless = 0 if world.progressed or not failure.counts else self._fruitless + 1
        self._phase(RunPhase.RELAUNCHING)
        await self._until(lambda: False, delay_s(self._fruitless))

    async def _idle(self, phase: RunPhase) -> None:
        """Nothing more to do under this plan."""
        self._phase(phase)
        await self._until(lambda: False)

    async def _stop_world(self, grace_s: float) -> None:
        """Let the ranks checkpoint and end, then end what is left."""
        world = self._world
        if world is not None:
            self._stopping = True
            self._links.send_all(proto.StopRanks(world=world.name, grace_s=grace_s))
            ranks = world.plan.ranks
            await self._until(lambda: all(world.gone(rank) for rank in ranks), grace_s, interruptible=False)
        await self._end_world()

    async def _end_world(self) -> None:
        """Nothing of the world is left on any pod that can be reached."""
        world, self._world = self._world, None
        self._account.history.halted(time.time())
        self._launcher.end()
        if world is None:
            return
        waiting = self._links.connected
        self._links.send_all(proto.EndWorld(world=world.name))
        self._ending = waiting
        await self._until(lambda: not self._ending & self._links.connected, END_S, interruptible=False)

    # What is known

    def _tick(self) -> None:
        world = self._world
        if world is not None and not self._stopping and world.outcome is None and world.hung is None:
            world.hung = self.ledger.silent_rank(time.monotonic())
        if world is not None:
            self._account.tick(time.time())

    def _take(self, event: Event) -> None:
        match event:
            case Plan():
                self._planned(event)
            case Connected(pod, welcome):
                self._roll.welcome(pod, welcome, fresh=self._worlds == 0)
                self.ledger.term = self._roll.term
            case Lost(pod, why):
                self._roll.lost(pod)
                if self._world is not None and pod in self._world.plan.pods:
                    self._world.lost.setdefault(pod, why)
                self._launcher.daemon_ended(pod, 1, why)
            case Said(pod, line):
                self._said(pod, line)

    def _planned(self, plan: Plan) -> None:
        if plan.uid != self.plan.uid or plan.number < self.plan.number or plan == self.plan:
            return
        if plan.digest() != self.plan.digest():
            self._new_plan = plan
            return
        self.plan = self.ledger.plan = plan  # the same training under a new number or term
        self._roll.call(plan)
        self.ledger.term = self._roll.term
        self.reporter.urge()

    def _adopt(self) -> None:
        """Go over to the new plan: everyone of the old one learns it, those without a rank in it idle."""
        assert self._new_plan is not None
        self.plan, self._new_plan = self._new_plan, None
        if self.ledger.phase is RunPhase.FAILED:
            self.ledger.failures, self.ledger.failure = 0, None
        self.ledger.plan = self.plan
        self.ledger.phase = RunPhase.WAITING
        self._fruitless = 0
        self._trained = False
        self._roll.call(self.plan)  # everyone of the old plan learns the new one before links to them end
        self.ledger.term = self._roll.term

    def _said(self, pod: str, line: proto.Line) -> None:
        world = self._world
        match line:
            case proto.Assigned() | proto.Refused():
                self._roll.answered(pod, line)
            case proto.Leaving():
                self._roll.leaves(pod)
                if world is not None and pod in world.plan.pods:
                    world.left.add(pod)
            case proto.WorldEnded():
                self._ending.discard(pod)
            case _ if world is None or getattr(line, "world", None) != world.name:
                return
            case proto.Prepared():
                self._prepared.add(pod)
            case proto.RankUp():
                world.up.add(line.rank)
                if self.plan.model.command and len(world.up) == len(world.plan.ranks):
                    self._running()
            case proto.RankNews():
                self._news(line, world)
            case proto.RankEnded():
                world.ended[line.rank] = line
                self.ledger.forget_rank(line.rank)
            case proto.DaemonEnded():
                self._launcher.daemon_ended(pod, line.exit_code, line.tail)

    def _news(self, line: proto.RankNews, world: World) -> None:
        news = line.news
        if news.rank in world.ended:
            return
        transition = self.ledger.hear(news, time.monotonic())
        self._account.history.hear(news, self.ledger.leader, time.time())
        match news:
            case Step():
                world.progressed = self._trained = True
                self._running()
            case Mark(what="first_step"):
                self._running()
            case Failed() if not world.left:  # what fails after a pod has begun to leave is its echo
                world.failures.append((news.rank, news.failure))
            case Shrunk():
                self._shrank(news, world)
            case Resharded() if news.rank == self.ledger.leader:
                log.info("shares from step %d: %s; %s", news.step, news.shares, news.reason)
            case Finished() if news.rank == self.ledger.leader:
                world.outcome = news.outcome
        if transition:
            self.reporter.urge()

    def _shrank(self, news: Shrunk, world: World) -> None:
        absent = {rank.rank for rank in world.plan.ranks} - set(news.alive)
        if absent - world.absent:
            log.info("ranks %s go on from step %d, after %.3f s", news.alive, news.step, news.shrink_s)
            world.absent |= absent
            world.shrunk_s = time.monotonic()

    # What it does

    def _start_mpirun(self, world: World) -> None:
        world.launcher_runs = True

        def ended(end: Exit, tail: str) -> None:
            world.launcher, world.launcher_tail, world.launcher_runs = end, tail, False

        self._launcher.start(world.plan, world.name, ended)

    def _running(self) -> None:
        if self.ledger.phase in (RunPhase.LAUNCHING, RunPhase.RELAUNCHING):
            self._phase(RunPhase.RUNNING)

    def _failed(self, failure: Failure) -> None:
        self.ledger.failure = failure
        self._account.history.fault(failure, time.time())

    def _phase(self, phase: RunPhase) -> None:
        if phase is not self.ledger.phase:
            log.info("phase %s", phase)
        self.ledger.phase = phase
        self._roll.tell(phase)
        self.reporter.urge()
