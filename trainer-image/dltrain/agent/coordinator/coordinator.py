"""The coordinator of a job: it launches and watches ranks, and restarts them or ends the job at the back-off limit.

It runs in the agent of the plan's first pod, connects to the other pods, and writes the report. If an elastic job
loses that pod, the next live pod takes over with a higher term, a number that identifies the current coordinator.
``ObservedJob`` records events. The procedure in this module repeatedly waits until the recorded events meet a
condition, and then decides the next action.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from dlcontract import Failure, FailureAllowance, Plan, Report, RunPhase, StoppedEarly, matching, reasons
from dltrain.agent.coordinator import finished_marker
from dltrain.agent.coordinator.diagnosis import Attempt, delay_s, diagnose, explained, failure_of_exit
from dltrain.agent.coordinator.event_queue import LeavingError, ReplannedError
from dltrain.agent.coordinator.observed_job import ObservedJob
from dltrain.host.processes import Exit
from dltrain.launch.commands import rank_command
from dltrain.protocol import agent_messages as proto

log = logging.getLogger(__name__)

SETTLE_S = 0.5
"""Maximum time in seconds to wait, after the first message about a failure, for the message about its cause. Messages
about consequences of the cause can arrive earlier."""
FAREWELL_S = 10.0
"""Maximum time in seconds to wait, after rank 0 has reported the result of the training, until all ranks have exited by
themselves."""
END_S = 10.0
GATHER_S = 1.0
"""Maximum time in seconds to wait for missing pods before an elastic job continues without them. The agent of a missing
pod may have restarted, and then connects again within this time."""
SHRINK_S = 3.0
"""Maximum time in seconds to wait, after a rank has died, until the other ranks report that they continue without
it."""
LEAVE_MARGIN_S = 3.0
"""Time in seconds reserved at the end of a pod's grace period for killing processes that did not exit."""
STORE_MARGIN_S = 1.5
"""Time in seconds reserved at the end of a pod's grace period for the last report, after the output is stored."""
EARLY_STOP_S = 600.0
"""Minimum time in seconds that ranks get for their last checkpoint if the training stops early (``spec.until``). It may
exceed the grace period of the pods, because no pod ends then."""
COORDINATOR_LOST = Failure(reason=reasons.COORDINATOR_LOST, message="another coordinator has taken over", counts=False)
TERMINAL = (RunPhase.SUCCEEDED, RunPhase.FAILED)


class Coordinator:
    """Launch, watch and restart a job's ranks on all its pods, for one plan after another.

    The coordinator ends when its pod receives SIGTERM or when another coordinator takes over the job.
    """

    def __init__(
        self, job: ObservedJob, previous: Report | None, allowance: Callable[[], FailureAllowance] = FailureAllowance
    ) -> None:
        """Create the coordinator of ``job``. ``previous``: the last report of an earlier coordinator, or None.

        ``allowance``: returns the operator's decisions about failures so far, such as how many to ignore.
        """
        self.job, self._allowance = job, allowance
        self.done = asyncio.Event()
        """An event that is set when the coordinator has ended."""
        self._until = job.events.until
        self._previous = previous
        self._failed_in_a_row = 0
        """Number of consecutive attempts (launches of all ranks) that failed before any rank completed a step.

        A failure that the cluster has caused, such as a drained node, resets this number to 0.
        """

    # Called by the agent

    def replan(self, plan: Plan) -> None:
        """Queue a newer plan that this pod's agent has received.

        ``run`` restarts the ranks if ``plan`` changes how the job trains, for example its nodes or batch sizes.
        """
        self.job.events.put(plan)

    def leave(self) -> None:
        """Interrupt ``run``, because this pod received SIGTERM. ``run`` then stops the ranks and returns."""
        self.job.events.leave()

    async def launch_daemon(self, host: str, command: str) -> tuple[int, str]:
        """Let the agent of the pod ``host`` run the MPI daemon, which mpirun would start with ``ssh HOST COMMAND``.

        Wait until the daemon ends. Return its (exit code, last output). If the daemon cannot be started, the exit code
        is 1 and the text says why.
        """
        return await self.job.launcher.launch_daemon(host, command)

    # The procedure

    async def run(self) -> None:
        """Coordinate until ``leave`` is called. Raise SupersededError if another coordinator has taken over the job."""
        try:
            while True:
                try:
                    await self._coordinate()
                except ReplannedError:
                    await self._stop_attempt(self.job.plan.grace_s)
                    self._adopt()
        except LeavingError:
            await self._stop_job()
        finally:
            self.job.launcher.end()
            await self.job.links.close()
            self.done.set()

    async def _stop_job(self) -> None:
        """Stop the ranks, because this pod received SIGTERM, and then publish the phase Stopped.

        The output is stored before, within limits of time: a reader that acts on Stopped may delete the pods, and
        agents of other pods store the output of their ranks only if the coordinator is lost in an earlier phase.
        """
        grace_s = self.job.plan.grace_s
        deadline_s = time.monotonic() + grace_s - STORE_MARGIN_S
        await self._stop_attempt(max(1.0, grace_s - LEAVE_MARGIN_S))
        try:
            if self.job.ledger.phase not in TERMINAL:
                if self.job.outputs:  # The operator may have ended the job. Its pods, and their logs, are then deleted.
                    await self.job.store_outputs(RunPhase.STOPPED, within_s=max(0.5, deadline_s - time.monotonic()))
                await self.job.account.write(RunPhase.STOPPED, time.time())
        finally:
            self.publish_stop()  # Also if the run report cannot be rendered.

    def publish_stop(self) -> None:
        """Publish the phase Stopped, or the present phase if the job has succeeded or failed."""
        phase = self.job.ledger.phase
        self.job.set_phase(phase if phase in TERMINAL else RunPhase.STOPPED)

    async def _coordinate(self) -> None:
        """Launch the current plan's ranks, and launch them again after failures, until the job succeeds or fails.

        Then stay connected to the pods, so that a restarted pod learns that the job has ended. This method ends only
        with an exception, such as LeavingError after SIGTERM or ReplannedError when a new plan has arrived.
        """
        self.job.membership.call(self.job.plan)
        if (outcome := finished_marker.read(self.job.plan)) is not None:
            self.job.ledger.outcome = outcome
            await self._idle(RunPhase.SUCCEEDED)
        previous, self._previous = self._previous, None
        if previous is not None and previous.uid == self.job.plan.uid:
            if previous.phase in TERMINAL and previous.plan_digest == self.job.plan.digest():
                await self._idle(previous.phase)
            if previous.phase in (RunPhase.LAUNCHING, RunPhase.RUNNING, RunPhase.RESTARTING):
                if (
                    not 0 < previous.world_size < len(self.job.plan.ranks)
                ):  # If the process group had shrunk, the loss was counted already.
                    self.job.ledger.count(reasons.COORDINATOR_LOST)
                    self.job.account.history.fault(COORDINATOR_LOST, time.time())
                started = previous.step > 0 or self.job.plan.model.elastic
                self.job.trained = started and previous.plan_digest == self.job.plan.digest()
                self.job.set_phase(RunPhase.RESTARTING)
        while True:
            await self._gather()
            attempt = await self._launch()
            if await self._watch(attempt):
                await self._succeed(attempt)
            returning = not attempt.troubled
            if attempt.left or returning:
                await self._stop_attempt(max(1.0, self.job.plan.grace_s - LEAVE_MARGIN_S))
            if returning:
                log.info("lost pods are back; all ranks restart")
                self.job.set_phase(RunPhase.RESTARTING)
                continue
            failure = diagnose(attempt)
            await self._end_attempt()
            await self._after(failure, attempt)

    async def _watch(self, attempt: Attempt) -> bool:
        """Watch an attempt, which is one launch of all ranks. Return True if the training succeeded.

        An early stop (``spec.until``) is a success. Return False if the attempt failed or, with ``attempt.troubled``
        False, if all ranks should restart in order to add lost ranks again.
        """
        while True:
            await self._until(
                lambda: (
                    attempt.over_or_troubled
                    or bool(attempt.losses)
                    or attempt.good_enough is not None
                    or self.job.may_return(attempt)
                )
            )
            if attempt.troubled and attempt.survivable:
                await self._until(lambda: not (attempt.troubled and attempt.survivable), SHRINK_S)
            if attempt.over_or_troubled or not attempt.losses:
                break
            self._report_losses(attempt)
        if attempt.good_enough is not None and not attempt.over_or_troubled:
            return await self._stop_early(attempt, *attempt.good_enough)
        if attempt.troubled:
            if attempt.hung is not None:
                self.job.links.send_all(proto.Explain(attempt=attempt.name))
            await self._until(lambda: attempt.succeeded or explained(attempt), SETTLE_S)
        if attempt.outcome is None and not attempt.succeeded:
            return False
        await self._until(lambda: attempt.over, FAREWELL_S)
        return True

    async def _stop_early(self, attempt: Attempt, step: int, why: StoppedEarly) -> bool:
        """Stop all ranks because the training met ``spec.until`` after ``step`` steps. Return True on success.

        ``why``: how it met ``spec.until``. Return False if dltrain should write a checkpoint, but the last one is older
        than ``step``. The ranks must then restart and meet ``spec.until`` again. A script without ``dltrain.init``
        writes its own checkpoint: it calls ``dltrain.stop_requested``, or gets SIGTERM.
        """
        log.info("%s; the training stops", why.message)
        plan = attempt.plan
        saves = plan.model.framework == "DLTrain" and not attempt.only_reports and plan.checkpoint.enabled
        grace_s = max(EARLY_STOP_S, plan.grace_s) if saves else plan.grace_s
        self._ask_to_stop(attempt, grace_s, progressed=True)
        await self._until(lambda: attempt.failed_to_stop or all(attempt.gone(rank) for rank in plan.ranks), grace_s)
        saved = self.job.ledger.report(time.time()).last_checkpoint
        if saves and attempt.outcome is None and (saved is None or saved.step < step):
            return False
        attempt.outcome = self.job.outcome_of(attempt).model_copy(update={"stopped": why})
        return True

    def _report_losses(self, attempt: Attempt) -> None:
        """Record in the log and in the job's report each lost rank without which the other ranks continue to train.

        These losses do not count towards the job's back-off limit.
        """
        for end in attempt.losses:
            failure = failure_of_exit(attempt, end).model_copy(update={"counts": False})
            log.warning("%s: %s; the other ranks continue", failure.reason, failure.message)
            self.job.record_failure(failure)
            self.job.ledger.count(failure.reason)
            attempt.handled.add(end.rank)
        self.job.reporter.urge()

    async def _gather(self) -> None:
        """Wait until enough pods for a launch are connected, have the plan, and have not received SIGTERM.

        Before the first step of the plan, every pod is necessary. After it, wait at most ``GATHER_S`` seconds for every
        pod (with an elastic script, ``shrink_after_s``), and then without a limit for enough pods for a smaller process
        group (``ObservedJob.launchable``).
        """
        if self.job.ledger.phase is not RunPhase.RESTARTING:
            self.job.set_phase(RunPhase.WAITING)
        if self.job.trained:
            wait_s = self.job.settings.shrink_after_s if self.job.plan.model.elastic else GATHER_S
            await self._until(lambda: self.job.membership.complete, wait_s)
            await self._until(lambda: self.job.launchable is not None)
        else:
            await self._until(lambda: self.job.membership.complete)
        self.job.ledger.mark_start(agents_up_unix_s=time.time())

    async def _launch(self) -> Attempt:
        self.job.attempts += 1
        plan = self.job.launchable
        assert plan is not None, "_gather ensures it"
        attempt = Attempt(plan, f"{self.job.ledger.term}.{self.job.attempts}", time.monotonic())
        self.job.attempt = attempt
        self.job.outputs.clear()
        self.job.ledger.begin_attempt(plan, time.monotonic())
        self.job.account.history.begin_attempt(self.job.plan, plan, time.time())
        self.job.prepared.clear()
        faults, trained_s = self.job.account.history.lost, self.job.account.history.trained_s
        self.job.links.send_all(proto.Prepare(attempt=attempt.name, pods=plan.pods, faults=faults, trained_s=trained_s))
        await self._until(lambda: self.job.prepared >= set(plan.pods) or attempt.troubled)
        if attempt.troubled:
            return attempt
        await self.job.checkpoints.watch(plan if plan.model.elastic and plan is not self.job.plan else None)
        attempt.started_s = attempt.shrunk_s = attempt.launched_s = time.monotonic()  # Copies may have taken minutes.
        self.job.ledger.mark_start(launched_unix_s=time.time())
        if self.job.ledger.phase is not RunPhase.RESTARTING:
            self.job.set_phase(RunPhase.LAUNCHING)
        try:
            script = rank_command(plan)
        except ValueError as error:
            attempt.failures.append((0, Failure(reason=reasons.BAD_INPUT, message=str(error), retry=False)))
            return attempt
        if script.overridden:
            log.warning(
                "trainer.command: found %s; these options have no effect, because the plan sets %d ranks on %d nodes",
                ", ".join(script.overridden), len(plan.ranks), len(plan.pods),
            )  # fmt: skip
        if self.job.plan.model.framework == "Torchrun":
            self.job.links.send_all(proto.StartRanks(attempt=attempt.name))
        else:
            try:
                self._start_mpirun(attempt)
            except (ValueError, OSError) as error:
                failure = Failure(
                    reason=reasons.LAUNCH_FAILED, message=str(error), retry=not isinstance(error, ValueError)
                )
                attempt.failures.append((0, failure))
        return attempt

    async def _succeed(self, attempt: Attempt) -> None:
        outcome = self.job.outcome_of(attempt)
        report = await self.job.account.write(RunPhase.SUCCEEDED, time.time(), outcome)
        outcome = self.job.account.summarized(outcome, time.time())
        outcome = self.job.ledger.outcome = outcome.model_copy(update={"report": report})
        finished_marker.write(self.job.plan, outcome)
        self.job.ledger.failure = None
        await self._end_attempt()
        await self.job.store_outputs(RunPhase.SUCCEEDED, outcome)
        await self._idle(RunPhase.SUCCEEDED)

    async def _after(self, failure: Failure, attempt: Attempt) -> None:
        """Count and report the failure of ``attempt``. Then wait before the next launch, or end the job as failed."""
        by_cluster, failure = not failure.counts, self.job.decided(failure, attempt)
        log.warning("%s: %s", failure.reason, failure.message)
        self.job.record_failure(failure)
        self.job.ledger.failures += failure.counts
        await self._wait_for_allowance(failure)
        if not failure.retry or not self._within_limit():
            await self.job.account.write(RunPhase.FAILED, time.time())
            await self.job.store_outputs(RunPhase.FAILED)
            await self._idle(RunPhase.FAILED)
        self.job.ledger.count(failure.reason)
        self._failed_in_a_row = 0 if attempt.progressed or by_cluster else self._failed_in_a_row + 1
        self.job.set_phase(RunPhase.RESTARTING)
        await self._until(lambda: False, delay_s(self._failed_in_a_row))

    def _within_limit(self) -> bool:
        """Return True if the failures so far, except those that the operator ignores, are within the back-off limit."""
        return self.job.ledger.failures <= self.job.plan.backoff_limit + self._allowance().ignored

    async def _wait_for_allowance(self, failure: Failure) -> None:
        """Wait before the job fails at the back-off limit, because the operator may still ignore ``failure``.

        The operator applies the failure rules about conditions of nodes and pods, and Kubernetes learns of a broken
        node later than the ranks do. Wait for the time that the operator allows, but only until it ignores the failure.
        Do not wait if the failure permits no restart, or if a failure rule in the plan applies to it.
        """
        wait_s = self._allowance().wait_s
        decided_here = not failure.retry or matching(self.job.plan.failure_rules, failure)
        if self._within_limit() or decided_here or not wait_s:
            return
        log.warning(
            "waiting up to %.0f s, because a rule about conditions of nodes or pods may ignore this failure "
            "(spec.runPolicy.failureRules)",
            wait_s,
        )
        self.job.set_phase(RunPhase.RESTARTING)
        await self._until(self._within_limit, wait_s)

    async def _idle(self, phase: RunPhase) -> None:
        """Publish ``phase`` as the job's phase. Then wait until a new plan or SIGTERM raises an exception."""
        self.job.set_phase(phase)
        await self._until(lambda: False)

    def _adopt(self) -> None:
        """Switch to the new plan. Pods that are only in the old plan receive it, too, and then run no ranks."""
        assert self.job.events.new_plan is not None
        plan, self.job.events.new_plan = self.job.events.new_plan, None
        self.job.adopt(plan)
        if self.job.ledger.phase is RunPhase.FAILED:
            self.job.ledger.failures, self.job.ledger.failure = 0, None
        self.job.ledger.phase = RunPhase.WAITING
        self._failed_in_a_row = 0
        self.job.trained = False
        self.job.membership.call(self.job.plan)  # Sends the plan to the old plan's pods before their links close.
        self.job.ledger.term = self.job.membership.term

    async def _stop_attempt(self, grace_s: float) -> None:
        """Ask the ranks to checkpoint and exit within ``grace_s`` seconds. Then kill those that still run."""
        attempt = self.job.attempt
        if attempt is not None:
            self._ask_to_stop(attempt, grace_s, progressed=attempt.progressed)
            ranks = attempt.plan.ranks
            await self._until(lambda: all(attempt.gone(rank) for rank in ranks), grace_s, interruptible=False)
        await self._end_attempt()

    def _ask_to_stop(self, attempt: Attempt, grace_s: float, *, progressed: bool) -> None:
        attempt.stopping = True
        at_step = self.job.stop_step(attempt)
        request = proto.StopRanks(attempt=attempt.name, grace_s=grace_s, progressed=progressed, at_step=at_step)
        self.job.links.send_all(request)

    async def _end_attempt(self) -> None:
        """Kill mpirun and, on all connected pods, the processes of the current attempt, if there is one.

        Then wait until these pods confirm that the processes have ended, but at most ``END_S`` seconds.
        """
        attempt, self.job.attempt = self.job.attempt, None
        self.job.account.history.halted(time.time())
        self.job.launcher.end()
        if attempt is None:
            return
        self.job.ended_attempt = attempt.name
        waiting = self.job.links.connected
        self.job.links.send_all(proto.EndAttempt(attempt=attempt.name))
        self.job.ending = waiting
        await self._until(lambda: not self.job.ending & self.job.links.connected, END_S, interruptible=False)

    def _start_mpirun(self, attempt: Attempt) -> None:
        attempt.launcher_runs = True

        def ended(end: Exit, tail: str) -> None:
            attempt.launcher, attempt.launcher_tail, attempt.launcher_runs = end, tail, False

        self.job.launcher.start(attempt.plan, attempt.name, ended)
