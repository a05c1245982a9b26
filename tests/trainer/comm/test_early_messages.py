"""A rank that begins an all-reduce last has received at most what plans count for early messages."""

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


def received_early(schedules: list[Schedule], late: int) -> int:
    """Return the elements that are sent to the rank ``late`` although it takes no part."""
    handled, begun = [0] * len(schedules), [0] * len(schedules)
    sent: dict[tuple[int, int], int] = {}
    taken: dict[tuple[int, int], int] = {}
    elements, moved = 0, True
    while moved:
        moved = False
        for rank, schedule in enumerate(schedules):
            if rank == late:
                continue
            while begun[rank] < len(schedule.sends) and schedule.sends[begun[rank]].after <= handled[rank]:
                send = schedule.sends[begun[rank]]
                sent[rank, send.peer] = sent.get((rank, send.peer), 0) + 1
                elements += send.stop - send.start if send.peer == late else 0
                begun[rank], moved = begun[rank] + 1, True
            while handled[rank] < len(schedule.receives):
                link = schedule.receives[handled[rank]].peer, rank
                if sent.get(link, 0) == taken.get(link, 0):
                    break
                taken[link], handled[rank], moved = taken.get(link, 0) + 1, handled[rank] + 1, True
    return elements


@pytest.mark.parametrize("collective", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 9, 16, 17])
def test_plans_count_what_arrives_before_a_rank_takes_part(collective: CollectiveName, ranks: int) -> None:
    schedules = [SCHEDULES[collective](rank, ranks, COUNT, LONGEST) for rank in range(ranks)]
    most = max(received_early(schedules, late) for late in range(ranks)) / COUNT
    assert most <= early_part(ranks, collective) + 1e-2, "chunks differ by an element"
    assert most >= early_part(ranks, collective) - 1e-2, "not more than needed"
