"""The coordinator's record of events. It takes events from one queue, records them, and makes no decisions.

It does publish direct consequences at once: the job's phase, a plan that only got a new number or term, and the need
for a report.
"""

import logging
import time

from dlcontract import Failure, Plan, Report, RunPhase
from dltrain.agent.coordinator.diagnosis import Attempt
from dltrain.agent.coordinator.links import Connected, Links, Lost, Said
from dltrain.agent.coordinator.membership import Membership, term_after
from dltrain.agent.coordinator.mpirun import Launcher
from dltrain.agent.coordinator.procedure import Event, Procedure
from dltrain.agent.job.exchange import ReportWriter
from dltrain.agent.job.settings import Settings
from dltrain.agent.job.tls import Identity
from dltrain.host.processes import Reaper
from dltrain.protocol import agent_messages as proto
from dltrain.protocol.rank_messages import Failed, Finished, Mark, Resharded, Shrunk, Step
from dltrain.record.ledger import Ledger
from dltrain.record.run_report import files as runreport

log = logging.getLogger(__name__)
LAUNCH_LIMIT_S = 300.0
"""Time from a launch until every rank's process must have started. It usually takes 1 to 2 s; mpirun has no limit."""
_LAUNCH_TIMEOUT = Failure(
    reason="LaunchFailed",
    message=f"mpirun did not start all ranks within {LAUNCH_LIMIT_S:.0f} s. Check that the job's pods can reach each "
    "other on their MPI ports",
)


class Observer(Procedure):
    """The current plan, the membership, the ledger of progress updates, and the running attempt, if any."""

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
        """``acting``: True if this pod replaces the plan's first pod, which was lost."""
        super().__init__()
        self.settings, self.reporter, self.plan = settings, reporter, plan
        self.ledger = Ledger(plan, previous)
        self._account = runreport.RunReportWriter(self.ledger, time.time())
        self.reporter.compose = lambda: self.ledger.report(time.time())
        self._links = Links(identity.client, settings.agent_port, self._events.put_nowait)
        self._launcher = Launcher(settings, reaper, env, self._links)
        self._membership = Membership(settings, self._links, plan, term_after(plan, previous), acting=acting)
        self.ledger.term = self._membership.term
        self._prepared: set[str] = set()
        """Pods that are ready for the ranks of the attempt."""
        self._ending: set[str] = set()
        """Pods that may still run processes of the previous attempt."""
        self._world: Attempt | None = None
        self._worlds = 0
        self._trained = False
        """True if ranks have completed a step under this plan, even with an earlier coordinator."""
        self._stopping = False
        self._previous = previous
        """The last report of an earlier coordinator, until it was processed."""
        self._failed_in_a_row = 0
        """Consecutive attempts that failed without a completed step."""

    def _tick(self) -> None:
        world = self._world
        if world is not None and not self._stopping and world.outcome is None and world.hung is None:
            world.hung = self.ledger.silent_rank(time.monotonic())
        if world is not None:
            self._account.tick(time.time())
            self._launcher.check_stopped(time.monotonic())
            if world.launcher_runs and not world.troubled and self._launch_timed_out(world):
                world.failures.append((0, _LAUNCH_TIMEOUT))

    def _launch_timed_out(self, world: Attempt) -> bool:
        """Return True if mpirun has not started every rank within ``LAUNCH_LIMIT_S``."""
        begun = world.up | world.ended.keys() | world.absent
        return len(begun) < len(world.plan.ranks) and time.monotonic() - world.started_s > LAUNCH_LIMIT_S

    def _take(self, event: Event) -> None:
        match event:
            case Plan():
                self._planned(event)
            case Connected(pod, welcome):
                self._membership.welcome(pod, welcome, fresh=self._worlds == 0)
                self.ledger.term = self._membership.term
            case Lost(pod, why):
                self._membership.lost(pod)
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
        self.plan = self.ledger.plan = plan  # The same training with a new number or term.
        self._membership.call(plan)
        self.ledger.term = self._membership.term
        self.reporter.urge()

    def _said(self, pod: str, line: proto.Line) -> None:
        world = self._world
        match line:
            case proto.Assigned() | proto.Refused():
                self._membership.answered(pod, line)
            case proto.Leaving():
                self._membership.leaves(pod)
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
            case proto.RankStopped():
                if world.hung is None and world.outcome is None and not self._stopping:
                    world.hung = (line.rank, line.stopped_s)
            case proto.RankLog():
                world.logs[line.rank] = line.tail
            case proto.RankEnded():
                world.ended[line.rank] = line
                self.ledger.forget_rank(line.rank)
            case proto.DaemonEnded():
                self._launcher.daemon_ended(pod, line.exit_code, line.tail)

    def _news(self, line: proto.RankNews, world: Attempt) -> None:
        message = line.news
        if message.rank in world.ended:
            return
        transition = self.ledger.hear(message, time.monotonic())
        self._account.history.hear(message, self.ledger.leader, time.time())
        match message:
            case Step():
                world.progressed = self._trained = True
                self._running()
            case Mark(what="first_step"):
                self._running()
            case Failed() if not world.left:  # Failures after a pod began to leave are consequences of that.
                world.failures.append((message.rank, message.failure))
            case Shrunk():
                self._shrank(message, world)
            case Resharded() if message.rank == self.ledger.leader:
                log.info("local batch sizes from step %d: %s; %s", message.step, message.shares, message.reason)
            case Finished() if message.rank == self.ledger.leader:
                world.outcome = message.outcome
        if transition:
            self.reporter.urge()

    def _shrank(self, message: Shrunk, world: Attempt) -> None:
        absent = {rank.rank for rank in world.plan.ranks} - set(message.alive)
        if absent - world.absent:
            log.info("ranks %s continue from step %d after %.3f s", message.alive, message.step, message.shrink_s)
            world.absent |= absent
            world.shrunk_s = time.monotonic()

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
        self._membership.publish(phase)
        self.reporter.urge()
