"""The provider that uses the cluster of the current kubeconfig. It is used only on request and changes no cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.model import ClusterSpec
from devcluster.progress import Progress
from devcluster.shell import find, have, run


class Existing:
    """An existing cluster, which is only read. The protocol `provider.Provider` describes each method."""

    name = "existing"

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def up(self, spec: ClusterSpec, recreate: bool) -> None:
        chosen = spec.kubernetes or spec.feature_gates or spec.runtime_config
        if recreate or chosen or any(node.cpus or node.gpus or node.memory_nbytes for node in spec.nodes):
            raise ClusterError(
                "--provider existing takes the cluster as it is: found options that would change it. Drop "
                "--node, --recreate and the options of Kubernetes"
            )
        if not have("kubectl"):
            raise ClusterError("kubectl is not on PATH: install it to use your own cluster")
        answer = run(["kubectl", *self._flags(), "get", "nodes", "-o", "name"], check=False, timeout_s=30)
        if answer.returncode:
            raise ClusterError(f"the cluster of {self.kubeconfig()} does not answer:\n{answer.stderr.strip()}")
        self._progress.say(f"using your cluster: {len(answer.stdout.split())} nodes")

    def down(self) -> None:
        self._progress.say("your own cluster stays as it is; remove the operator with: helm uninstall dljob")

    def status(self) -> dict[str, object]:
        path = self.kubeconfig()
        answer = run(["kubectl", *self._flags(), "get", "nodes", "-o", "name"], check=False, timeout_s=30)
        nodes = [line.partition("/")[2] for line in answer.stdout.split()]
        return {"provider": self.name, "running": answer.returncode == 0, "kubeconfig": str(path), "nodes": nodes}

    def kubeconfig(self) -> Path:
        listed = [Path(part) for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
        found = [path for path in listed or [Path.home() / ".kube" / "config"] if path.is_file()]
        if len(found) != 1:
            raise ClusterError(
                f"found {len(found)} kubeconfig files in {os.environ.get('KUBECONFIG') or '~/.kube/config'}; expected "
                "one: set KUBECONFIG to the cluster you mean (merge several: kubectl config view --flatten --minify)"
            )
        return found[0]

    def kubectl(self) -> Path:
        found = find("kubectl")
        if not found:
            raise ClusterError("kubectl: found none on PATH; expected one for your own cluster: install it")
        return Path(found)

    def load(self, archives: Sequence[Path]) -> None:
        raise ClusterError(
            "nodes of your own cluster pull images: push them with "
            "hack/images --registry REGISTRY --provider existing --load"
        )

    def node(self, action: str, name: str) -> None:
        raise ClusterError(f"nodes of your own cluster are not touched: {action} {name} yourself")

    def _flags(self) -> list[str]:
        return ["--kubeconfig", str(self.kubeconfig())]
