"""Going on without ranks that died (ULFM): agreement on every step, and what is left to agree on afterwards.

A step commits only when all ranks agree that each of them has its sum: a rank that dies while the sum is under way may
leave it complete on some and not on others. Until then parameters are as they were, so the survivors compute the same
step again, with the lost samples among them: none is lost, none counts twice.
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
    """The same batch among ``alive``, in proportion to their shares, which follow the speeds; 0 for the others."""
    return apportion(sum(shares), [share if rank in alive else 0 for rank, share in enumerate(shares)])


class Elastic:
    """The ranks of a plan that are left. ``alive``: their numbers in the plan; their order is the world's."""

    def __init__(self, plan: Plan, world: ProcessGroup, *, on_cpu: bool) -> None:
        self.alive: tuple[int, ...] = tuple(range(world.size))
        self.agree_s = 0.0
        """Time that the last agreement took, most of it waiting for the slowest rank to come to it."""
        self._world, self._least, self._number = world, plan.min_ranks, world.rank
        self.active = (
            plan.min_ranks < world.size
            and plan.collective in MEASURABLE
            and plan.parallelism == "Data"
            and on_cpu
            and world.survives
        )
        """Whether ranks may go on without others; else a loss raises PeerLostError, and a relaunch cures it."""

    def attempt(self, operation: Callable[[], T], wake: Callable[[], None]) -> T | None:
        """Do something that all ranks do together; None, on all of them, when one was lost before all had done it.

        ``wake``: end the operation on ranks that wait in it for one that is not coming. Raises PeerLostError where
        not ``active``.
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
        agreed = self._world.agree(done)
        self.agree_s = time.perf_counter() - began
        return result if agreed else None

    def regroup(self, step: int) -> None:
        """Shrink the world to those that live, who are all at ``step``.

        Raises PeerLostError when they are too few for the plan.
        """
        rows: list[list[float]] | None = None
        while rows is None:  # again, when another one dies meanwhile
            self._world.shrink()
            if self._world.size < self._least:
                raise PeerLostError(f"found {self._world.size} ranks left, expected at least {self._least}")
            rows = self.attempt(lambda: self._world.gather([self._number, step]), self._world.abandon)
        if any(row[1] != step for row in rows):
            raise PeerLostError(f"found survivors at steps {[int(row[1]) for row in rows]}, expected all at {step}")
        self.alive = tuple(int(row[0]) for row in rows)
