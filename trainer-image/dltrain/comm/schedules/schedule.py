"""Schedules: the messages that one rank sends and receives in an all-reduce of a buffer. ``engine`` runs them over MPI.

Every message-passing algorithm is a pure function that returns a ``Schedule``. So tests can check its properties
(correct sum, no deadlock, matching messages) by simulation for any number of ranks and any size.

Properties: the k-th message that rank a sends to b is the k-th that b receives from a, with the same range. Receives
are handled strictly in order.
"""

from dataclasses import dataclass, field

Piece = tuple[int, int]
"""A range of elements: start and stop (exclusive)."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the elements ``start:stop`` of the buffer from the rank ``peer``.

    ``add``: True to add the received elements to the buffer, False to replace the elements of the buffer.
    """

    peer: int
    start: int
    stop: int
    add: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Send elements ``start:stop`` to ``peer`` when the first ``after`` receives of the schedule have been handled."""

    peer: int
    start: int
    stop: int
    after: int


@dataclass(slots=True)
class Schedule:
    """The messages that one rank sends and receives in a collective, in order. Sends are sorted by ``Send.after``."""

    receives: list[Receive] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)

    def receive(self, peer: int, piece: Piece, add: bool) -> int:
        """Append a receive of ``piece`` from the rank ``peer``. ``add``: add the elements instead of replacing them.

        Return the number of receives so far. If a send must wait for this receive, pass the number to ``send`` as
        ``after``.
        """
        self.receives.append(Receive(peer, *piece, add))
        return len(self.receives)

    def send(self, peer: int, piece: Piece, after: int) -> None:
        self.sends.append(Send(peer, *piece, after))

    def ordered(self) -> "Schedule":
        """Sort the sends by ``after``, the order in which they start, and return this schedule.

        The sort is stable: sends with equal ``after`` keep their order.
        """
        self.sends.sort(key=lambda send: send.after)
        return self

    def blockers(self) -> list[list[int]]:
        """Return, for each receive, the indices of the sends that must complete before the receive changes the buffer.

        These sends read elements that the receive changes.
        """
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
    """Split ``start:stop`` into the fewest ranges of at most ``longest`` elements, of nearly equal length."""
    count = -(-(stop - start) // longest)
    return [(start + (stop - start) * i // count, start + (stop - start) * (i + 1) // count) for i in range(count)]


def chunks(count: int, parts: int) -> list[Piece]:
    """Split ``0:count`` into ``parts`` ranges of nearly equal length. Some are empty if ``count`` < ``parts``."""
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
