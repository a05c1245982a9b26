"""What one rank sends and receives to sum a buffer: a list of messages, made without MPI and run by ``engine``.

Every message-passing strategy is a pure function to a ``Schedule``, so that its laws (right sum, no deadlock, grid)
are tested by simulation for any number of ranks and any size.

Laws. The k-th message from a to b in a's order is the k-th from a in b's order, over the same range. Receives are
handled strictly in order.
"""

from dataclasses import dataclass, field

Piece = tuple[int, int]
"""Elements, the second one not included."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Elements ``start:stop`` from ``peer``, added to the buffer's or replacing them."""

    peer: int
    start: int
    stop: int
    add: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Elements ``start:stop`` to ``peer``, begun once the first ``after`` receives have been handled."""

    peer: int
    start: int
    stop: int
    after: int


@dataclass(slots=True)
class Schedule:
    """One rank's messages, in order. Sends are in rising order of ``after``."""

    receives: list[Receive] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)

    def receive(self, peer: int, piece: Piece, add: bool) -> int:
        """Append a receive; returns the number of receives so far, for ``send``'s ``after``."""
        self.receives.append(Receive(peer, *piece, add))
        return len(self.receives)

    def send(self, peer: int, piece: Piece, after: int) -> None:
        self.sends.append(Send(peer, *piece, after))

    def ordered(self) -> "Schedule":
        """Itself, with sends sorted by ``after`` (stable): the order in which they begin."""
        self.sends.sort(key=lambda send: send.after)
        return self

    def blockers(self) -> list[list[int]]:
        """For each receive, the sends that begin before it and read what it writes: they must be complete first."""
        messages: list[Send | Receive] = [*self.sends, *self.receives]
        cuts = sorted({message.start for message in messages} | {message.stop for message in messages})
        cell = {cut: index for index, cut in enumerate(cuts)}
        readers: list[list[int]] = [[] for _ in cuts]
        for index, send in enumerate(self.sends):
            for reader in readers[cell[send.start] : cell[send.stop]]:
                reader.append(index)
        return [
            sorted(
                {
                    index
                    for reader in readers[cell[receive.start] : cell[receive.stop]]
                    for index in reader
                    if self.sends[index].after <= position
                }
            )
            for position, receive in enumerate(self.receives)
        ]


def pieces(start: int, stop: int, longest: int) -> list[Piece]:
    """``start:stop`` cut into the fewest ranges of at most ``longest`` elements, of nearly equal length."""
    count = -(-(stop - start) // longest)
    return [(start + (stop - start) * i // count, start + (stop - start) * (i + 1) // count) for i in range(count)]


def chunks(count: int, parts: int) -> list[Piece]:
    """``0:count`` in ``parts`` ranges of nearly equal length, some empty when there are fewer elements."""
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
