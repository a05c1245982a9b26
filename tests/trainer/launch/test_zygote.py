"""The zygote serves everyone's ranks, so nothing that one order's end brings with it may end the zygote."""

import socket
import tempfile

import pytest

from dltrain.launch.zygote import Order, Serving

LAST = Order(("-c", ""), {}, "/")


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_closed_by_something_ready_with_it_is_not_read(first: int) -> None:
    """As when a rank ends just as whoever asked for it goes: both are ready at once, and the first closes the other."""
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
