"""Messages of a layered parameter server: a gather of one buffer on rank 0, and a broadcast from rank 0.

The server, rank 0, receives the buffer of one worker after another and adds them in rank order, so the result does not
depend on the order of arrival. Workers get back only the end of the last buffer, which has values that all ranks share.
After its update, the server broadcasts the parameters along a binomial tree (Chan et al. 2007, section 4). This is the
centralized parallel training that Caffe's port to the Sunway TaihuLight is compared with.
"""

from typing import Any

import torch

from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.schedule import Schedule, pieces


class LayeredGather(Scheduled):
    """The sum of buffers on rank 0. All ranks get the sum of the last ``returned`` elements of the last buffer."""

    name = "LayeredServer"

    def __init__(self, comm: Any, buffers: list[torch.Tensor], segment_nbytes: int, returned: int) -> None:
        self._last, self._returned = len(buffers) - 1, returned
        super().__init__(comm, buffers, segment_nbytes)

    def schedule_of(self, index: int, count: int, longest: int) -> Schedule:
        returned = self._returned if index == self._last else 0
        return gather_to_server(self.rank, self.size, count, longest, returned)

    def schedule(self, count: int, longest: int) -> Schedule:
        return gather_to_server(self.rank, self.size, count, longest, self._returned)


class LayeredBroadcast(Scheduled):
    """The broadcast of rank 0's buffers to all ranks."""

    name = "LayeredServer"

    def schedule(self, count: int, longest: int) -> Schedule:
        return broadcast_from_server(self.rank, self.size, count, longest)


def gather_to_server(rank: int, size: int, count: int, longest: int, returned: int) -> Schedule:
    """Return the messages of ``rank`` in a gather of ``count`` elements, which rank 0 of ``size`` ranks adds up.

    ``longest``: maximum number of elements of a message. ``returned``: number of elements at the end of the buffer
    whose sums rank 0 sends back to every rank.
    """
    schedule, kept = Schedule(), count - returned
    segments = [*pieces(0, kept, longest), *pieces(kept, count, longest)]
    workers = range(1, size)
    for segment in segments:
        back = segment[0] >= kept
        if rank:
            schedule.send(0, segment, 0)
            continue
        after = 0
        for worker in workers:
            after = schedule.receive(worker, segment, add=True)
        for worker in workers if back else ():
            schedule.send(worker, segment, after)
    for segment in segments if rank else ():
        if segment[0] >= kept:
            schedule.receive(0, segment, add=False)
    return schedule.ordered()


def broadcast_from_server(rank: int, size: int, count: int, longest: int) -> Schedule:
    """Return the messages of ``rank`` in a broadcast of ``count`` elements from rank 0 along a binomial tree.

    ``longest``: maximum number of elements of a message. A rank's parent has the rank's number without its lowest set
    bit. The child with the largest subtree comes first. ``size``: number of ranks.
    """
    lowest = rank & -rank if rank else 1 << max(size - 1, 1).bit_length()
    children = [rank + bit for bit in (1 << i for i in range(lowest.bit_length() - 1)) if rank + bit < size]
    schedule = Schedule()
    for segment in pieces(0, count, longest):
        after = schedule.receive(rank - lowest, segment, add=False) if rank else 0
        for child in reversed(children):
            schedule.send(child, segment, after)
    return schedule.ordered()
