"""A socket that the zygote hands over to what it forks: its number, in the environment."""

import os
import socket

_NUMBER_ENV = "DLTRAIN_INHERITED"


def hand_over(number: int) -> None:
    """In the fork, before its program runs."""
    os.environ[_NUMBER_ENV] = str(number)


def taken() -> socket.socket:
    """In the program, once."""
    return socket.socket(fileno=int(os.environ.pop(_NUMBER_ENV)))
