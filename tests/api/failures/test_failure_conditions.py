"""Test of failure rules about conditions: admission, a node's condition after a failure, and what agents read."""

import pytest

from dlcontract import FAILURES_KEY, Failure, FailureAllowance, RunPhase
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import KubectlError, wait_for
from support.cluster.live_job import Play

pytestmark = pytest.mark.api


def allowance(play: Play, name: str) -> FailureAllowance:
    found = play.kubectl.get("configmap", f"{name}-plan")
    assert found is not None
    return FailureAllowance.parse(found["data"][FAILURES_KEY])


def fails(play: Play, name: str, failures: int) -> str:
    """Report that rank 1 has failed. Return the node of its pod."""
    pod = play.plan(name).pods[1]
    failure = Failure(reason="RankFailed", message="exit code 1", rank=1, host=pod, exit_code=1)
    play.report(name, RunPhase.RESTARTING, failure=failure, failures=failures, restarts={"RankFailed": failures})
    found = play.kubectl.get("pod", pod)
    assert found is not None
    return str(found["spec"]["nodeName"])


def test_node_condition_after_a_failure_decides_on_it(play: Play, nodes: HollowNodes) -> None:
    rule = {"action": "Ignore", "onNodeConditions": [{"type": "example.com/GpuUnhealthy"}]}
    both = rule | {"onReasons": ["Hung"]}
    with pytest.raises(KubectlError, match=r"failureRules\[0\].*expected exactly one of onExitCodes"):
        play.submit("refused", runPolicy={"failureRules": [both]})
    startup = {"action": "Ignore", "onPodConditions": [{"type": "Ready", "status": "False"}]}
    with pytest.raises(KubectlError, match=r"failureRules\[0\].*expected none of the types PodScheduled"):
        play.submit("refused", runPolicy={"failureRules": [startup]})

    last = {"action": "FailJob", "onNodeConditions": [{"type": "example.com/GpuLost"}]}
    play.run("conditions", runPolicy={"backoffLimit": 0, "failureRules": [rule, last]})
    assert allowance(play, "conditions").wait_s > 0 and allowance(play, "conditions").ignored == 0
    node = fails(play, "conditions", 1)
    play.kubectl.wait_job("conditions", "restarting", lambda job: "Restarting" in str(job["status"]["conditions"]), 30)
    nodes.conditions[node] = {"example.com/GpuUnhealthy": "True"}
    wait_for("the failure to be ignored", lambda: allowance(play, "conditions").ignored == 1, 30)
    [event] = play.kubectl.wait_events("conditions", "FailureIgnored")
    assert node in event["message"] and "example.com/GpuUnhealthy=True" in event["message"]

    play.report("conditions", RunPhase.RUNNING, failures=1, step=20)
    play.kubectl.wait_phase("conditions", "Running", 30)
    nodes.conditions[node] = {"example.com/GpuLost": "True"}
    wait_for("the node to be lost", lambda: "example.com/GpuLost" in str(play.kubectl.get("node", node)), 30)
    assert fails(play, "conditions", 2) == node
    play.until_reported("conditions", "Failed", "RankFailed", "failureRules[1] says FailJob", status="True")
    nodes.conditions.clear()
