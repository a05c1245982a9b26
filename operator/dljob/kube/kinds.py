"""The Kubernetes kinds that the operator uses, with their URL paths on the API server."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from dljob.api import API_VERSION
from dljob.render.gang import API_VERSIONS, kind_of
from dljob.render.provisioning import PROVISIONING_API


@dataclass(frozen=True)
class Kind:
    api_version: str
    kind: str
    plural: str
    namespaced: bool = True
    optional: bool = False
    """True if the operator works without permission to read the kind. Roles of an older release may lack it."""

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the URL path of an object, or of the list of all objects if ``name`` is empty.

        Without ``namespace``, the list contains the objects of all namespaces.
        """
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [root + self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)

    def watched_in(self, namespaces: Sequence[str], *, all_pods: bool) -> Sequence[str | None]:
        """Return the namespaces in which the operator watches this kind. The only entry None stands for all namespaces.

        ``namespaces``: those whose jobs the operator manages; empty: all. ``all_pods``: True if it watches pods in all
        namespaces nevertheless.
        """
        everywhere = not namespaces or not self.namespaced or (all_pods and self.plural == "pods")
        return (None,) if everywhere else tuple(namespaces)


DLJOB = Kind(API_VERSION, "DLJob", "dljobs")
PROFILE = Kind(API_VERSION, "DLProfile", "dlprofiles", namespaced=False)
POD = Kind("v1", "Pod", "pods")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENT = Kind("v1", "Event", "events")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
POD_GROUPS = tuple(Kind(version, *kind_of(version)) for versions in API_VERSIONS.values() for version in versions)
STORAGE_CLASS = Kind("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False, optional=True)
VOLUME = Kind("v1", "PersistentVolume", "persistentvolumes", namespaced=False, optional=True)
WORKLOAD = Kind("kueue.x-k8s.io/v1beta1", "Workload", "workloads")
"""The Workload of Kueue, in the oldest version that the operator knows.

In requests, the operator replaces the version by the newest one that it knows and that the API server serves."""
POD_TEMPLATE = Kind("v1", "PodTemplate", "podtemplates")
PROVISIONING_REQUEST = Kind(PROVISIONING_API, "ProvisioningRequest", "provisioningrequests", optional=True)
QUOTA = Kind("v1", "ResourceQuota", "resourcequotas", optional=True)
LIMIT_RANGE = Kind("v1", "LimitRange", "limitranges", optional=True)
PRIORITY_CLASS = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", namespaced=False, optional=True)
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")

APPLIED = {
    (kind.api_version, kind.kind): kind
    for kind in (
        SERVICE_ACCOUNT, ROLE, ROLE_BINDING, CONFIG_MAP, SERVICE, NETWORK_POLICY, DISRUPTION_BUDGET, CLAIM,
        STATEFUL_SET, POD_TEMPLATE, PROVISIONING_REQUEST, *POD_GROUPS,
    )
}  # fmt: skip
"""(API version, name) of a kind → the kind, for the objects of a job that the operator applies."""
