"""Tests of which jobs wait for capacity, so that no running job grows onto it."""

from typing import Any

import pytest

from dljob.job.waiting import MAX_KEPT_BACK_OFFS, devices_waited_for
from support.builders import job

Json = dict[str, Any]
SPEC: Json = {"devices": ["a100", "t4"]}


def having(**reasons: str) -> Json:
    """Return a status with a condition for each keyword: its reason, which is False unless it starts with a plus."""
    conditions = [
        {"type": kind, "status": str(reason.startswith("+")), "reason": reason.removeprefix("+")}
        for kind, reason in reasons.items()
    ]
    return {"conditions": conditions}


WAIT = {
    "new": (SPEC, {}),
    "others use its devices": (SPEC, having(Accepted="+Accepted", Planned="DeviceBusy")),
    "nodes are left out": (SPEC, having(Planned="NodesLeftOut")),
    "backs off": (SPEC, having(Planned="+Planned", Admitted="StartTimedOut")),
}
DO_NOT_WAIT = {
    "runs": (SPEC, having(Planned="+Planned", Admitted="+Started")),
    "needs nodes that do not exist": (SPEC, having(Planned="TooFewNodes")),
    "invalid": (SPEC, having(Accepted="InvalidSpec", Planned="DeviceBusy")),
    "suspended": ({**SPEC, "suspend": True}, having(Planned="DeviceBusy")),
    "plan only": ({**SPEC, "planning": {"mode": "PlanOnly"}}, {}),
    "has ended": (SPEC, {"phase": "Failed"}),
    "its PriorityClass does not exist": (SPEC, having(Accepted="+Accepted", PriorityClassFound="NotFound")),
    "its PriorityClass was deleted": (SPEC, having(Planned="DeviceBusy", PriorityClassFound="NotFound")),
    "waits for its data": (SPEC, having(Accepted="+Accepted", DataInspected="DataNotUsable")),
    "another owner has its names": (SPEC, having(Accepted="+Accepted", PodsReady="NamesTaken")),
    "an earlier job has its names": (SPEC, having(Accepted="+Accepted", PodsReady="WaitingForDeletion")),
}


@pytest.mark.parametrize(("spec", "status"), WAIT.values(), ids=WAIT)
def test_job_that_waits(spec: Json, status: Json) -> None:
    assert devices_waited_for(job(spec, status=status)) == ("a100", "t4")
    assert devices_waited_for(job({}, status=status)) == (), "any device will do"
    assert devices_waited_for(job(spec, status=status, deleting=True)) is None


def backing_off(times: int, *devices: str) -> Json:
    groups = [{"device": device} for device in devices]
    return {**having(Planned="+Planned", Admitted="StartTimedOut"), "startTimeouts": times, "plan": {"groups": groups}}


def test_job_in_a_back_off_waits_for_the_devices_of_its_plan() -> None:
    """Fixed bug: a job that may use any device kept running jobs from growing onto all types of devices."""
    assert devices_waited_for(job({}, status=backing_off(1, "t4", "l4"))) == ("t4", "l4")
    assert devices_waited_for(job({}, status=having(Accepted="+Accepted", Planned="DeviceBusy"))) == ()


def test_job_that_backs_off_again_and_again_keeps_no_devices() -> None:
    """Fixed bug: because of one job with a wrong image, no running job ever grew."""
    assert devices_waited_for(job(SPEC, status=backing_off(MAX_KEPT_BACK_OFFS, "t4"))) == ("t4",)
    assert devices_waited_for(job(SPEC, status=backing_off(MAX_KEPT_BACK_OFFS + 1, "t4"))) is None


def test_job_in_a_queue_of_kueue_waits_for_kueue() -> None:
    assert devices_waited_for(job(SPEC, status={}, queue="main")) is None


@pytest.mark.parametrize(("spec", "status"), DO_NOT_WAIT.values(), ids=DO_NOT_WAIT)
def test_job_that_does_not_wait(spec: Json, status: Json) -> None:
    assert devices_waited_for(job(spec, status=status)) is None
