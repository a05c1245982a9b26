"""Main module of the process that provides DNS, shared volumes and simulated GPUs for the embedded cluster."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from devcluster.embedded.control_plane.commands import API_PORT
from devcluster.embedded.services import dns, gpus, storage
from devcluster.embedded.services.api import Api, Object
from devcluster.embedded.state import State

USER = "dljob:services"

ROLE: Object = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": USER},
    "rules": [
        {"apiGroups": [""], "resources": ["services", "endpoints", "nodes"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["list", "watch"]},
        {
            "apiGroups": [""],
            "resources": ["persistentvolumes"],
            "verbs": ["list", "watch", "create", "delete"],
        },
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ],
}
BINDING: Object = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": USER},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": USER},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}],
}


def main() -> None:
    state = State(Path(sys.argv[1]), sys.argv[2])
    record = state.read()
    assert record, f"no record in {state.folder}"
    api = Api(record.ranges.control_plane, API_PORT, state.pki, "services")
    loops = [
        dns.reconciler(api, state),
        storage.reconciler(api, state.volumes),
        gpus.reconciler(api, record.spec),
    ]
    for loop in loops[1:]:
        threading.Thread(target=loop.run, daemon=True).start()
    loops[0].run()


if __name__ == "__main__":
    main()
