"""What a provider of clusters can do, and which one serves this machine. Used by the command line alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from devcluster.model import ClusterSpec


class Provider(Protocol):
    """Three implementations: existing, kind, embedded."""

    name: str

    def up(self, spec: ClusterSpec, recreate: bool) -> None:
        """Brings the cluster up; does nothing where it already runs as asked."""

    def down(self) -> None:
        """Takes it away, with everything that `up` made; does nothing where it is not there."""

    def status(self) -> dict[str, object]:
        """Facts for a person or a script: at least `provider`, `running` and `kubeconfig`."""

    def kubeconfig(self) -> Path:
        """A kubeconfig file for this cluster. Raises ClusterError where it does not run."""

    def kubectl(self) -> Path:
        """A kubectl for this cluster. Raises ClusterError where there is none."""

    def load(self, archives: Sequence[Path]) -> None:
        """Puts the images of these docker or OCI archives on every node."""

    def node(self, action: str, name: str) -> None:
        """Fault injection: `stop`, `start`, `cut` (from the network) or `heal` one node."""
