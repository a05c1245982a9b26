"""Synchronous parameter servers: each server sums one slice of the buffer. Ranks send their slices and get the totals.

With one server and w workers, the server's link carries w times the buffer in each direction. For large w, a ring is
faster. Several servers divide this traffic. A server is a rank with a local batch size of 0 (Li et al. 2014). Additions
are in rank order, so the result does not depend on the order of arrival.
"""

from typing import Any

import torch

from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.schedule import Schedule, chunks, pieces


class ParameterServer(Scheduled):
    name = "ParameterServer"

    def __init__(self, comm: Any, buffers: list[torch.Tensor], segment_nbytes: int, servers: tuple[int, ...]) -> None:
        """Create the all-reduce of ``buffers``. ``servers``: the ranks that are parameter servers, at least one.

        ``segment_nbytes``: maximum size of a message.
        """
        assert servers, "a parameter server is needed"
        self.servers = servers
        super().__init__(comm, buffers, segment_nbytes)

    def schedule(self, count: int, longest: int) -> Schedule:
        return parameter_server(self.rank, self.size, count, longest, self.servers)


def parameter_server(rank: int, size: int, count: int, longest: int, servers: tuple[int, ...]) -> Schedule:
    """Return the messages of ``rank`` in an all-reduce of ``count`` elements by parameter servers.

    ``size``: number of ranks. ``longest``: maximum number of elements of a message. ``servers``: the ranks that are
    servers. Each server sums one slice of the elements. Segments of different slices alternate, so that all servers
    work from the start.
    """
    slices = [pieces(*chunk, longest) for chunk in chunks(count, len(servers))]
    schedule = Schedule()
    others = [peer for peer in range(size) if peer != rank]
    for turn in range(max(map(len, slices))):
        for server, segments in zip(servers, slices, strict=True):
            if turn >= len(segments):
                continue
            if server != rank:
                schedule.send(server, segments[turn], 0)
                continue
            after = 0
            for peer in others:
                after = schedule.receive(peer, segments[turn], add=True)
            for peer in others:
                schedule.send(peer, segments[turn], after)
    for turn in range(max(map(len, slices))):
        for server, segments in zip(servers, slices, strict=True):
            if server != rank and turn < len(segments):
                schedule.receive(server, segments[turn], add=False)
    return schedule.ordered()
