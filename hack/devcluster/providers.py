"""Chooses the provider for this machine. Used by the command lines."""

from __future__ import annotations

from devcluster.embedded import provider as embedded
from devcluster.errors import ClusterError
from devcluster.existing import Existing
from devcluster.images.builders import docker_works
from devcluster.kind import tool as kindtool
from devcluster.kind.provider import Kind
from devcluster.paths import cluster_dir
from devcluster.progress import Progress
from devcluster.provider import Provider

PROVIDERS = ("existing", "kind", "embedded")


def choose(wanted: str | None, cluster: str, progress: Progress) -> Provider:
    """The provider asked for, else the one that made this cluster, else kind or embedded, whichever can work.

    Raises ClusterError naming what to install where none can. `existing` is never chosen silently.
    """
    name = wanted or _maker_of(cluster) or _able(progress)
    if name == "existing":
        return Existing(progress)
    if name == "kind":
        return Kind(cluster, progress)
    why_not = embedded.unsuited()
    if why_not:
        raise ClusterError(why_not)
    return embedded.Embedded(cluster, progress)


def _maker_of(cluster: str) -> str | None:
    folder = cluster_dir(cluster)
    if (folder / "kind.json").exists():
        return "kind"
    return "embedded" if (folder / "cluster.json").exists() else None


def _able(progress: Progress) -> str:
    """Return kind where Docker works and kind is there, else embedded, else kind, which `up` then installs."""
    docker = docker_works()
    if docker and kindtool.program():
        return "kind"
    why_not = embedded.unsuited()
    if why_not is None:
        if docker:
            progress.say("Docker works, but kind is not on PATH: taking the embedded cluster (or: --provider kind)")
        return "embedded"
    if docker:
        progress.say(f"Docker works, but kind is not on PATH, and {why_not}: installing kind")
        return "kind"
    raise ClusterError(
        f"no way to make a cluster here: no Docker engine answers, and {why_not}.\nInstall Docker, or run this as root "
        "on Debian or Ubuntu; or use the cluster of your current kubeconfig with --provider existing"
    )
