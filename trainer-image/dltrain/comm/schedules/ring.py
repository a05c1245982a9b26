"""Ring all-reduce of n ranks: reduce-scatter, then all-gather, with n - 1 hops each.

The ring is bandwidth-optimal: every rank sends 2 (n - 1) / n of the buffer (Patarasuk and Yuan 2009). Segments are
pipelined: a segment goes to the next rank as soon as it has been added, without waiting for its whole chunk.
"""

from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.schedule import Schedule, chunks, pieces


class Ring(Scheduled):
    name = "Ring"

    def schedule(self, count: int, longest: int) -> Schedule:
        return ring(self.rank, self.size, count, longest)


def ring(rank: int, size: int, count: int, longest: int, hops: range | None = None) -> Schedule:
    """Return the messages of ``rank`` in a ring all-reduce of ``count`` elements over ``size`` ranks.

    ``longest``: maximum number of elements of a message. With n ranks, the buffer has n chunks. Chunk c starts at rank
    c and is complete at rank c - 1 after n - 1 additions. Then the chunk travels around the ring again. ``hops``: a
    range of consecutive hops out of the 2 (n - 1) hops, counted from 0; None: all hops. The first n - 1 hops are a
    reduce-scatter, the others an all-gather.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    grid = [pieces(*chunk, longest) for chunk in chunks(count, size)]
    schedule = Schedule()
    hops = range(2 * (size - 1)) if hops is None else hops
    ready = [0] * len(grid[(rank - hops.start) % size])
    for hop in hops:
        for piece, after in zip(grid[(rank - hop) % size], ready, strict=True):
            schedule.send(right, piece, after)
        add = hop < size - 1
        ready = [schedule.receive(left, piece, add) for piece in grid[(rank - hop - 1) % size]]
    return schedule.ordered()
