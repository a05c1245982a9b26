"""The one exception that users see as a plain message instead of a traceback."""

from __future__ import annotations


class ClusterError(Exception):
    """What was found, what was expected and what to do; `hack/cluster` prints it and exits with 1."""
