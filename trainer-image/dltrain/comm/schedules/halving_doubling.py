"""Recursive halving-doubling: log2 p exchanges that halve what is summed, log2 p that double it; a ring's traffic.

In exchange l rank r's partner is r with bit l flipped; both hold the same part of the buffer, each keeps one half of it
and sends the other. What is left is a rank's own p-th of the sum, and the same exchanges go back, each rank giving all
it holds (Rabenseifner 2004). 2 log2 p messages instead of a ring's 2 (p - 1), and the halves are exchanged between
neighbours first, who may share a node.

When n is no power of two, p is the one below, and each rank beyond it first shares its values with a partner: both sum
one half, the partner gets the other one's half, goes through the exchanges, and gives the total back (Thakur,
Rabenseifner and Gropp 2005, section 4.3).

Halves are cut into segments, and those come first that the next exchange needs first, so that they are pipelined.
"""

from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.schedule import Piece, Schedule, chunks, pieces

Exchange = tuple[int, list[Piece], list[Piece]]
"""(partner, the half that this rank sums, the half that the partner sums), each in pieces."""


class HalvingDoubling(Scheduled):
    name = "HalvingDoubling"

    def schedule(self, count: int, longest: int) -> Schedule:
        return halving_doubling(self.rank, self.size, count, longest)


def halving_doubling(rank: int, size: int, count: int, longest: int) -> Schedule:
    """``rank``'s messages for ``count`` elements in segments of at most ``longest``."""
    core = 1 << (size.bit_length() - 1)
    halves = _Halves(rank % core, core, count, longest)
    schedule = Schedule()
    if rank >= core:
        for piece in halves.given:
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
        for piece in halves.given:
            ready.receive(rank + core, piece, add=True)
        for piece in halves.kept:
            ready.receive(rank + core, piece, add=False)
    for partner, kept, given in halves.halvings:
        for piece in given:
            ready.send(partner, piece)
        for piece in kept:
            ready.receive(partner, piece, add=True)
    for partner, kept, given in halves.doublings:
        for piece in kept:
            ready.send(partner, piece)
        for piece in given:
            ready.receive(partner, piece, add=False)
    if rank + core < size:
        for piece in halves.whole:
            ready.send(rank + core, piece)
    return schedule.ordered()


class _Halves:
    """What a rank keeps and gives away; the buffer is a binary tree over ``core`` leaves, a power of two."""

    def __init__(self, rank: int, core: int, count: int, longest: int) -> None:
        self._rank, self._longest = rank, longest
        self._bounds = [start for start, _ in chunks(count, core)] + [count]
        self.halvings: list[Exchange] = []
        self.doublings: list[Exchange] = []
        node = (0, core)
        for level in range(core.bit_length() - 1):
            kept, given = self._children(node, level)
            partner, deeper = rank ^ (1 << level), level + 1
            self.halvings.append((partner, self._cut(kept, deeper), self._cut(given, deeper)))
            # What a rank has held longest goes first on the way back: what came last is still arriving.
            back = self._cut(kept, deeper, kept_first=True), self._cut(given, deeper, kept_first=True)
            self.doublings.insert(0, (partner, *back))
            node = kept
        _, self.kept, self.given = self.halvings[0]
        self.whole = self._cut((0, core), 0, kept_first=True)
        leaves = [piece for leaf in range(core) for piece in self._cut((leaf, leaf + 1), core)]
        self.cuts = [0, *(stop for _, stop in leaves)]
        """Bounds of the shortest pieces; all others begin and end at one of them."""

    def _children(self, node: tuple[int, int], level: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(the half of a node that this rank keeps in exchange ``level``, the one it gives away), in leaves."""
        start, stop = node
        middle = (start + stop) // 2
        halves = (start, middle), (middle, stop)
        return halves[::-1] if self._rank >> level & 1 else halves

    def _cut(self, node: tuple[int, int], level: int, *, kept_first: bool = False) -> list[Piece]:
        """A node in pieces, those first that are given away first in exchange ``level`` and later, or those last.

        The same on both sides of the exchange before: from ``level`` on their bits are equal.
        """
        start, stop = node
        first, last = self._bounds[start], self._bounds[stop]
        if last - first <= self._longest or stop - start == 1:
            return pieces(first, last, self._longest)
        halves = [self._cut(half, level + 1, kept_first=kept_first) for half in self._children(node, level)]
        return [piece for half in (halves if kept_first else reversed(halves)) for piece in half]


class _Ready:
    """Appends messages to a schedule; a send begins once all that it reads has been received."""

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
