"""Run a command in a pod over a WebSocket, as ``kubectl exec`` does, and pass its output on."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

PROTOCOL = "v4.channel.k8s.io"
"""In this protocol, the first byte of a message is its channel: 1 is standard output, 2 standard error, 3 the end."""
SILENCE_S = 120.0
"""Seconds without a message after which the connection counts as broken. Not every API server answers pings."""
AFTER_END_S = 2.0
_STDOUT, _STDERR, _END = 1, 2, 3
MAX_ERRORS = 4096


class ExecError(Exception):
    """The command could not be started, or ended with an error."""


async def output(api: Any, namespace: str, pod: str, container: str, command: Sequence[str]) -> AsyncIterator[bytes]:
    """Yield the standard output of ``command`` in parts.

    ``api``: a client of type ``dljob.kube.Api``. Raise ExecError with the end of its standard error if the command ends
    with an error, or if the connection breaks.
    """
    import aiohttp

    from dljob.kube.kinds import POD

    params = [("container", container), ("stdout", "true"), ("stderr", "true")]
    params += [("command", word) for word in command]
    url = api.server + POD.path(namespace, pod, "exec")
    errors, ended = b"", False
    try:
        async with api.session.ws_connect(url, params=params, protocols=(PROTOCOL,), max_msg_size=0) as connection:
            while True:  # Output could arrive after the end of the command. The server closes the connection.
                try:
                    message = await connection.receive(timeout=AFTER_END_S if ended else SILENCE_S)
                except TimeoutError:
                    if not ended:
                        raise
                    break
                if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR):
                    break
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                channel, data = message.data[0], message.data[1:]
                if channel == _STDOUT:
                    if data:
                        yield data
                elif channel == _STDERR:
                    errors = (errors + data)[-MAX_ERRORS:]
                elif channel == _END:
                    ended = True
                    _check(data, errors)
    except aiohttp.WSServerHandshakeError as error:
        if error.status in (401, 403):
            raise ExecError(
                "the API server does not permit it; expected the permission to get and create pods/exec. Ask for it, "
                "or mount the claim in a pod of your own"
            ) from None
        raise ExecError(f"the API server answered with code {error.status}: {error.message}") from None
    except TimeoutError:
        raise ExecError(f"nothing arrived for {SILENCE_S:.0f} s. Try again") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ExecError(f"the connection failed: {error or type(error).__name__}. Try again") from None
    if not ended:
        raise ExecError("the connection broke before all files were copied. Try again")


def _check(data: bytes, errors: bytes) -> None:
    """Raise ExecError if the end of a command, an object of kind Status in JSON, is not a success."""
    try:
        status = json.loads(data)
    except ValueError:
        status = {}
    if status.get("status") == "Success":
        return
    text = errors.decode(errors="replace").strip() or str(status.get("message") or "no message")
    raise ExecError(text)
