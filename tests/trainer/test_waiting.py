"""Waiting with and without a kernel that wakes up; real epoll queues, as MPI's are."""

import select
import socket
from collections.abc import Iterator

import pytest

from dltrain.comm.waiting import Backoff, event_queues, listen, wait_until


@pytest.fixture
def bell() -> Iterator[tuple[select.epoll, socket.socket]]:
    """A queue with one socket in it, listened to, and the other end of the socket."""
    near, far = socket.socketpair()
    with near, far, select.epoll() as queue:
        queue.register(near, select.EPOLLIN)
        listen([queue.fileno()], all_ring=True)
        yield queue, far
        listen([], all_ring=False)


def test_queues_are_found_and_forgotten(bell: tuple[select.epoll, socket.socket]) -> None:
    queue, _ = bell
    assert queue.fileno() in event_queues()
    number = queue.fileno()
    queue.close()
    assert number not in event_queues()


def test_a_silent_bell_leaves_the_cpu_to_others(bell: tuple[select.epoll, socket.socket]) -> None:
    backoff, looks = Backoff(), 0
    while backoff.waited_s < 0.1:
        backoff.pause()
        looks += backoff.waited_s > 1e-3
    assert looks <= 16


def test_a_bell_that_never_stops_does_not_keep_the_cpu(bell: tuple[select.epoll, socket.socket]) -> None:
    _, far = bell
    far.send(b"!")
    backoff, looks = Backoff(), 0
    while backoff.waited_s < 0.3:
        backoff.pause()
        looks += 1
    assert looks < 1500  # 256 of the bell, 300 of sleeping 1 ms each, and those at first; else 100,000


def test_what_rings_no_bell_is_seen_too(bell: tuple[select.epoll, socket.socket]) -> None:
    looks = iter([False] * 20 + [True])
    wait_until(lambda: next(looks))
    assert next(looks, None) is None
