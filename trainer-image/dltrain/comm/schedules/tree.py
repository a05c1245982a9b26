"""Binomial tree: reduce to rank 0, then broadcast.

With n ranks, a buffer takes 2 log2 n hops, which suits small buffers and links of high latency. Segments are pipelined
in both directions.
"""

from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.schedule import Schedule, pieces


class Tree(Scheduled):
    name = "Tree"

    def schedule(self, count: int, longest: int) -> Schedule:
        return tree(self.rank, self.size, count, longest)


def tree(rank: int, size: int, count: int, longest: int) -> Schedule:
    """Return the messages of ``rank`` in an all-reduce of ``count`` elements over a tree of ``size`` ranks.

    ``longest``: maximum number of elements of a message. A rank's parent has the rank's number without its lowest set
    bit. Each child has the rank's number with one more bit set, below that lowest bit.
    """
    lowest = rank & -rank if rank else 1 << max(size - 1, 1).bit_length()
    children = [rank + bit for bit in (1 << i for i in range(lowest.bit_length() - 1)) if rank + bit < size]
    schedule = Schedule()
    segments = pieces(0, count, longest)
    for segment in segments:
        after = 0
        for child in children:
            after = schedule.receive(child, segment, add=True)
        if rank:
            schedule.send(rank - lowest, segment, after)
        else:
            for child in reversed(children):
                schedule.send(child, segment, after)
    if rank:
        for segment in segments:
            after = schedule.receive(rank - lowest, segment, add=False)
            for child in reversed(children):
                schedule.send(child, segment, after)
    return schedule.ordered()
