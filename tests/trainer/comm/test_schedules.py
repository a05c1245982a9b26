"""Tests of the message schedules by simulation: correct sums without deadlock for any ranks, sizes and event order.

The simulated network is the worst case that MPI allows. A message is sent only when its receive is posted, and its
content is read as late as possible.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dltrain.comm.schedules.butterfly import butterfly
from dltrain.comm.schedules.halving_doubling import halving_doubling
from dltrain.comm.schedules.layered_server import broadcast_from_server, gather_to_server
from dltrain.comm.schedules.parameter_server import parameter_server
from dltrain.comm.schedules.ring import ring
from dltrain.comm.schedules.schedule import Schedule, chunks, pieces
from dltrain.comm.schedules.tree import tree

Make = Callable[[int, int, int, int], Schedule]
WINDOW = 4


def one_server(rank: int, size: int, count: int, longest: int) -> Schedule:
    return parameter_server(rank, size, count, longest, (0,))


def two_servers(rank: int, size: int, count: int, longest: int) -> Schedule:
    return parameter_server(rank, size, count, longest, (size - 2, size - 1))


STRATEGIES: dict[str, Make] = {
    "ring": ring, "tree": tree, "butterfly": butterfly, "halving": halving_doubling,
    "one server": one_server, "two servers": two_servers,
}  # fmt: skip


class Rank:
    """Runs a schedule by the rules of ``engine``."""

    def __init__(self, schedule: Schedule, values: np.ndarray) -> None:
        self.schedule, self.values = schedule, values.copy()
        self.blockers = schedule.blockers()
        self.begun = self.posted = self.handled = 0
        self.sent: set[int] = set()
        self.arrived: dict[int, np.ndarray | None] = {}

    def unblocked(self, index: int) -> bool:
        return all(send < self.begun and send in self.sent for send in self.blockers[index])

    def advance(self) -> bool:
        before = (self.begun, self.posted, self.handled)
        while self.begun < len(self.schedule.sends) and self.schedule.sends[self.begun].after <= self.handled:
            self.begun += 1
        while self.posted < min(self.handled + WINDOW, len(self.schedule.receives)) and (
            self.schedule.receives[self.posted].add or self.unblocked(self.posted)
        ):
            self.posted += 1
        if self.handled in self.arrived:
            receive = self.schedule.receives[self.handled]
            if not receive.add or self.unblocked(self.handled):
                content = self.arrived[self.handled]
                if receive.add:
                    self.values[receive.start : receive.stop] += content
                self.handled += 1
        return before != (self.begun, self.posted, self.handled)


def deliver(ranks: list[Rank], source: int, target: int) -> bool:
    """Move the next message from ``source`` to ``target``, if its send has begun and its receive is posted."""
    sender, receiver = ranks[source], ranks[target]
    sends = [i for i, s in enumerate(sender.schedule.sends) if s.peer == target and i not in sender.sent]
    receives = [i for i, r in enumerate(receiver.schedule.receives) if r.peer == source and i not in receiver.arrived]
    if not sends or not receives or sends[0] >= sender.begun or receives[0] >= receiver.posted:
        return False
    send, receive = sender.schedule.sends[sends[0]], receiver.schedule.receives[receives[0]]
    assert (send.start, send.stop) == (receive.start, receive.stop), "both sides must use the same range"
    content = sender.values[send.start : send.stop].copy()
    if not receive.add:
        receiver.values[receive.start : receive.stop] = content
    receiver.arrived[receives[0]] = content
    sender.sent.add(sends[0])
    return True


def simulate(make: Make, size: int, count: int, longest: int, seed: int) -> None:
    values, ended = run(make, size, count, longest, seed)
    for found in ended:
        np.testing.assert_array_equal(found, sum(values))


def run(make: Make, size: int, count: int, longest: int, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the values of all ranks before and after the schedules, whose events happen in a random order."""
    rng = random.Random(seed)
    values = [np.array([rng.randrange(1000) for _ in range(count)], dtype=np.int64) for _ in range(size)]
    ranks = [Rank(make(r, size, count, longest), values[r]) for r in range(size)]
    events = [(a, b) for a in range(size) for b in range(size)]
    while True:
        rng.shuffle(events)
        moved = False
        for source, target in events:
            moved |= ranks[source].advance() if source == target else deliver(ranks, source, target)
        if not moved:
            break
    for rank in ranks:
        schedule = rank.schedule
        assert (rank.handled, len(rank.sent)) == (len(schedule.receives), len(schedule.sends)), "deadlock"
    return values, [rank.values for rank in ranks]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(1, 60), st.integers(1, 17), st.integers(0, 2**32), st.data())
def test_layered_server_gets_the_sum_and_returns_its_end(
    size: int, count: int, longest: int, seed: int, data: st.DataObject
) -> None:
    returned = data.draw(st.integers(0, count))

    def gather(rank: int, size: int, count: int, longest: int) -> Schedule:
        return gather_to_server(rank, size, count, longest, returned)

    values, ended = run(gather, size, count, longest, seed)
    np.testing.assert_array_equal(ended[0], sum(values))
    for before, after in zip(values[1:], ended[1:], strict=True):
        np.testing.assert_array_equal(after[count - returned :], sum(values)[count - returned :])
        np.testing.assert_array_equal(after[: count - returned], before[: count - returned])
    values, ended = run(broadcast_from_server, size, count, longest, seed)
    for found in ended:
        np.testing.assert_array_equal(found, values[0])


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=40, deadline=None)
@given(size=st.integers(2, 9), count=st.integers(1, 60), longest=st.integers(1, 17), seed=st.integers(0, 2**32))
def test_every_rank_ends_with_the_sum(name: str, size: int, count: int, longest: int, seed: int) -> None:
    simulate(STRATEGIES[name], size, count, longest, seed)


@pytest.mark.parametrize("name", STRATEGIES)
@given(size=st.integers(2, 17), count=st.integers(1, 60), longest=st.integers(1, 17))
def test_messages_are_bounded_and_wait_for_overlapping_sends(name: str, size: int, count: int, longest: int) -> None:
    for rank in range(size):
        schedule = STRATEGIES[name](rank, size, count, longest)
        assert all(0 < m.stop - m.start <= longest for m in (*schedule.sends, *schedule.receives))
        for position, (receive, blockers) in enumerate(zip(schedule.receives, schedule.blockers(), strict=True)):
            assert blockers == [
                index
                for index, send in enumerate(schedule.sends)
                if send.start < receive.stop and receive.start < send.stop and send.after <= position
            ]


@given(size=st.integers(2, 9), count=st.integers(1, 500), longest=st.integers(1, 50))
def test_ring_sends_the_minimum_number_of_bytes(size: int, count: int, longest: int) -> None:
    """The maximum per rank is 2 (n - 1) / n of the buffer, up to the rounding of a chunk."""
    sent = [sum(s.stop - s.start for s in ring(r, size, count, longest).sends) for r in range(size)]
    assert sum(sent) == 2 * (size - 1) * count
    assert max(sent) <= 2 * (size - 1) * -(-count // size)


@given(power=st.integers(1, 5), count=st.integers(1, 500), longest=st.integers(1, 600))
def test_halving_doubling_sends_as_much_as_a_ring_in_fewer_messages(power: int, count: int, longest: int) -> None:
    size = 2**power
    schedules = [halving_doubling(r, size, count, longest) for r in range(size)]
    assert sum(s.stop - s.start for schedule in schedules for s in schedule.sends) == 2 * (size - 1) * count
    if longest >= count >= size:
        assert all(len(schedule.sends) == len(schedule.receives) == 2 * power for schedule in schedules)


@given(power=st.integers(1, 4), beyond=st.integers(1, 15), count=st.integers(2, 500))
def test_rank_beyond_a_power_of_two_sends_its_values_and_receives_the_sum(power: int, beyond: int, count: int) -> None:
    core = 2**power
    beyond = min(beyond, core - 1)
    for rank in range(core, core + beyond):
        outside = halving_doubling(rank, core + beyond, count, count)
        partner = halving_doubling(rank - core, core + beyond, count, count)
        assert sum(s.stop - s.start for s in outside.sends) == count
        assert sum(r.stop - r.start for r in outside.receives) in (count + count // 2, count + -(-count // 2))
        assert {m.peer for m in (*outside.sends, *outside.receives)} == {rank - core}
        assert [m.peer for m in partner.sends].count(rank) == [m.peer for m in partner.receives].count(rank) == 2


@given(start=st.integers(0, 10), length=st.integers(0, 100), longest=st.integers(1, 40))
def test_pieces_cover_a_range_evenly(start: int, length: int, longest: int) -> None:
    cut = pieces(start, start + length, longest)
    assert [i for a, b in cut for i in range(a, b)] == list(range(start, start + length))
    assert max((b - a for a, b in cut), default=0) - min((b - a for a, b in cut), default=0) <= 1


@given(count=st.integers(0, 100), parts=st.integers(1, 12))
def test_chunks_cover_a_buffer(count: int, parts: int) -> None:
    assert [i for a, b in chunks(count, parts) for i in range(a, b)] == list(range(count))
