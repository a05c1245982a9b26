"""The Cluster Autoscaler as tests of ProvisioningRequests see it: it answers a request in the request's conditions."""

from pathlib import Path
from typing import Any

import jsonschema
import yaml

from dljob.kube import JobKey
from dljob.kube.kinds import POD_TEMPLATE, PROVISIONING_REQUEST
from support.manifests.admission import closed
from support.manifests.schema_validation import assert_valid
from support.servers.fake_api import FakeCluster

Json = dict[str, Any]
DEFINITION = Path(__file__).with_name("crd.yaml")
CLASS = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"


def schema() -> Json:
    """Return the schema of ProvisioningRequests, which rejects unknown fields."""
    [version] = yaml.safe_load(DEFINITION.read_text())["spec"]["versions"]
    found = closed(version["schema"]["openAPIV3Schema"])
    found["properties"]["metadata"] = {"type": "object"}
    return found


class Autoscaler:
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    async def requests(self, namespace: str = "team-a") -> list[Json]:
        """Return all ProvisioningRequests of a namespace, which must be valid and refer to valid PodTemplates."""
        found = await self._cluster.api.find(PROVISIONING_REQUEST, namespace)
        for request in found:
            jsonschema.validate(request, schema())
            for pods in request["spec"]["podSets"]:
                template = await self._cluster.api.get(POD_TEMPLATE, namespace, pods["podTemplateRef"]["name"])
                plain = {"uid", "creationTimestamp", "resourceVersion"}
                meta = {name: value for name, value in template["metadata"].items() if name not in plain}
                assert_valid({**template, "metadata": meta})
        return found

    async def answer(self, key: JobKey, message: str = "", **conditions: bool) -> None:
        """Set conditions of the request of a job, as the Cluster Autoscaler does."""
        [request] = [each for each in await self.requests(key[0]) if _job(each) == key[1]]
        before = {item["type"]: item for item in request.get("status", {}).get("conditions", ())}
        stamp = self._cluster.now.isoformat()
        now = {
            kind: {
                "type": kind, "status": str(status), "reason": "Told", "message": message, "lastTransitionTime": stamp,
            }
            for kind, status in conditions.items()
        }  # fmt: skip
        status = {"conditions": list((before | now).values())}
        await self._cluster.api.merge(PROVISIONING_REQUEST, key[0], request["metadata"]["name"], {"status": status})


def _job(request: Json) -> str:
    return str(request["metadata"]["labels"]["dljob.dev/job"])
