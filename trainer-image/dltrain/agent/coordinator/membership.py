"""The membership of a job: the connected pods of the plan, and the coordinator's term.

A term is a number that only grows. A new coordinator takes a term above the highest term that any member has obeyed. If
a coordinator later finds a higher term, it was superseded and must end, because a job must not have two coordinators.
"""

import uuid

from dlcontract import Plan, Report, RunPhase
from dltrain.agent.coordinator.links import Links
from dltrain.agent.job.settings import Settings
from dltrain.protocol import agent_messages as proto
from dltrain.protocol.volume_layout import claimed_term


class SupersededError(Exception):
    """Another coordinator has taken over the job, so this coordinator must end.

    The other coordinator has a higher term, a number that rises with each takeover.
    """


class Membership:
    """The current plan, and the members (agents of the plan's pods) that have received it and obey this coordinator."""

    def __init__(self, settings: Settings, links: Links, plan: Plan, min_term: int, *, acting: bool = False) -> None:
        """Create the membership for ``plan``. ``min_term``: a lower bound of this coordinator's term.

        A term is a number that rises with each new coordinator. This coordinator's term becomes higher than
        ``min_term`` if the plan has a higher term or members have obeyed a higher one. ``acting``: True if this pod
        replaces the plan's first pod. A majority of the pods must then elect this coordinator (``_elect``).
        """
        self.term = max(plan.term, min_term)
        self._boot = uuid.uuid4().hex
        self._settings, self._links, self._plan = settings, links, plan
        self._digest = plan.digest()
        self._phase = RunPhase.WAITING
        self._assigned: set[str] = set()
        self._away: set[str] = set()
        self._voters: dict[str, proto.Welcome] | None = {} if acting else None

    @property
    def complete(self) -> bool:
        """True if every pod of the plan is connected, has the plan, and has not received SIGTERM."""
        return self._assigned - self._away >= set(self._plan.pods)

    @property
    def present(self) -> tuple[str, ...]:
        """The pods of the plan that are connected, have the plan, and have not received SIGTERM."""
        return tuple(pod for pod in self._plan.pods if pod in self._assigned - self._away)

    def call(self, plan: Plan) -> None:
        """Make ``plan`` the current plan and send it to all connected pods.

        Then open connections to all pods of ``plan``, and close the connections to other pods.
        """
        self._plan, self._digest = plan, plan.digest()
        self.term = max(self.term, plan.term)
        self._assign_all()
        hosts = {rank.pod: rank.host for rank in plan.ranks}
        own = self._settings.pod
        self._links.want({pod: self._settings.pod_ip if pod == own else host for pod, host in hosts.items()})

    def welcome(self, pod: str, welcome: proto.Welcome, *, fresh: bool) -> None:
        """Handle the first message of a member (a pod's agent): send it the plan or, in an election, count its vote.

        ``fresh``: True if this coordinator has not launched ranks yet. If the member obeys another coordinator whose
        term is not lower, a fresh coordinator takes a higher term. A coordinator that is not fresh was superseded and
        raises SupersededError.
        """
        if self._voters is not None:
            self._elect(pod, welcome)
        elif welcome.term < self.term or welcome.obeys in ("", self._boot):
            self._assign(pod)
        elif fresh:
            self.term = welcome.term + 1
            self._assign_all()
        else:
            raise SupersededError(
                f"pod {pod} follows another coordinator, of term {welcome.term} (terms count takeovers). This "
                f"coordinator has term {self.term} and ends"
            )

    def _elect(self, pod: str, welcome: proto.Welcome) -> None:
        """Count ``pod`` as a vote. Become the coordinator when more than half of the plan's pods have voted.

        A pod votes by connecting while it has no coordinator. In a network partition, at most one side can therefore
        get a new coordinator. Raise SupersededError if ``pod`` is connected to another coordinator.
        """
        assert self._voters is not None, "an election is in progress"
        if welcome.has_coordinator:
            raise SupersededError(f"pod {pod} is still connected to a coordinator, so this pod does not take over")
        self._voters[pod] = welcome
        if 2 * len(self._voters) > len(self._plan.pods):
            voters, self._voters = self._voters, None
            self.term = max(self.term, *(vote.term + 1 for vote in voters.values()))
            self._assign_all()

    def answered(self, pod: str, line: proto.Assigned | proto.Refused) -> None:
        """Record that the member in ``pod`` has accepted the plan. Raise SupersededError if it refused the plan."""
        if isinstance(line, proto.Refused):
            raise SupersededError(f"pod {pod}: {line.why}")
        if line.digest == self._digest:
            self._assigned.add(pod)

    def leaves(self, pod: str) -> None:
        """Record that a pod received SIGTERM. The pod does not count as present until its agent reconnects."""
        self._away.add(pod)

    def lost(self, pod: str) -> None:
        if self._voters is not None:
            self._voters.pop(pod, None)
        self._assigned.discard(pod)
        self._away.discard(pod)

    def publish(self, phase: RunPhase) -> None:
        """Send the job's phase to all members, including those that connect later."""
        self._phase = phase
        if self._voters is None:
            self._links.send_all(proto.PhaseNow(phase=phase))

    def _assign_all(self) -> None:
        for pod in self._links.connected:
            self._assign(pod)

    def _assign(self, pod: str) -> None:
        self._assigned.discard(pod)
        if self._voters is not None:
            return
        own = self._settings.pod
        assign = proto.Assign(
            coordinator=own, boot=self._boot, term=self.term, digest=self._digest, plan=self._plan.to_json()
        )
        self._links.send(pod, assign)
        self._links.send(pod, proto.PhaseNow(phase=self._phase))


def term_after(plan: Plan, previous: Report | None) -> int:
    """Return a term for a new coordinator: higher than the terms in the job's last report and on the checkpoint volume.

    A term is a number that rises with each new coordinator. Agents obey the coordinator with the highest term.
    ``previous``: the last report of an earlier coordinator, or None. The highest term is read from the report and the
    volume, because agents that have just started have seen no term.
    """
    reported = previous.term if previous is not None and previous.uid == plan.uid else 0
    return max(reported, claimed_term(plan)) + 1
