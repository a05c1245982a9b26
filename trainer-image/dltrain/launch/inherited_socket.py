"""Pass a socket from the zygote to the process it forks, as a descriptor number in the environment."""

import os
import socket

_NUMBER_ENV = "DLTRAIN_INHERITED"


def hand_over(number: int) -> None:
    """Store the descriptor number. The fork calls this before its program runs."""
    os.environ[_NUMBER_ENV] = str(number)


def take() -> socket.socket:
    """Return the inherited socket. The program can call this once."""
    return socket.socket(fileno=int(os.environ.pop(_NUMBER_ENV)))
