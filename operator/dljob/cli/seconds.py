"""Options of commands that take a number of seconds."""

import argparse

from dljob.client.errors import BadInputError

MAX_S = 31_536_000
"""Largest number of seconds of an option: one year. Functions that wait fail with much larger numbers."""


def check(given: argparse.Namespace, name: str, *, zero: bool = True) -> None:
    """Raise BadInputError if an option is not a number of seconds from 0 to ``MAX_S``, such as nan or infinity.

    Do nothing if it was not given (None). ``name``: name of the option. ``zero``: False if it must be above 0.
    """
    found: float | None = getattr(given, name)
    if found is None or (0 <= found <= MAX_S and (zero or found > 0)):
        return
    least = "of at least 0" if zero else "above 0"
    raise BadInputError(
        f"--{name}: found {found:g}; expected a number of seconds {least} and at most {MAX_S} (one year)"
    )
