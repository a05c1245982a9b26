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
                "--provider existing: found --recreate, a --node with CPUs, memory or GPUs, or one of --kubernetes, "
                "--kubernetes-version, --feature-gates and --runtime-config; expected none of these options, because "
                "this provider does not change the cluster. Remove them"
            )
        if not have("kubectl"):
            raise ClusterError(
                "kubectl: found none on PATH; expected it, because --provider existing needs it. Install kubectl"
            )
        answer = run(["kubectl", *self._flags(), "get", "nodes", "-o", "name"], check=False, timeout_s=30)
        if answer.returncode:
            raise ClusterError(
                f"cluster of {self.kubeconfig()}: found an error on listing its nodes; expected an answer. Correct "
                f"the kubeconfig or start the cluster:\n{answer.stderr.strip()}"
            )
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
                f"KUBECONFIG: found {len(found)} files that exist in "
                f"{os.environ.get('KUBECONFIG') or '~/.kube/config'}; expected one kubeconfig file. Set KUBECONFIG to "
                "the file of your cluster (merge several: kubectl config view --flatten --minify)"
            )
        return found[0]

    def kubectl(self) -> Path:
        found = find("kubectl")
        if not found:
            raise ClusterError(
                "kubectl: found no such program on PATH; expected one, because --provider existing needs it. Install "
                "kubectl"
            )
        return Path(found)

    def load(self, archives: Sequence[Path]) -> None:
        raise ClusterError(
            "--provider existing: found images to load into nodes; expected images in a registry, because nodes of "
            "your own cluster pull them. Push them with hack/images --registry REGISTRY --provider existing --load"
        )

    def node(self, action: str, name: str) -> None:
        raise ClusterError(
            f"node {name}: found the action {action} with --provider existing; expected a cluster that hack/cluster "
            "created, because nodes of your own cluster are not changed. Change this node yourself"
        )

    def _flags(self) -> list[str]:
        return ["--kubeconfig", str(self.kubeconfig())]
