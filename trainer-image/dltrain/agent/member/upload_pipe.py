"""The pipe through which the process that copies checkpoints sends messages about uploads to its agent."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from dltrain.protocol.upload_messages import MAX_LINE_NBYTES, UploadMessage, upload_message_adapter

log = logging.getLogger(__name__)
_DRAIN_S = 1.0


class UploadPipe:
    """Calls ``emit`` with each message that arrives at the descriptor ``fd``, which is closed at the end."""

    def __init__(self, fd: int, emit: Callable[[UploadMessage], None]) -> None:
        self._emit = emit
        self._task = asyncio.create_task(self._read(fd))

    async def drained(self) -> None:
        """Wait until all messages of a process that has ended were emitted, but at most 1 s."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._task), _DRAIN_S)

    async def _read(self, fd: int) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_NBYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
        )
        try:
            while line := await reader.readline():
                self._emit(upload_message_adapter.validate_json(line))
        except ValueError as error:
            log.warning(
                "ignored the messages about uploads: found an invalid one (%s); expected one of this agent's dltrain. "
                "The status shows no more uploads until the ranks restart", error,
            )  # fmt: skip
        finally:
            transport.close()
