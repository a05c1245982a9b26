"""The coordinator of a job: it connects to the pods, launches, watches and restarts the ranks, and reports.

It runs in the agent of the plan's first pod. If an elastic job loses that pod, the next pod that is alive takes over
with a higher term. ``Observer`` records events; the procedure in this module waits for conditions on that record and
decides.
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
"""After the first failure: time for the message about its cause to arrive after those about its consequences."""
FAREWELL_S = 10.0
"""After the result: time for all ranks to exit by themselves."""
END_S = 10.0
GATHER_S = 1.0
"""Before an elastic job continues without a pod: time for a pod whose agent only restarted to reconnect."""
SHRINK_S = 3.0
"""After the death of a rank: time for the others to report that they continue without it."""
RELAUNCH_COST_S = 5.0
"""The minimum time that a restart to re-add lost ranks must save."""
LEAVE_MARGIN_S = 3.0
"""The part of a pod's grace period reserved for killing processes that did not exit by themselves."""
COORDINATOR_LOST = Failure(reason="CoordinatorLost", message="another coordinator has taken over", counts=False)
TERMINAL = (RunPhase.SUCCEEDED, RunPhase.FAILED)


class Coordinator(Observer):
    """Coordinate one plan after another until this pod must leave or another coordinator supersedes this one."""

    # Called by the agent

    async def launch_daemon(self, host: str, command: str) -> tuple[int, str]:
        """Replace ``ssh HOST COMMAND``: run the pod's MPI daemon. Return its exit code and last output."""
        return await self._launcher.launch_daemon(host, command)

    # The procedure

    async def run(self) -> None:
        """Coordinate until ``leave`` is called. Raise SupersededError."""
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
        """Coordinate one plan. Stay connected after its end, so that a restarted pod learns that the job is over."""
        self._membership.call(self.plan)
        if (outcome := finished_marker.read(self.plan)) is not None:
            self.ledger.outcome = outcome
            await self._idle(RunPhase.SUCCEEDED)
        previous, self._previous = self._previous, None
        if previous is not None and previous.uid == self.plan.uid:
            if previous.phase in TERMINAL and previous.plan_digest == self.plan.digest():
                await self._idle(previous.phase)
            if previous.phase in (RunPhase.LAUNCHING, RunPhase.RUNNING, RunPhase.RELAUNCHING):
                if not 0 < previous.world_size < len(self.plan.ranks):  # Otherwise the acting coordinator counted it.
                    self.ledger.count("CoordinatorLost")
                    self._account.history.fault(COORDINATOR_LOST, time.time())
                self._trained = previous.step > 0 and previous.plan_digest == self.plan.digest()
                self._phase(RunPhase.RELAUNCHING)
        while True:
            await self._gather()
            world = await self._launch()
            if await self._watch(world):
                await self._succeed(world)
            returning = not world.troubled
            if world.left or returning:
                await self._stop_world(max(1.0, self.plan.grace_s - LEAVE_MARGIN_S))
            if returning:
                log.info("lost pods are back; all ranks restart")
                self._phase(RunPhase.RELAUNCHING)
                continue
            failure = diagnose(world)
            await self._end_world()
            await self._after(failure, world)

    async def _watch(self, world: Attempt) -> bool:
        """Watch an attempt until it ends, its failure can be diagnosed, or lost ranks can return.

        Return True if the attempt succeeded.
        """
        while True:
            await self._until(lambda: world.over_or_troubled or bool(world.losses) or self._may_return(world))
            if world.troubled and world.survivable:
                await self._until(lambda: not (world.troubled and world.survivable), SHRINK_S)
            if world.over_or_troubled or not world.losses:
                break
            self._report_losses(world)
        if world.troubled:
            if world.hung is not None:
                self._links.send_all(proto.Explain(world=world.name))
            await self._until(lambda: world.succeeded or explained(world), SETTLE_S)
        if world.outcome is None and not world.succeeded:
            return False
        await self._until(lambda: world.over, FAREWELL_S)
        return True

    def _may_return(self, world: Attempt) -> bool:
        """Return True if re-adding the lost ranks would save more time than the restart costs."""
        gain_s = self.ledger.gain_s(world.missing(self.plan), len(self.plan.ranks))
        waited = time.monotonic() - world.shrunk_s > self.settings.return_after_s
        return waited and gain_s > RELAUNCH_COST_S and self._membership.complete and self.plan.checkpoint.enabled

    def _report_losses(self, world: Attempt) -> None:
        """Report lost ranks that the others continue without. These losses do not count against the back-off limit."""
        for end in world.losses:
            failure = failure_of_exit(world, end).model_copy(update={"counts": False})
            log.warning("%s: %s; the other ranks continue", failure.reason, failure.message)
            self._failed(failure)
            self.ledger.count(failure.reason)
            world.handled.add(end.rank)
        self.reporter.urge()

    async def _gather(self) -> None:
        """Wait until every pod of the plan is connected, has the plan, and is not leaving.

        If the job has trained before, wait only until enough pods for a smaller process group are.
        """
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
        assert plan is not None, "_gather ensures it"
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
        """Count and report a failure. Then wait before the next attempt, or fail the job."""
        log.warning("%s: %s", failure.reason, failure.message)
        self._failed(failure)
        self.ledger.failures += failure.counts
        if not failure.retry or self.ledger.failures > self.plan.backoff_limit:
            await self._account.write(RunPhase.FAILED, time.time())
            await self._idle(RunPhase.FAILED)
        self.ledger.count(failure.reason)
        self._failed_in_a_row = 0 if world.progressed or not failure.counts else self._failed_in_a_row + 1
        self._phase(RunPhase.RELAUNCHING)
        await self._until(lambda: False, delay_s(self._failed_in_a_row))

    async def _idle(self, phase: RunPhase) -> None:
        """Do nothing until a new plan arrives or this pod must leave."""
        self._phase(phase)
        await self._until(lambda: False)

    def _adopt(self) -> None:
        """Adopt the new plan. Pods that are only in the old plan get it too, and then have no ranks."""
        assert self._new_plan is not None
        self.plan, self._new_plan = self._new_plan, None
        if self.ledger.phase is RunPhase.FAILED:
            self.ledger.failures, self.ledger.failure = 0, None
        self.ledger.plan = self.plan
        self.ledger.phase = RunPhase.WAITING
        self._failed_in_a_row = 0
        self._trained = False
        self._membership.call(self.plan)  # Sends it to the old plan's pods before their links close.
        self.ledger.term = self._membership.term

    async def _stop_world(self, grace_s: float) -> None:
        """Let the ranks checkpoint and exit, then kill the rest."""
        world = self._world
        if world is not None:
            self._stopping = True
            self._links.send_all(proto.StopRanks(world=world.name, grace_s=grace_s, progressed=world.progressed))
            ranks = world.plan.ranks
            await self._until(lambda: all(world.gone(rank) for rank in ranks), grace_s, interruptible=False)
        await self._end_world()

    async def _end_world(self) -> None:
        """End the processes of the attempt on every pod that can be reached."""
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
