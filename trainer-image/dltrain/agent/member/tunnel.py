"""Connections of the MPI daemons to mpirun, forwarded by the agents over mutual TLS.

The ports of mpirun and of the daemons accept connections only from their own pod (``launch.loopback``). The agent of a
daemon's pod therefore opens a port for the daemon on the loopback interface, and forwards each connection to the agent
of mpirun's pod. The agent of mpirun's pod forwards the connection to mpirun.
"""

import asyncio
import logging
import socket
import ssl
from contextlib import suppress

from dltrain.agent.job.tls import TUNNEL
from dltrain.host.tasks import Tasks
from dltrain.launch.commands import loopback_of

log = logging.getLogger(__name__)
CONNECT_S = 10.0
"""Maximum seconds for each try to connect to the other agent. A failed try is repeated after ``RETRY_S`` seconds."""
RETRY_S = 0.2
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
_CHUNK = 2**16


class Tunnel:
    """A port on this pod's loopback interface that leads to the mpirun of another pod."""

    def __init__(self, host: str, context: ssl.SSLContext, agent_port: int, pod_ip: str) -> None:
        """Open the port. ``host``, ``agent_port``: address and port of the agent in mpirun's pod.

        ``context``: the TLS context for connections to that agent. ``pod_ip``: address of this pod. Raise OSError
        if no port can be opened.
        """
        self._host, self._context, self._agent_port = host, context, agent_port
        family = socket.AF_INET6 if ":" in pod_ip else socket.AF_INET
        self._socket = socket.create_server((loopback_of(pod_ip), 0), family=family)
        self.port = int(self._socket.getsockname()[1])
        self._tasks: Tasks[None] = Tasks()
        self._tasks.spawn(self._listen()).add_done_callback(lambda _: self._socket.close())

    def close(self) -> None:
        """Close the port and all connections through it."""
        for task in self._tasks:
            task.cancel()

    async def _listen(self) -> None:
        async with await asyncio.start_server(self._forward, sock=self._socket) as server:
            await server.serve_forever()

    def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._connect(reader, writer))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection of the MPI daemon to the agent in mpirun's pod until one side ends.

        Keep trying to connect until ``close``, because the daemon would end if its connection failed.
        """
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    remote = await asyncio.open_connection(self._host, self._agent_port, ssl=self._context)
                break
            except (OSError, TimeoutError) as error:
                log.info("the MPI daemon cannot connect to mpirun in pod %s yet (%r); retrying", self._host, error)
            except asyncio.CancelledError:
                writer.close()
                raise
            await asyncio.sleep(RETRY_S)
        _keep_alive(remote[1])
        await _join((reader, writer), remote)


def is_tunnel(writer: asyncio.StreamWriter) -> bool:
    """Return True if another agent opened this TLS connection for its MPI daemon."""
    tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
    return tls is not None and tls.selected_alpn_protocol() == TUNNEL


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int | None, pod_ip: str) -> None:
    """Forward an MPI daemon's connection from another agent to the mpirun of this pod, until one side ends.

    ``port``: mpirun's port on the loopback interface; None if no mpirun runs. ``pod_ip``: address of this pod. Close
    the connection at once if mpirun does not run or does not accept it.
    """
    try:
        if port is None:
            raise ConnectionRefusedError("no mpirun runs in this pod")
        local = await asyncio.open_connection(loopback_of(pod_ip), port)
    except OSError as error:
        log.info("refused the connection of an MPI daemon: %s", error)
        writer.close()
        return
    _keep_alive(writer)
    await _join((reader, writer), local)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Enable TCP keepalive, so that no firewall forgets the connection while it is idle."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _join(one: Stream, other: Stream) -> None:
    """Copy bytes in both directions until one side ends, then close both."""
    copies = [asyncio.create_task(_copy(one[0], other[1])), asyncio.create_task(_copy(other[0], one[1]))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        for _, writer in (one, other):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
