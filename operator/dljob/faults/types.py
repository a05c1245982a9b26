"""Types of the record of node faults. Each node's part is stored as JSON, see ``faults.stored``."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

EVERY_NAMESPACE = ""
"""Value of the field ``namespace`` that stands for all namespaces.

A fault has it if the node's own condition shows the fault, so that no job had to report it. A ``LeftOut`` has it if the
node is left out of the plans of all namespaces.
"""


class FaultKind(StrEnum):
    DEVICE = "DeviceFailed"
    NETWORK = "NetworkFailed"
    NOT_READY = "NodeNotReady"

    @property
    def of_connection(self) -> bool:
        """Return True for the kinds that show a lost connection to the node (NETWORK and NOT_READY).

        One incident may cause faults of both kinds: agents report that they cannot reach a node, and Kubernetes shows
        later that it is not ready.
        """
        return self is not FaultKind.DEVICE


_WORDS = {
    FaultKind.DEVICE: "device fault",
    FaultKind.NETWORK: "network fault",
    FaultKind.NOT_READY: "time NotReady",
}


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Fault(_Stored):
    """A fault of a node, from a job's report, from the kubelet's message about a pod, or from the node's own condition.

    ``key``: text that identifies the fault. In one namespace, faults with equal keys are the same fault.
    """

    node: Annotated[str, Field(min_length=1, max_length=253)]
    kind: FaultKind
    key: Annotated[str, Field(min_length=1, max_length=400)]
    at: AwareDatetime
    """Time when the operator noticed the fault. The clock of the trainer is not trusted."""
    namespace: Annotated[str, Field(max_length=63)] = EVERY_NAMESPACE
    """Namespace of the job whose pods reported the fault; empty if the node's own condition shows it."""


class LeftOut(_Stored):
    """A period, from ``since`` to ``until``, in which a node is left out of the plans of one or of all namespaces."""

    node: Annotated[str, Field(min_length=1, max_length=253)]
    namespace: Annotated[str, Field(max_length=63)] = EVERY_NAMESPACE
    since: AwareDatetime
    until: AwareDatetime
    times: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many times in a row the node was left out, including this period. Each repetition lasts twice as long."""
    kinds: Annotated[tuple[FaultKind, ...], Field(max_length=100)] = ()
    """Kinds of the faults because of which the node is left out."""

    @property
    def reason(self) -> str:
        """Describe the faults because of which the node is left out, such as '2 device faults'."""
        counts = Counter(self.kinds)
        words = (
            f"{n} {_WORDS[kind].replace('time', 'times') if n > 1 and kind is FaultKind.NOT_READY else _WORDS[kind]}"
            f"{'s' if n > 1 and kind is not FaultKind.NOT_READY else ''}"
            for kind, n in sorted(counts.items())
        )
        return ", ".join(words) or "repeated faults"

    def __str__(self) -> str:
        """Describe the node, the end and the faults: 'node-7 until 2026-03-01T14:00Z (2 device faults)'."""
        return f"{self.node} until {self.until.astimezone(UTC):%Y-%m-%dT%H:%MZ} ({self.reason})"


class NodeRecord(_Stored):
    """The recent faults of one node, and the periods in which it is or was left out of plans.

    Recent faults are those in the last ``FaultPolicy.window_s`` seconds.
    """

    faults: Annotated[tuple[Fault, ...], Field(max_length=100)] = ()
    left_out: Annotated[tuple[LeftOut, ...], Field(max_length=100)] = ()
    """At most one entry for each namespace.

    An entry stays for ``FaultPolicy.longest_s`` seconds after its end, so that the next one counts as a repetition.
    """


Ledger = Mapping[str, NodeRecord]
"""The record of the faults of all nodes: name of a node → its record. Nodes without faults have none."""


@dataclass(frozen=True)
class FaultPolicy:
    """Settings that decide when a node is left out of new plans, and for how long.

    After ``limit`` faults within ``window_s`` seconds, a node is left out for ``first_s`` seconds. Each repetition
    doubles the time, up to ``longest_s`` seconds.
    """

    limit: int = 2
    window_s: float = 3600.0
    first_s: float = 3600.0
    longest_s: float = 86400.0

    def lasts(self, times: int) -> timedelta:
        """Return how long a node is left out for the ``times``-th time in a row (1: the first)."""
        return timedelta(seconds=min(self.longest_s, self.first_s * 2 ** min(times - 1, 60)))
