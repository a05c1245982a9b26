"""Names, labels and owner references of a job's objects."""

from dataclasses import dataclass
from typing import Any

from dlcontract import config_map_names
from dljob.api import API_VERSION
from dljob.job.observed import GROUP_LABEL, JOB_LABEL, JobSeen


@dataclass(frozen=True)
class Names:
    """Names of a job's Kubernetes objects. A job name has at most 40 characters, so that every name is a DNS label."""

    job: str
    uid: str

    @classmethod
    def of(cls, job: JobSeen) -> "Names":
        return cls(job.name, job.uid)

    @property
    def plan(self) -> str:
        return config_map_names(self.job)[0]

    @property
    def report(self) -> str:
        return config_map_names(self.job)[1]

    @property
    def logs(self) -> str:
        """Return the name of the ConfigMap with the last output of each rank, which outlives the pods."""
        return config_map_names(self.job)[2]

    @property
    def suggestion(self) -> str:
        """Return the name of the ConfigMap with the suggestion for ``spec.task`` and the scripts."""
        return f"{self.job}-suggestion"

    @property
    def look(self) -> str:
        """Return the name of the look pod, its ServiceAccount, Role and RoleBinding."""
        return f"{self.job}-look"

    @property
    def service(self) -> str:
        return self.job

    @property
    def account(self) -> str:
        """Return the name of the agents' ServiceAccount, Role and RoleBinding."""
        return f"{self.job}-agent"

    @property
    def secret(self) -> str:
        """Return the name of the Secret with the TLS keys.

        The name contains the job's uid, so that a new job never uses the keys of an old job with the same name.
        """
        return f"{self.job}-tls-{self.uid.replace('-', '')[:8]}"

    @property
    def claim(self) -> str:
        return f"{self.job}-checkpoints"

    @property
    def workload(self) -> str:
        """Return the name of the Workload with which the job asks Kueue for quota.

        The name contains the job's uid, so that a new job never takes over the Workload of a deleted one.
        """
        return f"dljob-{self.job}-{self.uid.replace('-', '')[:8]}"

    @property
    def provisioning(self) -> str:
        """Return the name of the ProvisioningRequest with which the job asks an autoscaler for nodes."""
        return f"{self.job}-nodes"

    def set(self, group: str) -> str:
        return f"{self.job}-{group}"


def labels(job: JobSeen, group: str | None = None) -> dict[str, str]:
    common = {
        "app.kubernetes.io/name": "dljob-trainer",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "dljob",
        JOB_LABEL: job.name,
    }
    return common | ({GROUP_LABEL: group} if group else {})


def metadata(job: JobSeen, name: str, *, owned: bool = True, **more: Any) -> dict[str, Any]:
    """Return the metadata of a Kubernetes object that belongs to ``job``.

    If ``owned`` is true, the garbage collector deletes the object together with the job. ``more``: further fields of
    the metadata, such as ``annotations``.
    """
    owner = {
        "apiVersion": API_VERSION,
        "kind": "DLJob",
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    found: dict[str, Any] = {"name": name, "namespace": job.namespace, "labels": labels(job)}
    return found | ({"ownerReferences": [owner]} if owned else {}) | more
