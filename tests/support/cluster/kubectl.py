"""kubectl for tests, with JSON input and output, and waiting with a deadline. Most reads and writes start no kubectl."""

import contextlib
import copy
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from support.cluster.objects import RequestError, objects_of

T = TypeVar("T")
Objects = list[dict[str, Any]]  # Kubectl has a method of the name list.
POLL_S = 0.2
ROOT = Path(__file__).resolve().parents[3]
OWNED = (
    "statefulsets", "pods", "services", "configmaps", "secrets", "serviceaccounts", "roles", "rolebindings",
    "networkpolicies", "persistentvolumeclaims",
)  # fmt: skip
"""Kinds of which a job may own objects."""
ONE_NODE, TWO_NODES = {"min": 1, "max": 1}, {"min": 2, "max": 2}
"""Values of ``spec.nodes`` for tests that need no third pod: each pod takes about five seconds of processor time."""


def wait_for(what: str, probe: Callable[[], T | None], deadline_s: float, detail: Callable[[], str] = str) -> T:
    """Return the first truthy value of ``probe``. Raise AssertionError with ``what`` after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s for {what}; {detail()}")
        time.sleep(POLL_S)


class KubectlError(AssertionError):
    """kubectl or a request in its place failed. The text is its error output, or the server's message."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise a request's error as KubectlError."""
    try:
        yield
    except RequestError as error:
        raise KubectlError(str(error)) from error


@dataclass(frozen=True)
class Kubectl:
    kubeconfig: str
    namespace: str = "default"

    def run(self, *args: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}", *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise KubectlError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def server_minor(self) -> int:
        """Return the minor version of the API server."""
        return int(json.loads(self.run("version", "-o", "json"))["serverVersion"]["minor"].rstrip("+"))

    def apply(self, *manifests: dict[str, Any], flags: tuple[str, ...] = ()) -> None:
        if flags:
            self.run("apply", *flags, "-f", "-", stdin=yaml.safe_dump_all(manifests))
            return
        with refusals():
            for manifest in manifests:
                objects_of(self.kubeconfig).apply(manifest, self.namespace)

    def patch(self, kind: str, name: str, change: dict[str, Any], *, status: bool = False) -> None:
        """Merge a change into an object, or into its status."""
        with refusals():
            objects_of(self.kubeconfig).patch(kind, self.namespace, name, change, status=status)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return the object, or None if it does not exist."""
        with refusals():
            return objects_of(self.kubeconfig).get(kind, self.namespace, name)

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        with refusals():
            return objects_of(self.kubeconfig).list(kind, self.namespace, selector)

    def delete(self, kind: str, name: str, *flags: str) -> None:
        """Delete an object if it exists. Wait until it is gone, unless ``flags`` has ``--wait=false``."""
        if set(flags) - {"--wait=false", "--wait=true"}:
            self.run("delete", kind, name, "--ignore-not-found", *flags)
            return
        with refusals():
            uid = objects_of(self.kubeconfig).delete(kind, self.namespace, name)
        if uid is not None and "--wait=false" not in flags:

            def is_gone() -> bool:
                found = self.get(kind, name)
                return found is None or found["metadata"]["uid"] != uid

            wait_for(f"{kind} {name} to be gone", is_gone, 60, lambda: str(self.get(kind, name))[:4000])

    def job(self, name: str) -> dict[str, Any]:
        found = self.get("dljob", name)
        assert found is not None, f"no DLJob {name}"
        return found

    def describe_job(self, name: str) -> str:
        """Return a description of the job for error messages."""
        job = self.get("dljob", name) or {}
        pods = [
            f"{p['metadata']['name']}: {p['status'].get('phase')} {p['status'].get('containerStatuses', '')}"
            for p in self.list("pods", f"dljob.dev/job={name}")
        ]
        return f"status {json.dumps(job.get('status', {}))[:4000]}; pods {pods}"[:8000]

    def wait_job(
        self, name: str, what: str, holds: Callable[[dict[str, Any]], bool], deadline_s: float
    ) -> dict[str, Any]:
        """Wait until ``holds(job)`` is True and return the job."""

        def probe() -> dict[str, Any] | None:
            job = self.job(name)
            return job if holds(job) else None

        return wait_for(f"{name} {what}", probe, deadline_s, lambda: self.describe_job(name))

    def wait_phase(self, name: str, phase: str, deadline_s: float) -> dict[str, Any]:
        """Wait until the job is in a phase and return it. Raise AssertionError at once if it has failed instead."""

        def holds(job: dict[str, Any]) -> bool:
            found = job.get("status", {}).get("phase")
            if found != phase and found in ("Failed", "Complete"):
                raise AssertionError(f"{name} is {found}, expected {phase}: {self.describe_job(name)}")
            return bool(found == phase)

        return self.wait_job(name, f"phase {phase}", holds, deadline_s)

    def events(self, name: str) -> Objects:
        """Return the events of a job."""
        about = [(event, event["involvedObject"]) for event in self.list("events")]
        return [event for event, job in about if (job["kind"], job["name"]) == ("DLJob", name)]

    def wait_events(self, name: str, *reasons: str) -> Objects:
        """Wait until the job has an event of every reason, since the operator posts events after the status.

        Return the events with these reasons.
        """

        def found() -> Objects | None:
            events = [event for event in self.events(name) if event["reason"] in reasons]
            return events if {event["reason"] for event in events} == set(reasons) else None

        return wait_for(f"events {', '.join(reasons)} of {name}", found, 60, lambda: str(self.events(name)))


def step_of(job: dict[str, Any]) -> int:
    """Return the current step of a job, or 0 before the first."""
    return int(job.get("status", {}).get("progress", {}).get("step", 0))


def condition(job: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the job's condition of a type."""
    return next((c for c in job.get("status", {}).get("conditions", []) if c["type"] == kind), None)


def example(name: str, **changes: Any) -> dict[str, Any]:
    """Return an example manifest. ``changes`` replaces spec fields, and ``job`` renames it."""
    document: dict[str, Any] = copy.deepcopy(yaml.safe_load((ROOT / "examples" / name).read_text()))
    document["metadata"]["name"] = changes.pop("job", document["metadata"]["name"])
    document["spec"] |= changes
    return {k: v for k, v in document.items() if v is not None}


def no_pods(kubectl: Kubectl, job: str, deadline_s: float) -> None:
    wait_for(
        f"the pods of {job} to be gone",
        lambda: not kubectl.list("pods", f"dljob.dev/job={job}"),
        deadline_s,
        lambda: kubectl.describe_job(job),
    )
