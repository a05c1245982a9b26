"""Who of the plan's pods is there, and under which term: the coordinator's roll call.

A term is a number that only grows. A fresh coordinator goes above the highest term that any member has obeyed; one
that meets a higher term later has been superseded and must end, since there are never two.
"""

import uuid

from dlcontract import Plan, Report, RunPhase
from dltrain.agent.coordinator.links import Links
from dltrain.agent.job.settings import Settings
from dltrain.protocol import agent_messages as proto
from dltrain.protocol.volume_layout import claimed_term


class SupersededError(Exception):
    """Another coordinator holds a higher term: this one must end."""


class Membership:
    """The plan in force, handed to every member; ``complete`` once all of its pods have it."""

    def __init__(self, settings: Settings, links: Links, plan: Plan, least: int, *, acting: bool = False) -> None:
        """``least``: the term to begin with, unless the plan's is higher or a member obeys one that is not lower.

        ``acting``: in the place of the plan's first pod, which takes more than half of the pods (see ``_elect``).
        """
        self.term = max(plan.term, least)
        self._boot = uuid.uuid4().hex
        self._settings, self._links, self._plan = settings, links, plan
        self._digest = plan.digest()
        self._phase = RunPhase.WAITING
        self._assigned: set[str] = set()
        self._away: set[str] = set()
        self._voters: dict[str, proto.Welcome] | None = {} if acting else None

    @property
    def complete(self) -> bool:
        """Every pod is connected, has the plan, and is not about to leave."""
        return self._assigned - self._away >= set(self._plan.pods)

    @property
    def present(self) -> tuple[str, ...]:
        """Pods of the plan that are connected, have it, and are not about to leave."""
        return tuple(pod for pod in self._plan.pods if pod in self._assigned - self._away)

    def call(self, plan: Plan) -> None:
        """Everyone connected gets this plan; then connections are kept to its pods and no others."""
        self._plan, self._digest = plan, plan.digest()
        self.term = max(self.term, plan.term)
        self._assign_all()
        hosts = {rank.pod: rank.host for rank in plan.ranks}
        own = self._settings.pod
        self._links.want({pod: self._settings.pod_ip if pod == own else host for pod, host in hosts.items()})

    def welcome(self, pod: str, welcome: proto.Welcome, *, fresh: bool) -> None:
        """A member is there. ``fresh``: this coordinator has launched nothing yet. Raises SupersededError."""
        if self._voters is not None:
            self._elect(pod, welcome)
        elif welcome.term < self.term or welcome.obeys in ("", self._boot):
            self._assign(pod)
        elif fresh:
            self.term = welcome.term + 1
            self._assign_all()
        else:
            raise SupersededError(f"pod {pod} obeys term {welcome.term}, this coordinator has {self.term}")

    def _elect(self, pod: str, welcome: proto.Welcome) -> None:
        """Nobody is told to obey before more than half of the pods are seen to be without a coordinator.

        So of two sides that cannot see each other at most one gets a new coordinator.
        """
        assert self._voters is not None, "there is an election"
        if welcome.led:
            raise SupersededError(f"pod {pod} has a coordinator")
        self._voters[pod] = welcome
        if 2 * len(self._voters) > len(self._plan.pods):
            voters, self._voters = self._voters, None
            self.term = max(self.term, *(vote.term + 1 for vote in voters.values()))
            self._assign_all()

    def answered(self, pod: str, line: proto.Assigned | proto.Refused) -> None:
        """Raises SupersededError on a refusal."""
        if isinstance(line, proto.Refused):
            raise SupersededError(f"pod {pod}: {line.why}")
        if line.digest == self._digest:
            self._assigned.add(pod)

    def leaves(self, pod: str) -> None:
        """It was told to stop: it does not count until it is back."""
        self._away.add(pod)

    def lost(self, pod: str) -> None:
        if self._voters is not None:
            self._voters.pop(pod, None)
        self._assigned.discard(pod)
        self._away.discard(pod)

    def tell(self, phase: RunPhase) -> None:
        """Everyone, also those who come later, learns the job's phase."""
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
    """Above every term that left a trace: with all agents new, only the report and the volume remember."""
    reported = previous.term if previous is not None and previous.uid == plan.uid else 0
    return max(reported, claimed_term(plan) if plan.checkpoint.enabled else 0) + 1
