"""Shrink the process group after a loss of ranks (ULFM) without a restart, and let all ranks agree on every step.

If a rank dies during an all-reduce, the operation may be complete on some ranks only. So a step commits only when all
ranks agree that they have the reduced gradients. Before that, no rank changes parameters. The survivors therefore
compute the same step again and divide the lost rank's samples among them. No sample is lost or counted twice.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from dlcontract import MEASURABLE, Plan
from dltrain.batch.shares import apportion
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import PeerLostError

T = TypeVar("T")


def inherit(shares: Sequence[int], alive: Sequence[int]) -> tuple[int, ...]:
    """Divide the global batch among the live ranks after a loss, in proportion to ``shares``.

    ``shares``: the local batch sizes of all ranks before the loss. ``alive``: numbers of the live ranks. Return the new
    local batch size of every rank; lost ranks get 0.
    """
    return apportion(sum(shares), [share if rank in alive else 0 for rank, share in enumerate(shares)])


class Elastic:
    """The ranks of a plan that are still alive, and how they continue if another rank is lost.

    ``alive``: the numbers of the live ranks in the plan, in the order of the process group.
    """

    def __init__(self, plan: Plan, process_group: ProcessGroup, *, on_cpu: bool) -> None:
        self.alive: tuple[int, ...] = tuple(range(process_group.size))
        self.agree_s = 0.0
        """Seconds that the last check, whether a collective operation succeeded on every rank, took.

        Most of this time is spent waiting for the slowest rank.
        """
        self._process_group, self._min_ranks, self._number = process_group, plan.min_ranks, process_group.rank
        self.active = (
            plan.min_ranks < process_group.size
            and plan.collective in MEASURABLE
            and plan.parallelism == "Data"
            and on_cpu
            and process_group.survives
        )
        """True if the process group can shrink after a loss.

        Otherwise a loss of a rank raises PeerLostError, which leads to a restart of all ranks.
        """

    def run_or_abort(self, operation: Callable[[], T], wake: Callable[[], None]) -> T | None:
        """Run the collective ``operation``. Return its result if it succeeded on all ranks, otherwise None.

        The result is None on all remaining ranks if a rank is lost before every rank has completed the operation. Call
        ``regroup`` then. ``wake``: a function that aborts the operation on other ranks, which may otherwise wait for
        the lost rank forever. If the process group cannot shrink (``active`` is False), raise PeerLostError after a
        loss.
        """
        if not self.active:
            return operation()
        result: T | None = None
        try:
            result, done = operation(), True
        except PeerLostError:
            done = False
            wake()
        began = time.perf_counter()
        agreed = self._process_group.agree(done)
        self.agree_s = time.perf_counter() - began
        return result if agreed else None

    def regroup(self, step: int) -> None:
        """Shrink the process group to the live ranks after a loss, and update ``alive``. All live ranks must call it.

        ``step``: number of completed steps. Raise PeerLostError if this number is not equal on all live ranks, or if
        fewer ranks are left than the plan needs.
        """
        rows: list[list[float]] | None = None
        while rows is None:  # Repeat if another rank is lost in the meantime.
            self._process_group.shrink()
            if self._process_group.size < self._min_ranks:
                raise PeerLostError(
                    f"process group: found {self._process_group.size} ranks left; expected at least {self._min_ranks}"
                )
            rows = self.run_or_abort(
                lambda: self._process_group.gather([self._number, step]), self._process_group.abandon
            )
        if any(row[1] != step for row in rows):
            raise PeerLostError(
                f"remaining ranks: found them after the steps {[int(row[1]) for row in rows]}; expected all after "
                f"step {step}, so that they can continue together"
            )
        self.alive = tuple(int(row[0]) for row in rows)
