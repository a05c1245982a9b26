"""Test that a real HorizontalPodAutoscaler reads and sets the scale of a job."""

from typing import Any

import pytest
import yaml

from support.cluster.kubectl import ROOT, condition, wait_for
from support.cluster.live_job import Play

pytestmark = pytest.mark.api


@pytest.mark.long
def test_autoscaler_reads_and_sets_the_scale_of_a_job(play: Play) -> None:
    """The test cluster has no metrics. The autoscaler then still limits the scale to its largest number of replicas."""
    documents = yaml.safe_load_all((ROOT / "examples/autoscaled.yaml").read_text())
    [autoscaler] = [item for item in documents if item["kind"] == "HorizontalPodAutoscaler"]
    name = autoscaler["spec"]["scaleTargetRef"]["name"]
    play.submit(name, suspend=True, nodes={"min": 1})
    play.kubectl.wait_job(name, "a selector", lambda job: "selector" in job.get("status", {}), 30)
    play.kubectl.apply(autoscaler)

    def found() -> dict[str, Any]:
        return play.kubectl.get("horizontalpodautoscaler", autoscaler["metadata"]["name"]) or {}

    def active() -> dict[str, Any] | None:
        return condition(found(), "ScalingActive")

    most = autoscaler["spec"]["maxReplicas"]
    play.kubectl.wait_job(name, "the limit", lambda job: job["spec"]["nodes"] == {"min": 1, "max": most}, 120)
    wait_for("the autoscaler to ask for metrics", active, 60, lambda: str(found().get("status")))
    able, asked = condition(found(), "AbleToScale"), active()
    assert able is not None and able["status"] == "True", "it has read the scale subresource"
    assert asked is not None and asked["reason"] == "FailedGetExternalMetric", (
        "it has a selector, and lacks only metrics"
    )
