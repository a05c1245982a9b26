"""The member part of an agent: it obeys the coordinator over mutual TLS and controls the ranks of its pod.

Every pod has a member. The coordinator connects to the member of its own pod as well. Each coordinator has a term, a
number that is higher than the term of its predecessor. A member obeys the coordinator with the highest term that it has
seen and refuses coordinators with lower terms. When the coordinator's connection ends, the member kills its ranks.
"""

import asyncio
import logging

from dlcontract import Failure, Plan, RunPhase, reasons
from dltrain.agent.job.shrink import shrink_plan
from dltrain.agent.member.local_ranks import Event, LocalRanks
from dltrain.agent.member.staged_checkpoints import is_staged
from dltrain.host.tasks import Tasks
from dltrain.protocol import agent_messages as proto
from dltrain.protocol.rank_messages import AttemptPlan, Failed
from dltrain.record.job_logs import RankOutput

log = logging.getLogger(__name__)
STORED = (RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.STOPPED)
"""Phases in which the coordinator itself stores the output of the ranks. In other phases, it only has it in memory."""


class Member:
    """The member of a job in one pod: it controls the pod's ranks and obeys the coordinator with the highest term.

    A term is a number that rises with each new coordinator.
    """

    def __init__(self, pod: str, job_uid: str) -> None:
        self.pod = pod
        self.term = 0
        self.plan: Plan | None = None
        self.phase: RunPhase | None = None
        self.leaving = False
        self.orphaned = asyncio.Event()
        """An event that is set while the connection to the coordinator is lost.

        It is not set before the first coordinator connects.
        """
        self.local: LocalRanks
        self._job_uid = job_uid
        self._ends: dict[int, proto.RankEnded] = {}
        """How each rank of this pod ended in the last attempt, with its last output, by rank number.

        A coordinator may be lost before it has stored the output. The next one then gets it again. The size is limited,
        because a pod has few ranks, and each sends the end of its output only.
        """
        self._lost_ends: set[int] = set()
        """The ranks in ``_ends`` whose output is perhaps not stored.

        They ended while no coordinator was connected, or the coordinator was lost after it received their output.
        """
        self._obeyed: proto.Channel | None = None
        self._obeys = ""
        self._tasks: Tasks[None] = Tasks()

    @property
    def has_coordinator(self) -> bool:
        """True if a coordinator is connected."""
        return self._obeyed is not None

    def emit(self, event: Event) -> None:
        """Send an event of this pod's ranks to the coordinator. If none is connected, keep only how a rank ended."""
        if isinstance(event, proto.RankEnded):
            if any(end.attempt != event.attempt for end in self._ends.values()):
                self._ends.clear()
                self._lost_ends.clear()
            self._ends[event.rank] = event
            if self._obeyed is None:
                self._lost_ends.add(event.rank)
        if self._obeyed is not None:
            self._obeyed.send(event)

    @property
    def unstored_outputs(self) -> dict[int, RankOutput]:
        """The last output of each rank that a coordinator may not have stored and cannot store now, by rank number."""
        return {rank: RankOutput.of(self._ends[rank]) for rank in self._lost_ends}

    @property
    def ended_attempt(self) -> str:
        """The name of the last attempt in which a rank of this pod ended; empty if none ended."""
        return next((end.attempt for end in self._ends.values()), "")

    def leave(self) -> None:
        """Report to the current coordinator, and to every later one, that this pod received SIGTERM."""
        self.leaving = True
        if self._obeyed is not None:
            self._obeyed.send(proto.Leaving())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from a coordinator until it ends.

        If the member obeys this coordinator, kill the pod's ranks when the connection ends.
        """
        channel = proto.Channel(reader, writer)
        channel.send(
            proto.Welcome(pod=self.pod, term=self.term, obeys=self._obeys, has_coordinator=self.has_coordinator)
        )
        try:
            while (line := await channel.receive()) is not None:
                if isinstance(line, proto.Assign):
                    if not await self._assigned(line, channel):
                        break
                elif channel is self._obeyed:
                    await self._obey(line, channel)
                else:
                    break
        except ValueError as error:
            log.warning(
                "closed a coordinator's connection to this pod: found an invalid message (%s); expected one of this "
                "agent's version of dltrain. Use one trainer image for all pods of the job", error,
            )  # fmt: skip
        finally:
            await channel.flush()
            channel.close()
            if channel is self._obeyed:
                self._obeyed = None
                log.info("the connection to the coordinator ended")
                if self.phase not in STORED:
                    self._lost_ends = set(self._ends)
                self.orphaned.set()
                await self.local.end()

    async def _assigned(self, assign: proto.Assign, channel: proto.Channel) -> bool:
        if (why := self._objection(assign)) is not None:
            log.warning("refused coordinator %s: %s", assign.coordinator, why)
            channel.send(proto.Refused(term=self.term, why=why))
            return False
        if connects := self._obeyed is not channel:
            if self._obeyed is not None:
                self._obeyed.close()
            self._obeyed = None
            await self.local.end()
            self._obeyed = channel
        self.orphaned.clear()
        self.term, self._obeys = assign.term, assign.boot
        self.plan = Plan.parse(assign.plan)
        channel.send(proto.Assigned(digest=assign.digest))
        if connects and self._ends:
            log.info("sent the output of %d ended ranks to the coordinator again", len(self._ends))
            for end in self._ends.values():
                channel.send(end)
            self._lost_ends.clear()
        if self.leaving:
            channel.send(proto.Leaving())
        return True

    def _objection(self, assign: proto.Assign) -> str | None:
        if assign.term < self.term:
            return (
                f"term: found {assign.term}; expected at least {self.term}, because another coordinator has taken over"
            )
        if assign.term == self.term and assign.boot != self._obeys:
            return f"term: found a second coordinator in term {self.term}; expected a higher term"
        plan = Plan.parse(assign.plan)
        if plan.uid != self._job_uid:
            return f"plan: found the job uid {plan.uid}; expected {self._job_uid}"
        if plan.digest() != assign.digest:
            return f"plan: found the digest {plan.digest()}; expected {assign.digest}"
        return None

    async def _restore(self, attempt: str, plan: Plan, channel: proto.Channel) -> None:
        """Restore the script's checkpoints in this pod's folder. Then tell the coordinator that the pod is prepared."""
        if await self.local.staged.restore(attempt, plan) and attempt == self.local.attempt:
            channel.send(proto.Prepared(attempt=attempt))

    def _not_prepared(self, attempt: str, plan: Plan, error: OSError) -> proto.RankUpdate:
        """Return the failure of a launch that this pod cannot prepare, such as because its disk is full."""
        rank = next((each.rank for each in plan.ranks if each.pod == self.pod), 0)
        text = (
            f"pod {self.pod}: found the error {error} while it prepared a launch; expected to write to "
            f"{self.local.run_dir}. Look at the disk of its node, and at spec.trainer.scratch.size"
        )
        failure = Failure(reason=reasons.LAUNCH_FAILED, message=text[:8192], rank=rank, host=self.pod)
        return proto.RankUpdate(attempt=attempt, message=Failed(rank=rank, failure=failure))

    async def _obey(self, line: proto.Line, channel: proto.Channel) -> None:
        assert self.plan is not None
        match line:
            case proto.Prepare():
                plan = shrink_plan(self.plan, line.pods) if line.pods else self.plan
                if plan is None:
                    raise ValueError(
                        f"launch: found only the pods {line.pods}; expected all pods, or enough ranks for a job that "
                        "can continue on fewer"
                    )
                current_plan = plan.model_copy(update={"term": self.term})
                history = {"prior_faults": line.faults, "prior_trained_s": line.trained_s}
                attempt_plan = AttemptPlan.of(current_plan, **history)
                try:
                    await self.local.begin(line.attempt, attempt_plan)
                except OSError as error:
                    channel.send(self._not_prepared(line.attempt, attempt_plan, error))
                    return
                if is_staged(attempt_plan):
                    # Further messages must be obeyed meanwhile, because this can take minutes.
                    self._tasks.spawn(self._restore(line.attempt, attempt_plan, channel))
                else:
                    channel.send(proto.Prepared(attempt=line.attempt))
            case proto.StartDaemon() if line.attempt == self.local.attempt:
                self.local.start_daemon(line.arguments, line.host)
            case proto.StartRanks() if line.attempt == self.local.attempt:
                self.local.start_all()
            case proto.Explain() if line.attempt == self.local.attempt:
                self.local.explain()
            case proto.StopRanks() if line.attempt == self.local.attempt:
                self.local.stop(line.grace_s, progressed=line.progressed, at_step=line.at_step)
            case proto.EndAttempt():
                if line.attempt == self.local.attempt:
                    await self.local.end()
                channel.send(proto.AttemptEnded(attempt=line.attempt))
            case proto.PhaseNow():
                self.phase = line.phase
            case _:
                log.info("ignored %s for an attempt that has ended", line.type)
