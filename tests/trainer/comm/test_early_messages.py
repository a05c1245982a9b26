"""A rank whose peers are ahead in an all-reduce has received at most what plans count for early messages."""

import pytest

from dlcontract import CollectiveName
from dljob.perf.resources.memory import early_part
from dltrain.comm.schedules.butterfly import butterfly
from dltrain.comm.schedules.halving_doubling import halving_doubling
from dltrain.comm.schedules.ring import ring
from dltrain.comm.schedules.schedule import Schedule
from dltrain.comm.schedules.tree import tree

COUNT, LONGEST = 960, 40
SCHEDULES = {"Ring": ring, "Tree": tree, "Butterfly": butterfly, "HalvingDoubling": halving_doubling}


class Simulation:
    """An all-reduce in which all ranks but ``late`` handle messages as soon as they arrive."""

    def __init__(self, schedules: list[Schedule], late: int) -> None:
        self._schedules, self._late = schedules, late
        self._handled, self._begun = [0] * len(schedules), [0] * len(schedules)
        self._sent: dict[tuple[int, int], int] = {}
        self._taken: dict[tuple[int, int], int] = {}
        self.waiting = 0
        """Elements that have been sent to the late rank, and that it has not handled."""

    def most_waiting(self) -> int:
        """Return the most elements that wait if the late rank stops before it begins, or after any of its receives."""
        self._settle()
        found = self.waiting
        more = True
        while more:
            self._begin_sends(self._late)
            self._settle()
            found = max(found, self.waiting)
            more = self._handle(self._late)
        return found

    def _settle(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self._schedules)):
                if rank != self._late:
                    moved = self._begin_sends(rank) or moved
                    moved = self._handle(rank) or moved

    def _begin_sends(self, rank: int) -> bool:
        first, sends = self._begun[rank], self._schedules[rank].sends
        while self._begun[rank] < len(sends) and sends[self._begun[rank]].after <= self._handled[rank]:
            send = sends[self._begun[rank]]
            self._sent[rank, send.peer] = self._sent.get((rank, send.peer), 0) + 1
            self.waiting += send.stop - send.start if send.peer == self._late else 0
            self._begun[rank] += 1
        return self._begun[rank] > first

    def _handle(self, rank: int) -> bool:
        """Handle the next receive of a rank. Return False if its message has not arrived, or if there is none."""
        if self._handled[rank] == len(self._schedules[rank].receives):
            return False
        receive = self._schedules[rank].receives[self._handled[rank]]
        link = receive.peer, rank
        if self._sent.get(link, 0) == self._taken.get(link, 0):
            return False
        self._taken[link] = self._taken.get(link, 0) + 1
        self._handled[rank] += 1
        self.waiting -= receive.stop - receive.start if rank == self._late else 0
        return True


@pytest.mark.parametrize("collective", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 9, 16, 17])
def test_plans_count_what_arrives_before_a_rank_handles_it(collective: CollectiveName, ranks: int) -> None:
    """Regression: a rank that had begun a sum, and then computed, received half as much again in a ring of two."""
    schedules = [SCHEDULES[collective](rank, ranks, COUNT, LONGEST) for rank in range(ranks)]
    most = max(Simulation(schedules, late).most_waiting() for late in range(ranks)) / COUNT
    assert most <= early_part(ranks, collective) + 1e-2, "chunks differ by an element"
    assert most >= early_part(ranks, collective) - 1e-2, "not more than needed"
