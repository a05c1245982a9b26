"""The coordinator of a job: gathers its pods, launches the ranks, watches, ends and relaunches them, and reports.

It runs in the agent of the plan's first pod, or of the next one that lives while an elastic job's first is lost; who
takes over takes a higher term. What happens is noted by its ``Observer``; here is the procedure that waits on
conditions over what is known, and decides.
"""

import logging
import time

from dlcontract import Failure, Outcome, RunPhase
from dltrain.agent.coordinator import finished_marker
from dltrain.agent.coordinator.diagnosis import Attempt, delay_s, diagnose, explained, failure_of_exit
from dltrain.agent.coordinator.observer import Observer
from dltrain.agent.coordinator.procedure import LeavingError, ReplannedError
from dltrain.agent.job.shrink import shrink_plan
from dltrain.host.processes import Exit
from dltrain.protocol import agent_messages as proto

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


class Coordinator(Observer):
    """Coordinates one plan after another, from ``run`` on, until it is told to leave or superseded."""

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
        self._membership.call(self.plan)
        if (outcome := finished_marker.read(self.plan)) is not None:
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

    async def _went_well(self, world: Attempt) -> bool:
        """Watch a world until it is over, or until what went wrong with it can be told, or ranks may come back."""
        while True:
            await self._until(lambda: world.over_or_troubled or bool(world.losses) or self._may_return(world))
            if world.troubled and world.survivable:
                await self._until(lambda: not (world.troubled and world.survivable), SHRINK_S)
            if world.over_or_troubled or not world.losses:
                break
            self._mourn(world)
        if world.troubled:
            if world.hung is not None:
                self._links.send_all(proto.Explain(world=world.name))
            await self._until(lambda: world.succeeded or explained(world), SETTLE_S)
        if world.outcome is None and not world.succeeded:
            return False
        await self._until(lambda: world.over, FAREWELL_S)
        return True

    def _may_return(self, world: Attempt) -> bool:
        """Whether the ranks that others go on without should come back, at the price of a relaunch."""
        gain_s = self.ledger.gain_s(world.missing(self.plan), len(self.plan.ranks))
        waited = time.monotonic() - world.shrunk_s > self.settings.return_after_s
        return waited and gain_s > RELAUNCH_COST_S and self._membership.complete and self.plan.checkpoint.enabled

    def _mourn(self, world: Attempt) -> None:
        """Tell of ranks that were lost and that the others go on without. The job did not fail: nothing counts."""
        for end in world.losses:
            failure = failure_of_exit(world, end).model_copy(update={"counts": False})
            log.warning("%s: %s; the others go on", failure.reason, failure.message)
            self._failed(failure)
            self.ledger.count(failure.reason)
            world.handled.add(end.rank)
        self.reporter.urge()

    async def _gather(self) -> None:
        """Until every pod of the plan is connected, has the plan, and is not about to leave; or enough of them are,
        where the job has trained before."""
        if self.ledger.phase is not RunPhase.RELAUNCHING:
            self._phase(RunPhase.WAITING)
        if self._trained:
            await self._until(lambda: self._membership.complete, GATHER_S)
            await self._until(lambda: shrink_plan(self.plan, self._membership.present) is not None)
        else:
            await self._until(lambda: self._membership.complete)
        self.ledger.mark_start(agents_up_unix_s=time.time())

    async def _launch(self) -> Attempt:
        self._worlds += 1
        plan = shrink_plan(self.plan, self._membership.present)
        assert plan is not None, "gathered"
        now_s = time.monotonic()
        world = Attempt(plan, f"{self.ledger.term}.{self._worlds}", now_s, shrunk_s=now_s)
        self._world, self._stopping = world, False
        self.ledger.begin_world(plan)
        self._account.history.begin_world(self.plan, plan, time.time())
        self._prepared.clear()
        faults, trained_s = self._account.history.lost, self._account.history.trained_s
        self._links.send_all(proto.Prepare(world=world.name, pods=plan.pods, faults=faults, trained_s=trained_s))
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

    async def _succeed(self, world: Attempt) -> None:
        seconds = time.monotonic() - world.started_s
        step = self.ledger.report(time.time()).step
        outcome = world.outcome or Outcome(steps=step, seconds=seconds)
        report = await self._account.write(RunPhase.SUCCEEDED, time.time(), outcome)
        outcome = self.ledger.outcome = outcome.model_copy(update={"report": report})
        finished_marker.write(self.plan, outcome)
        self.ledger.failure = None
        await self._end_world()
        await self._idle(RunPhase.SUCCEEDED)

    async def _after(self, failure: Failure, world: Attempt) -> None:
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
        self._membership.call(self.plan)  # everyone of the old plan learns the new one before links to them end
        self.ledger.term = self._membership.term

    async def _stop_world(self, grace_s: float) -> None:
        """Let the ranks checkpoint and end, then end what is left."""
        world = self._world
        if world is not None:
            self._stopping = True
            self._links.send_all(proto.StopRanks(world=world.name, grace_s=grace_s, progressed=world.progressed))
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

    def _start_mpirun(self, world: Attempt) -> None:
        world.launcher_runs = True

        def ended(end: Exit, tail: str) -> None:
            world.launcher, world.launcher_tail, world.launcher_runs = end, tail, False

        self._launcher.start(world.plan, world.name, ended)
