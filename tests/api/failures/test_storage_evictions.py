"""Test of scratch space and of evictions because of storage, against a real API server and StatefulSet controller."""

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import KubectlError, wait_for
from support.cluster.live_job import Play

pytestmark = pytest.mark.api

MESSAGE = 'Usage of EmptyDir volume "tmp" exceeds the limit "3Gi". '


def uid_of(play: Play, pod: str) -> str | None:
    """Return the uid of a pod that runs; None if it does not."""
    found = play.kubectl.get("pod", pod)
    return found["metadata"]["uid"] if found is not None and found["status"].get("phase") == "Running" else None


def evict(play: Play, pod: str) -> None:
    """Write the status that a kubelet writes when it evicts a pod."""
    status = {"phase": "Failed", "reason": "Evicted", "message": MESSAGE}
    play.kubectl.patch("pod", pod, {"status": status}, status=True)


def test_evictions_because_of_storage_count_and_end_the_job(play: Play, nodes: HollowNodes) -> None:
    with pytest.raises(KubectlError, match=r"scratch.*size must be more than 0: set Auto or a size such as 20Gi"):
        play.submit("refused", trainer={"scratch": {"size": "0"}})
    play.run("scratch", trainer={"scratch": {"size": "3Gi"}}, runPolicy={"backoffLimit": 1})
    pod = play.plan("scratch").pods[0]
    found = play.kubectl.get("pod", pod)
    assert found is not None
    resources = found["spec"]["containers"][0]["resources"]
    assert resources["requests"]["ephemeral-storage"] == str(3 * 2**30)

    first = uid_of(play, pod)
    evict(play, pod)
    words = ("spec.trainer.scratch.size: found 3Gi", "such as 6Gi")
    job = play.until_reported("scratch", "StorageExceeded", "PodEvicted", *words, status="True")
    assert job["status"]["failures"] == 1
    wait_for(f"another pod {pod}", lambda: uid_of(play, pod) not in (None, first), 30)
    evict(play, pod)
    play.until_reported("scratch", "Failed", "StorageExceeded", "backoffLimit is 1", *words, status="True")
