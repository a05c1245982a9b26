"""The actions of a user and a trainer on a job in a real API server."""

import time
from typing import Any

import dlcontract
from support.cluster.kubectl import Kubectl

Json = dict[str, Any]
SPEC: Json = {
    "model": {"name": "digits-cnn"},
    "dataset": {"name": "digits"},
    "globalBatchSize": 60,
    "epochs": 5,
    "nodes": {"min": 2, "max": 2},
    "checkpoint": {"enabled": False},
    "resources": {"cpu": "1"},  # Without it, a plan may take all cores of a node, and jobs of other tests would wait.
    "scheduling": {"tolerations": [{"key": "dljob.dev/hollow", "operator": "Exists"}]},
}


class Play:
    """A user and the trainer of one namespace, whose jobs run on ``device``."""

    def __init__(self, kubectl: Kubectl, device: str) -> None:
        self.kubectl, self.device = kubectl, device

    def submit(self, name: str, annotations: Json | None = None, **changes: Any) -> Json:
        spec = {key: value for key, value in {**SPEC, "devices": [self.device], **changes}.items() if value is not None}
        metadata = {"name": name, "annotations": annotations or {}}
        job = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": metadata, "spec": spec}
        self.kubectl.apply(job)
        return self.kubectl.job(name)

    def patch(self, name: str, **spec: Any) -> None:
        self.kubectl.patch("dljob", name, {"spec": spec})

    def plan(self, name: str) -> dlcontract.Plan:
        found = self.kubectl.get("configmap", f"{name}-plan")
        assert found is not None, f"no plan of {name}"
        return dlcontract.Plan.parse(found["data"][dlcontract.PLAN_KEY])

    def report(self, name: str, phase: dlcontract.RunPhase, **changes: Any) -> None:
        """Write a report as the coordinator does."""
        plan = self.plan(name)
        report = dlcontract.Report(
            uid=plan.uid, plan_number=plan.number, plan_digest=plan.digest(), term=plan.term, phase=phase,
            unix_s=time.time(), world_size=len(plan.ranks), **{"step": 10, "steps": 100, **changes},
        )  # fmt: skip
        self.write_report(name, report.to_json())

    def write_report(self, name: str, text: str) -> None:
        self.kubectl.patch("configmap", f"{name}-report", {"data": {dlcontract.REPORT_KEY: text}})

    def until_ready(self, name: str, pods: int = 2) -> None:
        self.kubectl.wait_job(name, "pods ready", lambda j: j.get("status", {}).get("ready") == f"{pods}/{pods}", 30)

    def until_reported(self, name: str, kind: str, reason: str, *words: str, status: str = "False") -> Json:
        """Wait until the job has the condition and its event exists. Return the job."""

        def reported(job: Json) -> bool:
            return any(
                c["type"] == kind
                and c["reason"] == reason
                and c["status"] == status
                and all(w in c["message"] for w in words)
                for c in job.get("status", {}).get("conditions", [])
            )

        job = self.kubectl.wait_job(name, f"{kind}/{reason} naming {words}", reported, 30)
        self.kubectl.wait_events(name, reason)
        return job

    def run(self, name: str, **changes: Any) -> None:
        """Submit a job and wait until it is in phase Running."""
        self.submit(name, **changes)
        self.until_ready(name)
        self.report(name, dlcontract.RunPhase.RUNNING, step_s=0.01)
        self.kubectl.wait_phase(name, "Running", 30)

    def succeed(self, name: str) -> None:
        """Write the coordinator's report of success."""
        outcome = dlcontract.Outcome(steps=100, seconds=1.5, loss=0.1, accuracy=0.98)
        self.report(name, dlcontract.RunPhase.SUCCEEDED, step=100, step_s=0.01, outcome=outcome)

    def finish(self, name: str) -> Json:
        """Finish the job and return it in phase Complete."""
        self.succeed(name)
        return self.kubectl.wait_phase(name, "Complete", 30)
