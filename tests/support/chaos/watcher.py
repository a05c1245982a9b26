"""A thread that looks at all jobs of a namespace while faults happen, and collects what must never be."""

import threading
from collections import defaultdict
from typing import Any

from dljob.api import Condition
from dljob.status import events
from support.cluster.api_server import Server
from support.cluster.kubectl import OWNED, Kubectl, wait_for

Json = dict[str, Any]
LOOK_S = 0.25
JOB_LABEL = "dljob.dev/job"


class Watcher:
    """Looks at the API server directly, not through a proxy that disturbs requests."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.violations: list[str] = []
        """What was seen and must never be: more pods than planned, or a job that leaves its final phase."""
        self._kubectl, self._server = kubectl, Server(kubectl.kubeconfig, kubectl.namespace)
        self._conditions: dict[str, tuple[Condition, ...]] = {}
        self._expected: dict[str, set[str]] = defaultdict(set)
        self._final: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def missing_events(self) -> dict[str, set[str]]:
        """Return {job uid: reasons} of transitions that were seen and have no event."""
        found: dict[str, set[str]] = defaultdict(set)
        for event in self._kubectl.list("events"):
            found[event["involvedObject"].get("uid", "")].add(event["reason"])
        return {uid: left for uid, expected in self._expected.items() if (left := expected - found[uid])}

    def _look_on(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except OSError:
                continue  # The API server itself is down for now.

    def _look(self) -> None:
        jobs = self._server.call("GET", self._server.jobs)
        pods = self._server.call("GET", f"/api/v1/namespaces/{self._kubectl.namespace}/pods?labelSelector={JOB_LABEL}")
        if jobs.code != 200 or pods.code != 200:
            return
        counts: dict[str, int] = defaultdict(int)
        for pod in pods.body["items"]:
            counts[pod["metadata"]["labels"][JOB_LABEL]] += 1
        for job in jobs.body["items"]:
            self._check(job, counts[job["metadata"]["name"]])

    def _check(self, job: Json, pods: int) -> None:
        name, uid, status = job["metadata"]["name"], job["metadata"]["uid"], job.get("status") or {}
        most = job["spec"].get("nodes", {}).get("max", 1)
        if pods > most:
            self.violations.append(f"{name}: {pods} pods, at most {most} nodes")
        phase = status.get("phase", "")
        if self._final.setdefault(uid, phase if phase in ("Complete", "Failed") else "") not in ("", phase):
            self.violations.append(f"{name}: {phase} after {self._final[uid]}")
        if phase in ("Complete", "Failed"):
            self._final[uid] = phase
        after = tuple(Condition.model_validate(item) for item in status.get("conditions") or ())
        for event in events(self._conditions.get(uid, ()), after):
            self._expected[uid].add(event.reason)
        self._conditions[uid] = after


def orphans(kubectl: Kubectl) -> list[str]:
    """Return the objects of jobs in a namespace, as kind/name."""
    return [
        f"{kind}/{item['metadata']['name']}"
        for kind in OWNED
        for item in kubectl.list(kind, JOB_LABEL)
        if "deletionTimestamp" not in item["metadata"]
    ]


def none_left(kubectl: Kubectl, deadline_s: float) -> None:
    """Wait until no object of any job is left. Raise AssertionError after the deadline, with their names."""
    wait_for(
        "the objects of deleted jobs to go", lambda: not orphans(kubectl), deadline_s, lambda: str(orphans(kubectl))
    )
