"""What the operator sees of its probes, and what it can do about them."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from dljob.job.probes.links import Ends
from dljob.job.probes.targets import Target

MAX_STARTS = 3
"""Number of tries to measure a subject. After them, the operator tries it again only after its own restart. Tries that
give way to a job do not count."""
RETRY_S = 600.0
"""Seconds between two tries to measure the same subject."""
LIFE_S = 660.0
"""Age of a probe pod in seconds at which the operator deletes it. Kubernetes should have ended it after 600 s."""
UNBOUND_S = 60.0
"""Age of a probe pod in seconds at which the operator deletes it if no scheduler has placed it on its node."""
MAX_PODS = 4
"""Maximum number of probe pods that exist at the same time."""
MAX_CROWDED = 1.3
"""Largest (elapsed time / CPU time) of a probe's steps that the operator accepts. Above, other processes use the node.

``dltrain.hardware_probe`` measures several cores only below the same limit."""


@dataclass(frozen=True)
class Subject:
    """What a probe measures: the hardware of a device type or, with ``link``, the network between two nodes.

    ``other``: device type of the second node; empty: the same type.
    """

    device: str
    link: bool = False
    other: str = ""

    @property
    def ends(self) -> Ends:
        """Return the device types of the two nodes."""
        return self.device, self.other or self.device

    def __str__(self) -> str:
        if not self.link:
            return f"the hardware of {self.device}"
        return f"the network between nodes of {self.device}" + (f" and {self.other}" if self.other else "")


@dataclass(frozen=True)
class ProbePod:
    """A pod of the operator that measures ``device`` on ``node``. ``message``: its termination message, if it ended.

    ``bound``: True if a scheduler has placed it. ``link``: "server" or "client" of the measurement of a link; "": the
    pod measures hardware. ``client_node``: node for the client of a server. ``address``: IP address of the pod.
    ``alone``: True if the other pod of a link was deleted by others, such as the scheduler. ``other``: device type of
    the server's node, if the link is one between two types.
    """

    name: str
    device: str
    node: str
    phase: str
    message: str
    age_s: float
    bound: bool = True
    link: str = ""
    client_node: str = ""
    address: str = ""
    alone: bool = False
    other: str = ""

    @property
    def subject(self) -> Subject:
        return Subject(self.device, bool(self.link), self.other)


@dataclass(frozen=True)
class Starts:
    """How often the operator has started to measure a subject, and how many seconds ago for the last time."""

    count: int
    ago_s: float

    @property
    def allow_another(self) -> bool:
        return self.count < MAX_STARTS and self.ago_s >= RETRY_S


@dataclass(frozen=True)
class Start:
    """Start to measure the hardware of a target or, with ``link``, the network between its two nodes."""

    target: Target
    link: bool = False

    @property
    def subject(self) -> Subject:
        return Subject(self.target.device, self.link, self.target.other)


@dataclass(frozen=True)
class Connect:
    """Start the client of a link on ``target``, because the server ``pod`` runs."""

    pod: ProbePod
    target: Target


@dataclass(frozen=True)
class Store:
    """Store what a pod has measured, and then delete the pod."""

    pod: ProbePod


class Ending(StrEnum):
    """Why a measurement ends without a result."""

    FAILED = "failed"
    GAVE_WAY = "gave_way"
    """It gives way to a job. The try does not count."""
    NOT_NEEDED = "not_needed"


@dataclass(frozen=True)
class Remove:
    """Delete a pod whose measurement is not stored. ``why``: for the log."""

    pod: ProbePod
    why: str
    ending: Ending = Ending.FAILED


Action = Start | Connect | Store | Remove


def ended(pod: ProbePod, busy: Collection[str], waiting: bool) -> Remove | None:
    """Return how a probe pod that has measured nothing ends now; None if it goes on.

    ``busy``: nodes of machines that jobs use. ``waiting``: True if pods of jobs wait for a node.
    """
    if pod.phase == "Failed":
        return Remove(pod, f"it failed: {pod.message[:200] or 'without a message'}")
    if not {pod.node, pod.client_node}.isdisjoint(busy):
        return Remove(pod, "a job began on its node or machine", Ending.GAVE_WAY)
    if waiting:
        return Remove(pod, "jobs wait for nodes", Ending.GAVE_WAY)
    if not pod.bound and pod.age_s > UNBOUND_S:
        return Remove(pod, f"no scheduler has placed it within {UNBOUND_S:.0f} s")
    if pod.age_s > LIFE_S:
        return Remove(pod, f"it is {pod.phase} after {pod.age_s:.0f} s")
    return None
