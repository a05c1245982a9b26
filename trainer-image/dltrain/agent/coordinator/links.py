"""The coordinator's connections to the agents of its job's pods. Lost connections are opened again until ``close``.

Each attempt to connect resolves the host name again, because a pod's DNS record can appear later than the pod.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from dltrain.protocol import agent_messages as proto

log = logging.getLogger(__name__)
_BACKOFF_S = (0.05, 0.2)
_CONNECT_S = 3.0


@dataclass(frozen=True)
class Connected:
    pod: str
    welcome: proto.Welcome


@dataclass(frozen=True)
class Lost:
    """The connection to a pod's agent ended, for the reason ``why``.

    ``unreachable``: True if the pod's kernel did not answer any more, as after the loss of its node or network.
    """

    pod: str
    why: str
    unreachable: bool = False


@dataclass(frozen=True)
class Received:
    pod: str
    line: proto.Line


@dataclass(frozen=True)
class Late:
    """A pod's agent sends messages again after ``silent_s`` seconds of silence. Its connection did not end."""

    pod: str
    silent_s: float


LinkEvent = Connected | Lost | Received | Late


class Links:
    """The coordinator's connections: one to the agent of each pod that ``want`` names.

    ``emit`` is called with the events of all connections, in order.
    """

    def __init__(self, context: ssl.SSLContext, port: int, emit: Callable[[LinkEvent], None]) -> None:
        self._context, self._port, self._emit = context, port, emit
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._channels: dict[str, proto.Channel] = {}

    def want(self, hosts: dict[str, str]) -> None:
        """Connect to these pods (name → host) and keep the connections open. Close all others."""
        for pod in [pod for pod in self._tasks if pod not in hosts]:
            self._tasks.pop(pod).cancel()
        for pod, host in hosts.items():
            if pod not in self._tasks:
                self._tasks[pod] = asyncio.create_task(self._keep(pod, host))

    @property
    def connected(self) -> set[str]:
        return set(self._channels)

    def silence_s(self, now_s: float) -> float:
        """Return the longest silence of a connected pod in seconds, or 0 if it is at most ``LATE_S``.

        A pod is silent while no message or heartbeat of its agent arrives. The coordinator subtracts the result from
        the silence of the ranks, because a silent agent cannot forward their messages. ``now_s``: current time of the
        monotonic clock.
        """
        silent_s = max((now_s - channel.heard_s for channel in self._channels.values()), default=0.0)
        return silent_s if silent_s > proto.LATE_S else 0.0

    def send(self, pod: str, line: proto.Line) -> bool:
        """Send a protocol message to a pod. Return False if the pod is not connected."""
        channel = self._channels.get(pod)
        if channel is not None:
            channel.send(line)
        return channel is not None

    def send_all(self, line: proto.Line) -> None:
        for channel in self._channels.values():
            channel.send(line)

    async def close(self) -> None:
        """Send the queued messages, then close all connections."""
        await asyncio.gather(*(channel.flush() for channel in self._channels.values()))
        self.want({})

    async def _keep(self, pod: str, host: str) -> None:
        wait_s, failures = _BACKOFF_S[0], 0
        while True:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_connection(
                        host, self._port, ssl=self._context, limit=proto.MAX_LINE
                    )
            except (OSError, TimeoutError) as error:
                failures += 1
                if failures >= 8 and failures & (failures - 1) == 0:  # Log after 1 s, 2 s, 4 s, 8 s …
                    log.info("cannot reach pod %s (%s) in attempt %d (%r); trying again", pod, host, failures, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _BACKOFF_S[1])
                continue
            wait_s, failures = _BACKOFF_S[0], 0
            await self._talk(pod, proto.Channel(reader, writer, lambda gap_s: self._emit(Late(pod, gap_s))))
            await asyncio.sleep(wait_s)

    async def _talk(self, pod: str, channel: proto.Channel) -> None:
        why = "the connection ended"
        try:
            welcome = await channel.receive()
            if not isinstance(welcome, proto.Welcome) or welcome.pod != pod:
                log.warning(
                    "pod %s: found %r as the first message; expected a Welcome message from this pod's agent. "
                    "Connecting again",
                    pod,
                    welcome,
                )
                return
            self._channels[pod] = channel
            self._emit(Connected(pod, welcome))
            while (line := await channel.receive()) is not None:
                self._emit(Received(pod, line))
            why = channel.why
        except ValueError as error:
            why = f"invalid message: {error}"
        finally:
            channel.close()
            if self._channels.pop(pod, None) is not None:
                self._emit(Lost(pod, why, channel.unreachable))
