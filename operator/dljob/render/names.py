"""Names, labels and owner references of everything a job owns."""

from dataclasses import dataclass
from typing import Any

from dlcontract import config_map_names
from dljob.api import API_VERSION
from dljob.job.observed import GROUP_LABEL, JOB_LABEL, JobSeen


@dataclass(frozen=True)
class Names:
    """A job has at most 40 characters in its name, so that all of these are DNS labels."""

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
    def service(self) -> str:
        return self.job

    @property
    def account(self) -> str:
        """ServiceAccount, Role and RoleBinding of the agents."""
        return f"{self.job}-agent"

    @property
    def secret(self) -> str:
        """With the uid in it: a job made anew under an old name never meets the old one's keys."""
        return f"{self.job}-tls-{self.uid.replace('-', '')[:8]}"

    @property
    def claim(self) -> str:
        return f"{self.job}-checkpoints"

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
    """Metadata of an object of the job; ``owned``: it goes when the job goes, with no operator needed."""
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
