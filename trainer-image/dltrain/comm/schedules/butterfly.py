"""Butterfly (recursive doubling): n ranks exchange the whole buffer log2 n times.

This has the lowest latency and the most traffic. If n is not a power of two, the ranks beyond the largest power below n
send their values to a partner and get the total back (Thakur, Rabenseifner and Gropp 2005, section 4.1). In an
exchange, one rank computes a + b and its partner b + a. Both sums are equal to the last bit.
"""

from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.schedule import Schedule, pieces


class Butterfly(Scheduled):
    name = "Butterfly"

    def schedule(self, count: int, longest: int) -> Schedule:
        return butterfly(self.rank, self.size, count, longest)


def butterfly(rank: int, size: int, count: int, longest: int) -> Schedule:
    """Return the messages of ``rank`` in a butterfly all-reduce of ``count`` elements over ``size`` ranks.

    ``longest``: maximum number of elements of a message.
    """
    core = 1 << (size.bit_length() - 1)
    segments = pieces(0, count, longest)
    schedule = Schedule()
    if rank >= core:
        for segment in segments:
            schedule.send(rank - core, segment, 0)
        for segment in segments:
            schedule.receive(rank - core, segment, add=False)
        return schedule
    ready = [0] * len(segments)
    if rank + core < size:
        ready = [schedule.receive(rank + core, segment, add=True) for segment in segments]
    distance = 1
    while distance < core:
        for segment, after in zip(segments, ready, strict=True):
            schedule.send(rank ^ distance, segment, after)
        ready = [schedule.receive(rank ^ distance, segment, add=True) for segment in segments]
        distance *= 2
    if rank + core < size:
        for segment, after in zip(segments, ready, strict=True):
            schedule.send(rank + core, segment, after)
    return schedule.ordered()
