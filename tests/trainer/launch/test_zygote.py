"""Tests of the zygote: the end of one rank must not end the zygote, which serves all ranks of the pod."""

import socket
import tempfile

import pytest

from dltrain.launch.zygote import Order, Serving

LAST = Order(("-c", ""), {}, "/")


@pytest.mark.parametrize("first", [0, 1])
def test_connection_closed_by_another_event_of_the_round_is_not_read(first: int) -> None:
    """Two connections are ready at once and the first closes the other, as when a rank and its client end together."""
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory() as folder:
        listener.bind(f"{folder}/zygote")
        listener.listen()
        serving = Serving(listener)
        pairs = [socket.socketpair() for _ in range(2)]
        read: list[int] = []

        def ready(index: int) -> Order | None:
            read.append(index)
            serving._close(pairs[1 - index][0])
            return None

        for index, (ours, _) in enumerate(pairs):
            serving.selector.register(ours, 1, lambda _, index=index: ready(index))
        for _, theirs in (pairs[first], pairs[1 - first]):
            theirs.sendall(b"x")
        ours, theirs = socket.socketpair()
        serving.selector.register(ours, 1, lambda _: LAST if read else None)
        theirs.sendall(b"x")
        assert serving.run() is LAST
        assert len(read) == 1
        serving.selector.close()
        for each in (*pairs[0], *pairs[1], ours, theirs):
            each.close()
