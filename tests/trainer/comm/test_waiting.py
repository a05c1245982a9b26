"""Tests of waiting for MPI with and without wake-ups by the kernel, on real epoll queues."""

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
def event_queue() -> Iterator[tuple[select.epoll, socket.socket]]:
    """Return a watched epoll queue with one socket, and the other end of the socket."""
    near, far = socket.socketpair()
    with near, far, select.epoll() as queue:
        queue.register(near, select.EPOLLIN)
        listen([queue.fileno()], all_wake=True)
        yield queue, far
        listen([], all_wake=False)


def test_open_epoll_queues_are_found(event_queue: tuple[select.epoll, socket.socket]) -> None:
    queue, _ = event_queue
    assert queue.fileno() in event_queues()
    number = queue.fileno()
    queue.close()
    assert number not in event_queues()


def test_waiting_without_events_sleeps(event_queue: tuple[select.epoll, socket.socket]) -> None:
    backoff, polls = Backoff(), 0
    while backoff.waited_s < 0.1:
        backoff.pause()
        polls += backoff.waited_s > 1e-3
    assert polls <= 16


def test_continuous_events_do_not_cause_a_busy_loop(event_queue: tuple[select.epoll, socket.socket]) -> None:
    _, far = event_queue
    far.send(b"!")
    backoff, polls = Backoff(), 0
    while backoff.waited_s < 0.3:
        backoff.pause()
        polls += 1
    assert polls < 1500  # 256 for events, 300 sleeps of 1 ms, and the first ones; a busy loop would poll 100,000 times


def test_progress_without_an_event_is_detected(event_queue: tuple[select.epoll, socket.socket]) -> None:
    polls = iter([False] * 20 + [True])
    wait_until(lambda: next(polls))
    assert next(polls, None) is None


@pytest.fixture
def post(event_queue: tuple[select.epoll, socket.socket], monkeypatch: pytest.MonkeyPatch) -> Iterator["Post"]:
    """Return a message that arrives at the first select. No select may follow once the message has been received."""
    queue, _ = event_queue
    near, far = socket.socketpair()
    original, post = select.select, Post(near)

    def send_then_select(*arguments: object) -> object:
        assert not post.received, "select is called although the message has been received"
        far.send(b"!")
        return original(*arguments)  # type: ignore[call-overload]

    monkeypatch.setattr("dltrain.comm.core.waiting.select.select", send_then_select)
    with near, far:
        queue.register(near, select.EPOLLIN)
        yield post
        queue.unregister(near)


class Post:
    def __init__(self, near: socket.socket) -> None:
        self._near = near
        near.setblocking(False)
        self.received = False

    def check_then_receive(self) -> bool:
        """Return True if the message was received before, and receive it now without a later event, as MPI does."""
        before = self.received
        with suppress(BlockingIOError):
            self._near.recv(1)
            self.received = True
        return before


def test_message_received_by_a_test_is_noticed_before_the_next_pause(post: Post) -> None:
    wait_until(post.check_then_receive)
    assert post.received


def test_message_received_by_another_operation_is_noticed_before_the_next_pause(post: Post) -> None:
    class Other(Fake):
        def test(self) -> bool:
            post.check_then_receive()
            return False

    class Waiting(Fake):
        def test(self) -> bool:
            return post.received

    waiting = Waiting()
    waiting.siblings = [waiting, Other()]
    waiting.wait()
    assert post.received


@pytest.mark.parametrize("silent", range(1, 9))
def test_message_received_while_testing_several_is_noticed_before_the_next_pause(silent: int, post: Post) -> None:
    """A test of one request receives at most once what has arrived for any request, as in Open MPI.

    The message of the second request is received without an event, when MPI receives for the ``silent``-th time.
    """
    received = 0

    class Request:
        def __init__(self, arrives: int) -> None:
            self.arrives = arrives

        @property
        def here(self) -> bool:
            return received >= self.arrives

        def Test(self) -> bool:  # noqa: N802 - mpi4py's name
            nonlocal received
            received += not self.here
            post.received = received >= silent
            return self.here

    wait_until(partial(complete, [Request(1), Request(silent)]))
    assert post.received


def test_trainer_does_not_call_mpi_tests_of_several_requests() -> None:
    """Such tests check before they receive. ``complete`` replaces them."""
    sources = [*(ROOT / "trainer-image" / "dltrain").rglob("*.py")]
    assert len(sources) > 50
    assert [path.name for path in sources if re.search(r"\bTest(all|any|some)\b", path.read_text("utf-8"))] == []


class Fake(Run):
    finished, progress = False, 0

    def start(self) -> None:
        raise NotImplementedError

    close = start
