"""Apply a job on the cluster of the current kubeconfig and clean it up."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml


def kubectl(*args: str, stdin: str | None = None) -> str:
    return subprocess.run(
        ["kubectl", *args], input=stdin, capture_output=True, text=True, check=True, timeout=120
    ).stdout


@contextmanager
def applied(manifest: dict[str, Any], deadline_s: float, poll_s: float) -> Iterator[Iterator[dict[str, Any]]]:
    """Apply a job, yield its status repeatedly, then delete it and wait until its pods are gone.

    Raise SystemExit if the job fails or the deadline passes.
    """
    name = manifest["metadata"]["name"]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    def statuses() -> Iterator[dict[str, Any]]:
        began = time.monotonic()
        while time.monotonic() - began < deadline_s:
            status: dict[str, Any] = json.loads(kubectl("get", "dljob", name, "-o", "json")).get("status", {})
            if status.get("phase") == "Failed":
                raise SystemExit(f"{name} failed: {status['conditions']}")
            yield status
            time.sleep(poll_s)
        raise SystemExit(f"{name}: did not finish within {deadline_s:g} s")

    try:
        yield statuses()
    finally:
        kubectl("delete", "dljob", name, "--wait=true")
        while kubectl("get", "pods", "-l", f"dljob.dev/job={name}", "-o", "name").strip():
            time.sleep(0.2)
