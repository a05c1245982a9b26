"""Pass a socket from the zygote to a forked process, as a descriptor number in the environment."""

import os
import socket

_NUMBER_ENV = "DLTRAIN_INHERITED"


def hand_over(number: int) -> None:
    """Store the socket's descriptor ``number`` for ``take``. A forked process calls this before it runs its program."""
    os.environ[_NUMBER_ENV] = str(number)


def take() -> socket.socket:
    """Return the socket that this process inherited from the zygote. Call this at most once per process."""
    return socket.socket(fileno=int(os.environ.pop(_NUMBER_ENV)))
