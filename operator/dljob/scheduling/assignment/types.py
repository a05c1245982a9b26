"""The jobs of an assignment, what they hold, and what they get."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat, zip_longest

QuotaAmounts = tuple[int, ...]
"""QuotaAmounts of the resources that the quotas of one owner limit, in thousandths of a unit and in a fixed order.

Empty: nothing is needed or used, or nothing is limited."""


def sum_of(amounts: Iterable[QuotaAmounts]) -> QuotaAmounts:
    return tuple(map(sum, zip_longest(*amounts, fillvalue=0)))


def less_used(amounts: QuotaAmounts, used: QuotaAmounts) -> QuotaAmounts:
    """Return ``amounts`` minus ``used``."""
    return tuple(mine - its for mine, its in zip(amounts, chain(used, repeat(0)), strict=False))


def exceeds(more: QuotaAmounts, used: QuotaAmounts, allowed: QuotaAmounts) -> bool:
    """Return True if ``more`` and what is ``used`` already are more than ``allowed`` of any resource that is needed."""
    return any(
        need > 0 and mine + need > most for need, mine, most in zip(more, chain(used, repeat(0)), allowed, strict=False)
    )


@dataclass(frozen=True, slots=True)
class Option:
    """A plan of a job on ``per_node`` devices of each of ``nodes`` nodes with one type of device.

    ``seconds``: predicted seconds from the start of this plan until the job ends, above 0. ``needs``: what it takes of
    each entry of ``Candidate.allowed``; empty: nothing.
    """

    device: str
    nodes: int
    per_node: int
    seconds: float
    needs: QuotaAmounts = ()

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def with_needs(self, needs: QuotaAmounts) -> "Option":
        return replace(self, needs=needs) if needs else self


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that waits or runs, and wants devices. ``options``: its plans, including those that do not fit now.

    ``owner``: its namespace. ``weight``: the weight of the namespace. ``due_s``: the largest ``Option.seconds`` with
    which it meets its deadline; None: it has none. ``preempts``: True: running jobs of a lower priority stop for it.
    ``overdue``: True if it has waited so long that it starts before other waiting jobs of its priority. ``allowed``:
    what the owner's quotas allow to all its jobs together, of each resource of each quota. It is equal for all of them.
    """

    priority: int
    options: tuple[Option, ...]
    owner: str = ""
    weight: float = 1.0
    due_s: float | None = None
    preempts: bool = False
    overdue: bool = False
    allowed: QuotaAmounts = ()


@dataclass(frozen=True, slots=True)
class Held:
    """What a job holds now. ``devices``: device type → number of devices; empty for a job that waits.

    ``left_s``: remaining seconds if the job stays on these devices. ``movable``: False if the job must not restart now.
    ``uses``: what it has of each entry of ``Candidate.allowed``; empty: nothing.
    """

    devices: Mapping[str, int]
    left_s: float = 0.0
    movable: bool = False
    uses: QuotaAmounts = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The result of an assignment. Each field has one entry per job, in the order of the jobs.

    ``parts``: the option that each job gets, called its *part*; None: it gets no devices now. ``moves``: True if the
    job runs now and restarts on its part. ``helped``: indices of the jobs that need the devices or quota that the job
    gives up; empty if the job does not restart.
    """

    parts: "Choices"
    moves: tuple[bool, ...]
    helped: tuple[tuple[int, ...], ...]


Choices = tuple[Option | None, ...]
Jobs = Sequence[tuple[Option, ...]]
