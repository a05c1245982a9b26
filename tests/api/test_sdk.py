"""The Python SDK against a real API server, with the test in the role of the trainer."""

from collections.abc import Iterator

import pytest

from dlcontract import Failure, RunPhase
from dljob.sdk import Client, InvalidJobError, JobDeletedError, JobFailedError, Phase
from support.cluster.kubectl import Kubectl
from support.cluster.live_job import SPEC, Play

pytestmark = pytest.mark.api


@pytest.fixture
def client(kubectl: Kubectl) -> Iterator[Client]:
    with Client(kubeconfig=kubectl.kubeconfig, namespace=kubectl.namespace) as found:
        yield found


def test_job_is_planned_followed_and_deleted(client: Client, play: Play) -> None:
    play.submit("sdk-whole")
    job = client.job("sdk-whole")
    assert job.wait(timeout=60, until="Planned").plan is not None
    play.until_ready("sdk-whole")
    play.report("sdk-whole", RunPhase.RUNNING, step=40, step_s=0.02, samples_per_s=3000.0, loss=0.5)
    job.wait(timeout=60, until="Running")
    assert job.progress is not None and job.progress.step == 40
    play.succeed("sdk-whole")
    assert job.wait(timeout=60).phase is Phase.COMPLETE
    assert "sdk-whole" in [each.name for each in client.jobs()]
    job.delete()
    with pytest.raises(JobDeletedError):
        job.wait(timeout=60, until="Suspended")


def test_job_is_suspended_and_invalid_changes_are_refused(client: Client, play: Play) -> None:
    job = client.submit({**SPEC, "devices": [play.device], "suspend": True}, name="sdk-suspended")
    job.wait(timeout=60, until="Suspended")
    with pytest.raises(InvalidJobError) as raised:
        job.scale(0)
    assert raised.value.field.startswith("spec.nodes")
    job.delete()


def test_submit_ends_a_change_that_the_manifest_lacks(client: Client, kubectl: Kubectl, play: Play) -> None:
    """A change by another, such as ``kubectl patch``, stays. That of the SDK itself ends, as with ``kubectl apply``."""
    spec = {**SPEC, "devices": [play.device]}
    job = client.submit({**spec, "suspend": True}, name="sdk-again")
    job.wait(timeout=60, until="Suspended")
    job.resume()
    job.suspend()
    kubectl.patch("dljob", "sdk-again", {"spec": {"objective": {"minimize": "Energy"}}})
    client.submit(spec, name="sdk-again")
    stored = kubectl.get("dljob", "sdk-again")
    assert (
        stored is not None and not stored["spec"].get("suspend") and stored["spec"]["objective"]["minimize"] == "Energy"
    )
    job.delete()


def test_failed_job_raises_its_reason(client: Client, play: Play) -> None:
    play.submit("sdk-failed")
    play.until_ready("sdk-failed")
    failure = Failure(reason="RankFailed", message="no", rank=1, log_tail="last words", retry=False)
    play.report("sdk-failed", RunPhase.FAILED, failure=failure)
    with pytest.raises(JobFailedError) as raised:
        client.job("sdk-failed").wait(timeout=60)
    assert raised.value.rank == 1 and raised.value.last_lines == ("last words",)
