"""Tests of the condition of a script that reports no progress."""

from dataclasses import replace

import pytest

from dlcontract import RunPhase
from dljob.job.observed import Observed
from dljob.status import find
from support.builders import Json, after, report
from support.job_lifecycle import condition_of, started, status, step, verdict

CONDITION = "ProgressReported"
SILENT: Json = {"step": 0, "steps": 0, "step_s": None, "world_size": 0}


def script(framework: str = "Torchrun") -> Json:
    return {"nodes": {"min": 2}, "checkpoint": {"enabled": False}} | {
        "trainer": {"framework": framework, "command": ["python", "train.py"]}
    }


def silent(framework: str = "Torchrun") -> Observed:
    """Return a job whose ranks have just been seen to run, and that has reported nothing."""
    observed = started(script(framework))
    observed = replace(observed, report=report(observed, **SILENT))
    return after(observed, step(observed))


@pytest.mark.parametrize("framework", ["Torchrun", "MPI"])
def test_script_that_never_reports_gets_one_condition_and_one_event(framework: str) -> None:
    observed = silent(framework)
    soon = step(observed, 100.0)
    assert find(status(soon).conditions, CONDITION) is None
    assert soon.requeue_after_s is not None and soon.requeue_after_s <= 200.0
    found = step(observed, 300.0)
    assert verdict(found, CONDITION) == ("False", "NoReports")
    message = condition_of(found, CONDITION).message
    for word in (
        "spec.trainer.command",
        "progress",
        "remaining time",
        "hang",
        "dltrain.report",
        "dltrain.integrations",
    ):
        assert word in message
    assert [event.type for event in found.events if event.reason == "NoReports"] == ["Normal"]
    later = after(observed, found)
    again = step(later, 900.0)
    assert not again.events and status(again).conditions == status(found).conditions, "no event, and no other status"
    assert not found.scales and verdict(found, "Running") == ("True", "Running"), "nothing stops"


def test_condition_ends_with_the_first_report() -> None:
    observed = silent()
    observed = after(observed, step(observed, 300.0))
    reports = replace(observed, report=report(observed, step=1, steps=0))
    found = step(reports, 301.0)
    assert verdict(found, CONDITION) == ("True", "Reported") and not found.events
    ended = replace(reports, report=report(observed, RunPhase.SUCCEEDED, step=1, steps=0))
    assert verdict(step(after(reports, found), 400.0), CONDITION) == ("True", "Reported")
    assert verdict(step(after(ended, found), 400.0), CONDITION) == ("True", "Reported")


@pytest.mark.parametrize("changes", [{"step": 3}, {"step_s": 0.0}, {"step": 3, "step_s": None}])
def test_script_that_has_reported_never_gets_the_condition(changes: Json) -> None:
    """The first report may be about step 0. After a restart under another plan, the step time is unknown."""
    observed = silent()
    observed = replace(observed, report=report(observed, **{**SILENT, **changes}))
    assert find(status(step(observed, 3000.0)).conditions, CONDITION) is None


def test_script_of_dltrain_never_gets_the_condition() -> None:
    """It calls ``dltrain.init``. Its end has a message of its own if it does not."""
    observed = started()
    observed = after(observed, step(replace(observed, report=report(observed, **SILENT))))
    observed = replace(observed, report=report(observed, **SILENT))
    assert find(status(step(observed, 3000.0)).conditions, CONDITION) is None


def test_time_counts_from_the_last_start_of_the_ranks() -> None:
    observed = silent()
    restarting = replace(observed, report=report(observed, RunPhase.RESTARTING, **SILENT))
    restarting = after(restarting, step(restarting, 290.0))
    assert find(status(step(restarting, 1000.0)).conditions, CONDITION) is None
    again = replace(restarting, report=report(restarting, **SILENT))
    again = after(again, step(again, 1000.0))
    assert find(status(step(again, 1290.0)).conditions, CONDITION) is None
    assert verdict(step(again, 1300.0), CONDITION) == ("False", "NoReports")


def test_condition_outlasts_a_restart() -> None:
    observed = silent()
    observed = after(observed, step(observed, 300.0))
    restarting = step(replace(observed, report=report(observed, RunPhase.RESTARTING, **SILENT)), 400.0)
    assert verdict(restarting, CONDITION) == ("False", "NoReports")
    assert not [event for event in restarting.events if event.reason == "NoReports"]
