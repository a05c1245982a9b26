"""Test of pods that reach their memory limit, against a real API server and StatefulSet controller."""

from datetime import UTC, datetime
from typing import Any

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import wait_for
from support.cluster.live_job import Play

pytestmark = pytest.mark.api


def memory_of(play: Play, pod: str) -> int:
    """Return the memory limit of a pod that runs, in MiB; 0 if it does not run."""
    found = play.kubectl.get("pod", pod)
    if found is None or found["status"].get("phase") != "Running" or "deletionTimestamp" in found["metadata"]:
        return 0
    return int(found["spec"]["containers"][0]["resources"]["limits"]["memory"].removesuffix("Mi"))


def end_at_limit(play: Play, pod: str) -> None:
    """Write the status that a kubelet writes when the kernel has ended a container, and it runs again."""
    found = play.kubectl.get("pod", pod)
    assert found is not None
    image, now = found["spec"]["containers"][0]["image"], datetime.now(UTC).isoformat(timespec="seconds")
    ended = {"exitCode": 137, "reason": "OOMKilled", "startedAt": now, "finishedAt": now}
    container: dict[str, Any] = {
        "name": "trainer", "image": image, "imageID": image, "ready": True, "restartCount": 1,
        "state": {"running": {"startedAt": now}}, "lastState": {"terminated": ended},
    }  # fmt: skip
    play.kubectl.patch("pod", pod, {"status": {"containerStatuses": [container]}}, status=True)


def test_pods_that_the_kernel_ends_get_more_memory(play: Play, nodes: HollowNodes) -> None:
    play.run("hungry")
    pod = play.plan("hungry").pods[1]
    before = memory_of(play, pod)
    end_at_limit(play, pod)
    wait_for(f"pod {pod} with twice the memory", lambda: memory_of(play, pod) > 1.9 * before, 60)
    words = f"spec.resources.memory: {memory_of(play, pod)}Mi"
    job = play.until_reported("hungry", "MemoryExceeded", "Raised", words, status="True")
    assert job["status"]["failures"] == 1
    play.kubectl.wait_events("hungry", "PodOutOfMemory")
    play.until_ready("hungry")
    play.finish("hungry")


def test_pods_that_end_at_the_limit_of_the_spec_fail_the_job(play: Play, nodes: HollowNodes) -> None:
    """Fixed bug: with cgroup v2 the whole pod ends, its coordinator calls that lost, and the job never failed."""
    play.run("greedy", resources={"cpu": "1", "memory": "1Gi"}, runPolicy={"backoffLimit": 0})
    end_at_limit(play, play.plan("greedy").pods[1])
    play.until_reported("greedy", "Failed", "OutOfMemory", "spec.resources.memory: 1Gi", status="True")
