"""The interface of providers of clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from devcluster.model import ClusterSpec


class Provider(Protocol):
    """A way to run a cluster. There are three implementations: existing, kind and embedded."""

    name: str

    def up(self, spec: ClusterSpec, recreate: bool) -> None:
        """Start the cluster that `spec` describes. Do not replace a cluster that already runs as specified.

        `recreate`: True to replace a running cluster. If it is False and the cluster runs with other options, raise
        ClusterError.
        """

    def down(self) -> None:
        """Remove the cluster and everything that `up` created. Do nothing if there is no cluster."""

    def status(self) -> dict[str, object]:
        """Return the state of the cluster, with at least the keys `provider`, `running` and `kubeconfig`."""

    def kubeconfig(self) -> Path:
        """Return the path of a kubeconfig for this cluster. Raise ClusterError if the cluster does not run."""

    def kubectl(self) -> Path:
        """Return the path of a kubectl program to use with this cluster. Raise ClusterError if there is none."""

    def load(self, archives: Sequence[Path]) -> None:
        """Load the images in docker or OCI archives into every node."""

    def node(self, action: str, name: str) -> None:
        """Inject a fault into a node, or end it.

        `stop` and `start` the node; `cut` its connection to the network; make its CPUs `slow` (`model.SLOW`); `heal` it
        from the last two.
        """
