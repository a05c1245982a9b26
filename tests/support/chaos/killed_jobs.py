"""Kill a pod of a running job once, and learn from which step its ranks resumed."""

import re
from typing import Any

from dljob.client.output.records import outputs_of
from support.cluster.kubectl import Kubectl, step_of, wait_for

SAVED = 60
"""Most programs have written a checkpoint by this step."""


def killed_once(kubectl: Kubectl, name: str, step: int = SAVED) -> dict[str, Any]:
    """Delete a pod of a running job after a step, by which a checkpoint is written. Return the job in phase Complete."""
    kubectl.wait_job(name, f"step {step}", lambda found: step_of(found) >= step, 240)
    kubectl.run("delete", "pod", f"{name}-cpu-1", "--force", "--grace-period=0")
    kubectl.wait_job(name, "a restart", lambda found: bool(found["status"].get("restarts")), 120)
    return kubectl.wait_phase(name, "Complete", 300)


def resumed_from(kubectl: Kubectl, name: str) -> int:
    """Return the last step or epoch from which the ranks of an ended job resumed, by their output."""
    outputs = wait_for("the output", lambda: outputs_of(kubectl.get("configmap", f"{name}-logs") or {}), 60)
    resumed = [int(step) for step in re.findall(r"resumed from (?:step|epoch) (\d+)", "".join(outputs.values()))]
    assert resumed, outputs
    return max(resumed)
