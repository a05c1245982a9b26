"""Tests of what is kept of a process's output."""

import asyncio
import os
import sys

import pytest

from dlcontract import MAX_OUTPUT
from dltrain.host.output import Output
from dltrain.observation.observer import GAVE_UP


def kept(*chunks: bytes) -> str:
    """Return the end of an output that is written in pieces."""
    return written(*chunks).end


def written(*chunks: bytes) -> Output:
    """Return an output that has ended, after it was written in pieces."""

    async def pump() -> Output:
        read_fd, write_fd = os.pipe()
        arrived = asyncio.Event()
        output = Output("", read_fd, lambda _: arrived.set())
        for chunk in chunks:
            arrived.clear()
            os.write(write_fd, chunk)
            await arrived.wait()
        os.close(write_fd)
        await output.drained()
        return output

    return asyncio.run(pump())


BAR = [b"\r%3d%%|%s| 3.1 it/s" % (part, b"#" * part) for part in range(100)]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"epoch 1\n", *BAR, b"\n", b"epoch 2\n"], "epoch 1\n" + BAR[-1].decode()[1:] + "\nepoch 2\n"),
        ([b"epoch 1\n", *(frame[1:] + b"\r" for frame in BAR)], "epoch 1\n" + BAR[-1].decode()[1:] + "\r"),
        (
            [b"epoch 1\n" + b"".join(BAR) + b"loss 0.5\nepoch 2"],
            "epoch 1\n" + BAR[-1].decode()[1:] + "loss 0.5\nepoch 2",
        ),
        ([b"one\r", b"\ntwo\r\n", b"three\r\n"], "one\r\ntwo\r\nthree\r\n"),
        ([b"a\rb", b"\rc", b"d\re\r", b"\rf\n"], "f\n"),
    ],
    ids=["bar", "return at the end", "one piece", "lines of Windows", "pieces"],
)
def test_only_the_last_version_of_a_line_is_kept(chunks: list[bytes], expected: str) -> None:
    """Fixed bug: the versions of a progress bar filled the stored output, and what the script had printed was lost."""
    assert kept(*chunks) == expected


@pytest.mark.parametrize(
    ("interval_s", "expected"),
    [(3600.0, ["epoch 1", "99%", "done"]), (0.0, ["epoch 1", *(f"{part}%" for part in range(100)), "done"])],
)
def test_log_has_the_last_version_of_a_line_and_some_before(
    interval_s: float, expected: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fixed bug: a progress bar appeared 64 KiB at a time, in one line."""
    monkeypatch.setattr("dltrain.host.output.BAR_S", interval_s)
    kept(b"epoch 1\n", *(b"\r%d%%" % part for part in range(100)), b"\n", b"done")
    sys.stdout.flush()
    assert capfd.readouterr().out.splitlines() == expected


def test_end_of_a_long_output_is_kept() -> None:
    lines = [b"line %06d\n" % number for number in range(5000)]
    found = kept(*lines[:100], b"".join(lines[100:4000]), *lines[4000:])
    assert found.endswith("line 004999\n") and MAX_OUTPUT - 12 < len(found) <= MAX_OUTPUT


def test_last_line_of_the_observer_does_not_hide_the_error_of_a_script() -> None:
    """Fixed bug: after sys.exit, the last line of the failure in the status was about predictions."""
    note = f"dljob: {GAVE_UP}: it ended after 0 updates\n".encode()
    assert written(b"error: no --lr\n", note).tail == "error: no --lr\n"
    assert written(note).tail == ""
    assert written(note, b"error: no --lr\n").tail == note.decode() + "error: no --lr\n"
    assert written(b"error: no --lr\n", note).end.endswith(note.decode()), "the log keeps it"
