"""Chooses the provider for this machine. Used by the command lines."""

from __future__ import annotations

from devcluster.embedded.provider import Embedded, unsuited
from devcluster.errors import ClusterError
from devcluster.progress import Progress
from devcluster.provider import Provider

PROVIDERS = ("existing", "kind", "embedded")


def choose(wanted: str | None, cluster: str, progress: Progress) -> Provider:
    why = unsuited()
    if why:
        raise ClusterError(why)
    return Embedded(cluster, progress)
