"""Recursive halving-doubling: p ranks reduce-scatter in log2 p exchanges, then all-gather in log2 p exchanges.

In exchange l of the reduce-scatter, the partner of rank r is r with bit l flipped. Both ranks have the same part of the
buffer. Each rank sums one half of this part and sends the other half to its partner. After log2 p exchanges, each rank
has 1/p of the total. In the all-gather, the same exchanges run in reverse order, and each rank sends all totals that it
has (Rabenseifner 2004). The traffic is that of a ring, but a rank sends only 2 log2 p messages instead of a ring's
2 (p - 1). The largest messages go between neighbours, which may share a node.

If the number of ranks n is not a power of two, p is the largest power of two below n, and each rank r from p on has the
partner r - p. The two ranks first sum one half of the buffer each. Rank r sends its half to the partner, which takes
part in the exchanges and sends the total back (Thakur, Rabenseifner and Gropp 2005, section 4.3).

Halves are split into segments, in the order in which the next exchange needs them, so that exchanges are pipelined.
"""

from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.schedule import Piece, Schedule, chunks, pieces

Exchange = tuple[int, list[Piece], list[Piece]]
"""An exchange with another rank: (number of the partner, the half that this rank sums, the half that the partner sums).

Each half is a list of pieces of the buffer."""


class HalvingDoubling(Scheduled):
    name = "HalvingDoubling"

    def schedule(self, count: int, longest: int) -> Schedule:
        return halving_doubling(self.rank, self.size, count, longest)


def halving_doubling(rank: int, size: int, count: int, longest: int) -> Schedule:
    """Return the messages of ``rank`` in a halving-doubling all-reduce of ``count`` elements over ``size`` ranks.

    ``longest``: maximum number of elements of a message.
    """
    core = 1 << (size.bit_length() - 1)
    halves = _Halves(rank % core, core, count, longest)
    schedule = Schedule()
    if rank >= core:
        for piece in halves.other:
            schedule.send(rank - core, piece, 0)
        for piece in halves.kept:
            schedule.send(rank - core, piece, schedule.receive(rank - core, piece, add=True))
        for piece in halves.whole:
            schedule.receive(rank - core, piece, add=False)
        return schedule.ordered()
    ready = _Ready(halves.cuts, schedule)
    if rank + core < size:
        for piece in halves.kept:
            ready.send(rank + core, piece)
        for piece in halves.other:
            ready.receive(rank + core, piece, add=True)
        for piece in halves.kept:
            ready.receive(rank + core, piece, add=False)
    for partner, kept, other in halves.halvings:
        for piece in other:
            ready.send(partner, piece)
        for piece in kept:
            ready.receive(partner, piece, add=True)
    for partner, kept, other in halves.doublings:
        for piece in kept:
            ready.send(partner, piece)
        for piece in other:
            ready.receive(partner, piece, add=False)
    if rank + core < size:
        for piece in halves.whole:
            ready.send(rank + core, piece)
    return schedule.ordered()


class _Halves:
    """The halves that one rank sums and sends in each exchange. ``core``: the number of ranks, a power of two.

    The buffer is divided as a binary tree with ``core`` leaves. A node is a range of leaves.
    """

    def __init__(self, rank: int, core: int, count: int, longest: int) -> None:
        self._rank, self._longest = rank, longest
        self._bounds = [start for start, _ in chunks(count, core)] + [count]
        self.halvings: list[Exchange] = []
        self.doublings: list[Exchange] = []
        node = (0, core)
        for level in range(core.bit_length() - 1):
            kept, other = self._children(node, level)
            partner, deeper = rank ^ (1 << level), level + 1
            self.halvings.append((partner, self._cut(kept, deeper), self._cut(other, deeper)))
            # In the all-gather, a rank first sends the pieces that arrived first, because the last ones may still be
            # arriving.
            back = self._cut(kept, deeper, kept_first=True), self._cut(other, deeper, kept_first=True)
            self.doublings.insert(0, (partner, *back))
            node = kept
        _, self.kept, self.other = self.halvings[0]
        self.whole = self._cut((0, core), 0, kept_first=True)
        leaves = [piece for leaf in range(core) for piece in self._cut((leaf, leaf + 1), core)]
        self.cuts = [0, *(stop for _, stop in leaves)]
        """Positions at which the smallest pieces start and end. All other pieces also start and end at one of them."""

    def _children(self, node: tuple[int, int], level: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the halves of a node: (the half that this rank sums in exchange ``level``, the half that it sends).

        A node is a range (start, stop) of leaves, the smallest parts of the buffer.
        """
        start, stop = node
        middle = (start + stop) // 2
        halves = (start, middle), (middle, stop)
        return halves[::-1] if self._rank >> level & 1 else halves

    def _cut(self, node: tuple[int, int], level: int, *, kept_first: bool = False) -> list[Piece]:
        """Split a node (range of leaves) into pieces, ordered by the exchange, from ``level`` on, that sends them.

        The half that this rank sends in exchange ``level`` precedes the half that it sums. Each half is ordered in the
        same way for the later exchanges. ``kept_first``: True for the reverse order. Both partners of the previous
        exchange get the same pieces, because the bits of their ranks are equal from ``level`` on.
        """
        start, stop = node
        first, last = self._bounds[start], self._bounds[stop]
        if last - first <= self._longest or stop - start == 1:
            return pieces(first, last, self._longest)
        halves = [self._cut(half, level + 1, kept_first=kept_first) for half in self._children(node, level)]
        return [piece for half in (halves if kept_first else reversed(halves)) for piece in half]


class _Ready:
    """A builder that appends messages to ``schedule``. Each send waits for all earlier receives of its elements.

    ``cuts``: bounds of the smallest pieces of the buffer. Each message starts and ends at one of them.
    """

    def __init__(self, cuts: list[int], schedule: Schedule) -> None:
        self._schedule = schedule
        self._index = {cut: index for index, cut in enumerate(cuts)}
        self._after = [0] * len(cuts)

    def send(self, peer: int, piece: Piece) -> None:
        start, stop = piece
        self._schedule.send(peer, piece, max(self._after[self._index[start] : self._index[stop]]))

    def receive(self, peer: int, piece: Piece, *, add: bool) -> None:
        start, stop = piece
        cells = range(self._index[start], self._index[stop])
        count = self._schedule.receive(peer, piece, add)
        for cell in cells:
            self._after[cell] = count
