"""Copy the output of a process line by line to the pod's log."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable

from dlcontract import MAX_LOG_TAIL, MAX_OUTPUT

_DRAIN_S = 1.0
_OBSERVER = "dljob: did not observe the structure of this script"
"""Beginning of a line that the observer of a script may write when the script ends (``observation.observer``)."""
BAR_S = 10.0
"""Minimum seconds between two versions of the same line, such as a progress bar, in the log."""


class Output:
    """Copy a process's output to standard output, with ``prefix`` before each line, and keep the end of the output.

    The properties ``end`` and ``tail`` return what is kept. ``fd``: the descriptor of the pipe with the output; it is
    closed when the output ends. ``copy``: a function that is also called with each piece of the output, without the
    prefix.

    Progress bars write a line again and again, with a carriage return before or after it. Only the last version of a
    line is copied and kept, as a terminal shows it, and while the line goes on, its newest version every ``BAR_S``
    seconds is copied as a line. Otherwise the versions would fill all that is kept, and appear 64 KiB at a time.
    """

    def __init__(self, prefix: str, fd: int, copy: Callable[[bytes], None] = lambda _: None) -> None:
        self._prefix, self._copy = prefix.encode(), copy
        self._tail = b""
        self._task = asyncio.create_task(self._pump(fd))

    @property
    def end(self) -> str:
        """The last ``MAX_OUTPUT`` bytes of the output, without a first line that may be incomplete."""
        text = self._tail.decode(errors="replace")
        return text.partition("\n")[2] or text if len(self._tail) == MAX_OUTPUT else text

    @property
    def tail(self) -> str:
        """The last ``MAX_LOG_TAIL`` characters of the output, without a last line of the observer of scripts.

        It explains a failure of the script, about which that line says nothing.
        """
        text = self._tail.decode(errors="replace")
        before, newline, last = text.removesuffix("\n").rpartition("\n")
        return (before + newline if last.startswith(_OBSERVER) else text)[-MAX_LOG_TAIL:]

    async def drained(self) -> None:
        """Wait for the end of the output, but at most 1 s, because a grandchild may keep the pipe open."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._task, _DRAIN_S)

    async def _pump(self, fd: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
        )
        line, shown_s = b"", time.monotonic()
        try:
            while chunk := await reader.read(65536):
                self._tail = _appended(self._tail, chunk)[-MAX_OUTPUT:]
                self._copy(chunk)
                *lines, line = (line + chunk).split(b"\n")
                self._write(list(map(_last_version, lines)))
                done, carriage_return, rest = line.rpartition(b"\r")
                if done and time.monotonic() >= shown_s + BAR_S:
                    self._write([_last_version(done)])
                    line, shown_s = carriage_return + rest, time.monotonic()
                if len(line) > 65536:
                    self._write([line])
                    line = b""
            if line:
                self._write([_last_version(line)])
        finally:
            transport.close()

    def _write(self, lines: list[bytes]) -> None:
        sys.stdout.buffer.write(b"".join(self._prefix + line + b"\n" for line in lines))
        sys.stdout.buffer.flush()


def _appended(kept: bytes, chunk: bytes) -> bytes:
    """Return ``kept`` and ``chunk`` without the versions of lines that a carriage return has overwritten."""
    if b"\r" not in chunk and not kept.endswith(b"\r"):
        return kept + chunk
    done, newline, line = kept.rpartition(b"\n")
    return done + newline + b"\n".join(map(_last_version, (line + chunk).split(b"\n")))


def _last_version(line: bytes) -> bytes:
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def available(fd: int) -> str:
    """Return the text in a pipe, at most 4096 bytes, without waiting for more; empty if there is none."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 4096).decode(errors="replace").strip()
    except BlockingIOError:
        return ""
