"""Choose the provider of clusters for this machine."""

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
    """Return the provider for the cluster with the name `cluster`.

    `wanted`: name of the provider that the user chose. If it is None, return the provider that created the cluster. If
    there is no such cluster yet, return kind or embedded, whichever works on this machine. Raise ClusterError, with the
    programs to install, if neither works.
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
    """Return `kind` if Docker works and kind is installed, else `embedded` if possible, else `kind` if Docker works.

    In the last case, `up` installs kind. Raise ClusterError if neither provider can work.
    """
    docker = docker_works()
    if docker and kindtool.program():
        return "kind"
    why_not = embedded.unsuited()
    if why_not is None:
        if docker:
            progress.say(
                "Docker works, but kind is not on PATH: using the embedded cluster (to install kind: --provider kind)"
            )
        return "embedded"
    if docker:
        progress.say(f"Docker works, but kind is not on PATH, and {why_not}: installing kind")
        return "kind"
    raise ClusterError(
        f"no way to make a cluster here: no Docker engine answers, and {why_not}.\nInstall Docker, or run this as root "
        "on Debian or Ubuntu; or use the cluster of your current kubeconfig with --provider existing"
    )
