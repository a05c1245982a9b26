"""Waiting with and without a kernel that wakes up; real epoll queues, as MPI's are."""

import re
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest

from dltrain.comm.core.polling import Run
from dltrain.comm.core.waiting import Backoff, complete, event_queues, listen, wait_until
from support.trainer.ranks import ROOT


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


@pytest.fixture
def post(bell: tuple[select.epoll, socket.socket], monkeypatch: pytest.MonkeyPatch) -> Iterator["Post"]:
    """A message that arrives as soon as somebody listens, and nobody may listen once it has been taken."""
    queue, _ = bell
    near, far = socket.socketpair()
    listened, post = select.select, Post(near)

    def listen_for(*arguments: object) -> object:
        assert not post.taken, "it listens for what is here already"
        far.send(b"!")
        return listened(*arguments)  # type: ignore[call-overload]

    monkeypatch.setattr("dltrain.comm.core.waiting.select.select", listen_for)
    with near, far:
        queue.register(near, select.EPOLLIN)
        yield post
        queue.unregister(near)


class Post:
    def __init__(self, near: socket.socket) -> None:
        self._near = near
        near.setblocking(False)
        self.taken = False

    def look_then_take(self) -> bool:
        """As MPI's tests of several requests do: whether it had arrived before; what arrives now rings no more."""
        before = self.taken
        with suppress(BlockingIOError):
            self._near.recv(1)
            self.taken = True
        return before


def test_what_a_test_took_is_seen_before_the_next_pause(post: Post) -> None:
    wait_until(post.look_then_take)
    assert post.taken


def test_what_another_sum_took_for_this_one_is_seen_before_the_next_pause(post: Post) -> None:
    class Other(Fake):
        def test(self) -> bool:
            post.look_then_take()
            return False

    class Waiting(Fake):
        def test(self) -> bool:
            return post.taken

    waiting = Waiting()
    waiting.siblings = [waiting, Other()]
    waiting.wait()
    assert post.taken


@pytest.mark.parametrize("silent", range(1, 9))
def test_what_arrives_within_any_look_at_several_is_seen_before_the_next_pause(silent: int, post: Post) -> None:
    """As Open MPI does: a test of one request takes, at most once, what has arrived for any of them, and looks again.

    The second one's message arrives, and is taken without ringing, as MPI takes messages for the ``silent``-th time.
    """
    taken = 0

    class Request:
        def __init__(self, arrives: int) -> None:
            self.arrives = arrives

        @property
        def here(self) -> bool:
            return taken >= self.arrives

        def Test(self) -> bool:  # noqa: N802 - mpi4py's name
            nonlocal taken
            taken += not self.here
            post.taken = taken >= silent
            return self.here

    wait_until(partial(complete, [Request(1), Request(silent)]))
    assert post.taken


def test_nobody_calls_a_test_of_several() -> None:
    """Which looks first and takes then: ``complete`` is for that."""
    sources = [*(ROOT / "trainer-image" / "dltrain").rglob("*.py")]
    assert len(sources) > 50
    assert [path.name for path in sources if re.search(r"\bTest(all|any|some)\b", path.read_text("utf-8"))] == []


class Fake(Run):
    finished, progress = False, 0

    def start(self) -> None:
        raise NotImplementedError

    close = start
