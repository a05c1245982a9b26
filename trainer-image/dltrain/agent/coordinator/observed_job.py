"""Record the events from the pods and ranks of a job for its coordinator.

The module ``coordinator`` decides how to react to the events. After an event, this module only publishes direct
consequences: it sets a new phase, requests that the report is written now, or sends the pods a new plan for the same
training. Such a plan differs from the current one only in its number or in its term, a number that rises when another
coordinator takes over.
"""

import asyncio
import logging
import time
from math import ceil, inf

from dlcontract import Failure, Outcome, Plan, Report, RunPhase, decided, matching
from dltrain.agent.coordinator.diagnosis import Attempt
from dltrain.agent.coordinator.elastic_script import CheckpointFolder, refusal, still_refused
from dltrain.agent.coordinator.event_queue import Event, EventQueue
from dltrain.agent.coordinator.links import Connected, Late, Links, Lost, Received
from dltrain.agent.coordinator.membership import Membership, term_after
from dltrain.agent.coordinator.mpirun import Launcher
from dltrain.agent.coordinator.waits import Waits, launch_failure
from dltrain.agent.job.exchange import OUTPUTS_S, ReportWriter
from dltrain.agent.job.settings import Settings
from dltrain.agent.job.shrink import shrink_plan
from dltrain.agent.job.tls import Identity
from dltrain.host.processes import Reaper
from dltrain.protocol import agent_messages as proto
from dltrain.protocol.rank_messages import Failed, Finished, Mark, Resharded, Shrunk, Step
from dltrain.protocol.upload_messages import NotUploaded, Uploaded
from dltrain.record.job_logs import LIMIT_NBYTES, REPORT_LIMIT_NBYTES, RankOutput, order, packed, stored_nbytes
from dltrain.record.ledger import Ledger
from dltrain.record.run_report import files as runreport
from dltrain.record.stopping_rule import StoppingRule

log = logging.getLogger(__name__)
STOP_AHEAD_S = 2.0
"""Time in seconds from the request to stop until the step after which a script that only reports (``dltrain.report``)
stops. The script's last reports may be a second old, and the request takes milliseconds."""
RESTART_COST_S = 5.0
"""Minimum time in seconds that a restart must save if its only purpose is to add lost ranks again."""


class ObservedJob:
    """The current plan, the connected pods, the recorded progress of the ranks, and the running attempt, if any."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        reaper: Reaper,
        env: dict[str, str],
        reporter: ReportWriter,
        plan: Plan,
        previous: Report | None,
        *,
        acting: bool = False,
    ) -> None:
        """Create the record of a job with ``plan``. ``previous``: the last report of an earlier coordinator, or None.

        ``acting``: True if this pod coordinates in place of the plan's first pod, which was lost.
        """
        self.events = EventQueue(self._take, self._tick)
        self.settings, self.reporter, self.plan = settings, reporter, plan
        self.ledger = Ledger(plan, previous, settings.hang_min_s)
        self.account = runreport.RunReportWriter(self.ledger, time.time())
        self.reporter.compose = self._report
        self.links = Links(identity.client, settings.agent_port, self.events.put)
        self.launcher = Launcher(settings, reaper, env, self.links)
        self.membership = Membership(settings, self.links, plan, term_after(plan, previous), acting=acting)
        self.ledger.term = self.membership.term
        self.prepared: set[str] = set()
        """Pods that are ready to start the attempt's ranks."""
        self.waits, self.ending = Waits(), set[str]()
        """``ending``: pods that may still run processes of the previous attempt."""
        self.attempt: Attempt | None = None
        self.outputs: dict[int, RankOutput] = {}
        """The last output of each rank that has ended, by rank number.

        The outputs are those of the current attempt or, between two attempts, those of the previous attempt. Before the
        first launch, this is an attempt of an earlier coordinator.
        """
        self.ended_attempt = ""
        """Name of the last attempt that has ended. Ranks that are killed at its end still report their output."""
        self.attempts = 0
        self._ticked_s = time.monotonic()
        self._late_s = self._starved_s = 0.0
        """Since the last tick, in seconds: longest silence of a pod, and longest wait of a rank for a processor."""
        self._progress_before = previous.target if previous is not None and previous.uid == plan.uid else None
        self.stopping_rule: StoppingRule | None = None
        self.stopping_rule = self._stopping_rule()
        self.trained = False
        """True if ranks have completed a step of this plan, under this or an earlier coordinator.

        For an elastic script, which may not report its steps: True if all of its ranks have started.
        """
        self.checkpoints = CheckpointFolder()
        self._complete_s: float | None = None
        """Time since which all pods of the plan are present, as seen at each tick; None: they are not."""

    @property
    def launchable(self) -> Plan | None:
        """Return the plan with the ranks of the present pods, or None if the ranks cannot start on these pods.

        If each rank reads a data stream of its own, fewer ranks cannot continue the training.
        """
        plan = shrink_plan(self.plan, self.membership.present)
        if plan is self.plan:
            return plan
        refused = {size.ranks for size in self.ledger.refused_sizes}
        bound = self.ledger.bound_ranks is not None
        return None if plan is None or bound or len(plan.ranks) in refused else plan

    def may_return(self, attempt: Attempt) -> bool:
        """Return True if all ranks should restart in order to add the ranks that this attempt has lost.

        All pods of the plan must be ready, with checkpoints enabled, and the last loss of a rank must be more than
        ``return_after_s`` seconds ago. The training must end more than ``RESTART_COST_S`` seconds earlier with them,
        unless an elastic script does not report how many steps are left. Such a script must also have written a
        checkpoint since all pods are back, because it may lose the steps after its last checkpoint.
        """
        missing, elastic = attempt.missing(self.plan), self.plan.model.elastic
        if not missing or not self.membership.complete or not self.plan.checkpoint.enabled:
            return False
        gain_s = self.ledger.gain_s(missing, len(self.plan.ranks))
        if gain_s is None:
            gain_s = inf if elastic else 0.0
        waited = time.monotonic() - attempt.shrunk_s > self.settings.return_after_s
        saved = not elastic or (self._complete_s is not None and self.checkpoints.settled_since(self._complete_s))
        return waited and gain_s > RESTART_COST_S and saved

    def decided(self, failure: Failure, attempt: Attempt) -> Failure:
        """Return ``failure``, changed by the first failure rule of the plan that matches it.

        If no rule matches and an elastic script refuses the number of ranks of ``attempt``, record that, and return a
        failure that does not count. The loss of a further pod is no refusal, although ranks fail then.
        """
        rules, saved = self.plan.failure_rules, self.checkpoints.changed_since(attempt.started_s)
        stayed = set(attempt.plan.pods) <= set(self.membership.present)
        refused = refusal(attempt, self.plan, failure, saved=saved) if stayed and not matching(rules, failure) else None
        if refused is None:
            return decided(rules, failure)
        self.ledger.refused_sizes += (refused,)
        waits = f"it had only {refused.ranks} of {len(self.plan.ranks)} ranks, so the job waits for the lost pods"
        return failure.model_copy(update={"message": f"{refused.message}; {waits}", "retry": True, "counts": False})

    def adopt(self, plan: Plan) -> None:
        """Replace the current plan by ``plan``, which changes how the job trains, such as its nodes or batch sizes."""
        self.ledger.refused_sizes = still_refused(self.ledger.refused_sizes, self.plan, plan)
        self.plan, self.ledger.plan, self.ledger.pod_memory = plan, plan, None
        self.stopping_rule = self._stopping_rule()

    def _stopping_rule(self) -> StoppingRule | None:
        until = self.plan.until
        if until is None:
            return None
        rule = self.stopping_rule.continued(until) if self.stopping_rule is not None else None
        return rule or StoppingRule(until, self.account.history.values(until.metric), self._progress_before)

    def _report(self) -> Report:
        target = self.stopping_rule.progress() if self.stopping_rule is not None else None
        waits = None
        if self.ledger.phase in (RunPhase.WAITING, RunPhase.LAUNCHING, RunPhase.RESTARTING):
            waits = self.waits.text(self.plan, self.attempt, self.membership.present, self.prepared, time.monotonic())
        return self.ledger.report(time.time()).model_copy(update={"target": target, "waits_for": waits})

    def _tick(self) -> None:
        attempt, now_s = self.attempt, time.monotonic()
        passed_s, self._ticked_s = now_s - self._ticked_s, now_s
        # If this agent did not run itself, it may not have read messages. All excuses concern the same time.
        own_s = passed_s if passed_s > proto.LATE_S else 0.0
        self.ledger.excuse(max(own_s, self._late_s, min(passed_s, self._starved_s)))
        self._late_s = self._starved_s = 0.0
        if attempt is not None and not attempt.stopping and attempt.outcome is None and attempt.hung is None:
            attempt.hung = self.ledger.silent_rank(now_s - self.links.silence_s(now_s))
        if not self.membership.complete:
            self._complete_s = None
        elif self._complete_s is None:
            self._complete_s = now_s
        if attempt is not None:
            self.checkpoints.tick()
            self.account.tick(time.time())
            self.launcher.check_stopped(time.monotonic())
            if (failure := launch_failure(attempt, now_s)) is not None:
                attempt.failures.append((failure.rank or 0, failure))

    def _take(self, event: Event) -> None:
        match event:
            case Plan():
                self._planned(event)
            case Connected(pod, welcome):
                self.membership.welcome(pod, welcome, fresh=self.attempts == 0)
                self.ledger.term = self.membership.term
            case Lost(pod, why, unreachable):
                self.membership.lost(pod)
                if self.attempt is not None and pod in self.attempt.plan.pods:
                    self.attempt.lost.setdefault(pod, why)
                    if unreachable:
                        self.attempt.unreachable.add(pod)
                self.launcher.daemon_ended(pod, 1, why)
                self.waits.ended(pod)
            case Late(pod, silent_s):
                log.warning(
                    "pod %s was silent for %.1f s, because that pod or this pod had no processor time", pod, silent_s
                )
                self._late_s = max(self._late_s, silent_s)
            case Received(pod, line):
                self._received(pod, line)

    def _planned(self, plan: Plan) -> None:
        """Follow the plan that is stored now, also one with a lower number: the operator replaces an edited plan."""
        waiting = self.events.new_plan
        if plan.uid != self.plan.uid or plan == (waiting or self.plan):
            return
        if waiting is not None or plan.digest() != self.plan.digest():
            self.events.new_plan = plan
            return
        self.plan = self.ledger.plan = plan  # The same training with a new number or term.
        self.membership.call(plan)
        self.ledger.term = self.membership.term
        self.reporter.urge()

    def _received(self, pod: str, line: proto.Line) -> None:
        attempt = self.attempt
        match line:
            case proto.Assigned() | proto.Refused():
                self.membership.answered(pod, line)
            case proto.Leaving():
                self.membership.leaves(pod)
                if attempt is not None and pod in attempt.plan.pods:
                    attempt.left.add(pod)
            case proto.AttemptEnded():
                self.ending.discard(pod)
                self.waits.ended(pod)
            case proto.StillEnding():
                self.waits.lasts(pod, line.processes)
            case proto.RankEnded() if attempt is None and self.attempts == 0:
                self._store_earlier_output(line)
            case proto.RankEnded() if attempt is None and line.attempt == self.ended_attempt:
                self._store_output(line)
            case _ if attempt is None or getattr(line, "attempt", None) != attempt.name:
                return
            case proto.Prepared():
                self.prepared.add(pod)
                self.waits.ended(pod)
            case proto.RankUp():
                attempt.up.add(line.rank)
                if self.plan.model.command and len(attempt.up) == len(attempt.plan.ranks):
                    self.trained = self.trained or self.plan.model.elastic
                    self._running()
            case proto.RankUpdate():
                self._record_update(line, attempt)
            case proto.RankStopped():
                if attempt.hung is None and attempt.outcome is None and not attempt.stopping:
                    attempt.hung = (line.rank, line.stopped_s)
            case proto.RankStarved():
                self._starved_s = max(self._starved_s, line.waited_s)
            case proto.PodMemoryPeak():
                self.ledger.record_memory(pod, line.nbytes, line.ranks)
            case proto.RankLog():
                attempt.logs[line.rank] = line.tail
            case proto.RankEnded() if pod in attempt.lost:
                self._store_output(line)  # The pod's agent killed the rank because it lost the connection.
            case proto.RankEnded():
                attempt.ended[line.rank] = line
                self._store_output(line)
                self.ledger.forget_rank(line.rank)
            case proto.DaemonEnded():
                self.launcher.daemon_ended(pod, line.exit_code, line.tail)

    def _store_output(self, end: proto.RankEnded) -> None:
        self.outputs[end.rank] = RankOutput.of(end)

    def _store_earlier_output(self, end: proto.RankEnded) -> None:
        """Store the output of a rank from the last attempt of an earlier coordinator, which may not have stored it.

        Members send it when this coordinator connects. A member may have missed the last attempts.
        """
        if order(end.attempt) > order(self.ended_attempt):
            self.ended_attempt = end.attempt
            self.outputs.clear()
        if end.attempt == self.ended_attempt:
            self._store_output(end)

    def _record_update(self, line: proto.RankUpdate, attempt: Attempt) -> None:
        message = self.ledger.uploads.with_step(line.message, time.monotonic())
        about_upload = isinstance(message, (Uploaded, NotUploaded))  # Its process outlives rank 0.
        if message.rank in attempt.ended and not about_upload:
            return
        if not about_upload:
            attempt.heard.add(message.rank)
        transition = self.ledger.record(message, time.monotonic())
        if self.stopping_rule is not None and message.rank == self.ledger.leader:
            attempt.good_enough = self.stopping_rule.record(message) or attempt.good_enough
        self.account.history.record(message, self.ledger.leader, time.time())
        self.ledger.steps_repeated = self.account.history.steps_repeated
        self.ledger.energy = self.account.history.energy or self.ledger.energy
        match message:
            case Step():
                attempt.progressed = self.trained = True
                attempt.only_reports = message.reported
                self._running()
            case Mark(what="first_step"):
                self._running()
            case Failed() if not attempt.left:  # Failures after a pod began to leave are its consequences.
                attempt.failures.append((message.rank, message.failure))
            case Shrunk():
                self._shrank(message, attempt)
            case Resharded() if message.rank == self.ledger.leader:
                log.info("local batch sizes from step %d: %s; %s", message.step, message.shares, message.reason)
            case Finished() if message.rank == self.ledger.leader:
                attempt.outcome = message.outcome
        if transition:
            self.reporter.urge()

    def _shrank(self, message: Shrunk, attempt: Attempt) -> None:
        absent = {rank.rank for rank in attempt.plan.ranks} - set(message.alive)
        if absent - attempt.absent:
            log.info(
                "lost ranks %s; ranks %s continue from step %d, %.3f s after the loss was detected",
                sorted(absent), message.alive, message.step, message.shrink_s,
            )  # fmt: skip
            attempt.absent |= absent
            attempt.shrunk_s = time.monotonic()

    def _running(self) -> None:
        if self.ledger.phase in (RunPhase.LAUNCHING, RunPhase.RESTARTING):
            self.set_phase(RunPhase.RUNNING)

    async def store_outputs(self, phase: RunPhase, outcome: Outcome | None = None, within_s: float = inf) -> None:
        """Store the run report and the last output of each ended rank outside the pods, so that they outlive the pods.

        ``phase``: how the job ended; STOPPED if its pods stop. ``outcome``: the result of a successful training.
        ``within_s``: limit of time in seconds, of which the report gets at most half. The report is packed within
        ``runreport.LIMIT_S``, and all files are written within ``OUTPUTS_S``, in any case.

        A coordinator that has launched nothing only adds output, because an earlier one may have stored the output of
        more ranks, and the report of the whole run.
        """
        end_s = time.monotonic() + within_s
        if self.attempts == 0:
            added = await self._packed_outputs(LIMIT_NBYTES - REPORT_LIMIT_NBYTES, within_s / 2)
            await self.reporter.add_outputs(added, self.ended_attempt, end_s - time.monotonic())
            return
        files: dict[str, bytes] = {}
        try:
            async with asyncio.timeout(min(within_s / 2, runreport.LIMIT_S)):
                files = await self.account.packed(phase, time.time(), outcome)
        except TimeoutError:
            log.warning("run report: not packed in time; only the last output of the ranks is stored outside the pods")
        left_nbytes = LIMIT_NBYTES - sum(map(stored_nbytes, files.values()))
        files |= await self._packed_outputs(left_nbytes, (end_s - time.monotonic()) / 2)
        await self.reporter.write_outputs(files, self.ended_attempt, end_s - time.monotonic())

    async def _packed_outputs(self, limit_nbytes: int, within_s: float) -> dict[str, bytes]:
        """Return the last output of the ranks as files. A thread packs them, so that messages are still answered."""
        return await asyncio.to_thread(packed, dict(self.outputs), limit_nbytes, min(within_s, OUTPUTS_S))

    def stop_step(self, attempt: Attempt) -> int | None:
        """Return the number of steps after which all ranks of the attempt must stop.

        Return None if the script uses ``dltrain.init`` or has not called ``dltrain.report``. The ranks of a script that
        calls only ``dltrain.report`` cannot agree on a step, so the coordinator chooses one. It is late enough for the
        request to reach all ranks before they complete it.
        """
        if not attempt.only_reports:
            return None
        step_s = self.ledger.report(time.time()).step_s or STOP_AHEAD_S
        return self.account.history.farthest_step + 1 + ceil(STOP_AHEAD_S / step_s)

    def outcome_of(self, attempt: Attempt) -> Outcome:
        """Return the result that the ranks of ``attempt`` reported. If there is none, make one from the last report.

        Ranks report no result if they run a script without ``dltrain.init``, or were asked to stop. The report has the
        steps, the loss and the accuracy from their last progress updates, and the last checkpoint.
        """
        if attempt.outcome is not None:
            return attempt.outcome
        last = self.ledger.report(time.time())
        saved = last.last_checkpoint or (last.uploads.last if last.uploads is not None else None)
        return Outcome(
            steps=max(last.step, (saved.step or 0) if saved is not None else 0),
            seconds=time.monotonic() - attempt.started_s,
            loss=last.loss,
            accuracy=last.accuracy,
            checkpoint=saved.path if saved is not None and saved.path else None,
        )

    def record_failure(self, failure: Failure) -> None:
        self.ledger.failure = failure
        self.account.history.fault(failure, time.time())

    def set_phase(self, phase: RunPhase) -> None:
        if phase is not self.ledger.phase:
            log.info("phase %s", phase)
        self.ledger.phase = phase
        self.membership.publish(phase)
        self.reporter.urge()
