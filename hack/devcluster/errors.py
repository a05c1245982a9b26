"""The exception that users see as a message instead of a traceback."""

from __future__ import annotations


class ClusterError(Exception):
    """An error whose message says what was found, what was expected and what to do.

    `hack/cluster` prints the message and exits with 1.
    """
