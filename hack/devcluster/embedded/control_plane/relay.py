"""A TCP relay from loopback to the API server, which runs as a separate process.

The API server listens on the cluster's network, but users' kubeconfigs contain 127.0.0.1. A client that still retries
after `down` then does not send packets to an address that no longer belongs to this machine.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

_CHUNK_NBYTES = 1 << 16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(_CHUNK_NBYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()  # one side has closed: this also ends the copy in the other direction


async def serve(host: str, port: int, target_host: str, target_port: int) -> None:
    """Relay every connection from (host, port) to (target_host, target_port), until the process is stopped."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection(target_host, target_port)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, their_writer), _copy(their_reader, writer))
        finally:
            for one in (writer, their_writer):
                one.close()
                with suppress(OSError):
                    await one.wait_closed()

    server = await asyncio.start_server(relay, host, port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
