"""Tests of what the status says of the uploads of a script's checkpoint folder."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from dlcontract import RunPhase, Upload, UploadProblem, Uploads
from dljob.job.observed import Observed
from dljob.status import find
from support.builders import NOW, Json, after, report
from support.job_lifecycle import condition_of, started, status, step, verdict

CONDITION = "CheckpointsUploaded"
SCRIPT: Json = {
    "nodes": {"min": 2}, "checkpoint": {"uri": "s3://models/team-a"},
    "trainer": {"framework": "Torchrun", "command": ["python", "train.py"]},
}  # fmt: skip
LAST = Upload(
    unix_s=NOW.timestamp(), path="s3://models/team-a/j/commits/0000000004.json", name="checkpoint-500", nbytes=1200,
    files=3, new_nbytes=1000, duration_s=2.5, step=499,
)  # fmt: skip
PROBLEM = UploadProblem(
    reason="UploadFailed", message="spec.checkpoint.uri: found AccessDenied; expected a store. Look", unix_s=1.0
)


def told(observed: Observed, uploads: Uploads | None, **fields: object) -> Observed:
    return replace(observed, report=report(observed, uploads=uploads, **fields))


@pytest.fixture(scope="module")
def running() -> Observed:
    observed = started(SCRIPT)
    return after(told(observed, Uploads()), step(told(observed, Uploads())))


def test_status_shows_the_last_upload(running: Observed) -> None:
    found = status(step(told(running, Uploads(count=1, last=LAST)))).last_checkpoint
    assert found is not None and found.manifest() == {
        "step": 499,
        "time": NOW.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "path": LAST.path,
        "name": "checkpoint-500",
        "bytes": 1200,
        "writeSeconds": 2.5,
    }


def test_step_is_left_out_if_the_script_reports_none(running: Observed) -> None:
    found = status(step(told(running, Uploads(last=LAST.model_copy(update={"step": None}))))).last_checkpoint
    assert found is not None and found.step is None and "step" not in found.manifest()


def test_bucket_without_a_commit_is_not_shown_as_a_checkpoint(running: Observed) -> None:
    saved = told(running, Uploads(last=LAST))
    saved = after(saved, step(saved))
    assert saved.job.status["lastCheckpoint"]["name"] == "checkpoint-500"
    assert status(step(told(saved, Uploads()))).last_checkpoint is None
    kept = status(step(told(saved, None))).last_checkpoint
    assert kept is not None, "a report without uploads says nothing of them"


def test_uploads_that_always_work_cause_no_condition(running: Observed) -> None:
    found = step(told(running, Uploads(last=LAST)))
    assert find(status(found).conditions, CONDITION) is None and not found.events


@pytest.mark.parametrize(
    ("last", "words"),
    [(LAST, "from the last commit (checkpoint-500 of step 499, "), (None, "Nothing is committed")],
    ids=["a commit", "no commit"],
)
def test_failing_upload_is_a_condition_and_an_event(running: Observed, last: Upload | None, words: str) -> None:
    failing = told(running, Uploads(last=last, failures=1, problem=PROBLEM))
    found = step(failing)
    assert verdict(found, CONDITION) == ("False", "UploadFailed")
    message = condition_of(found, CONDITION).message
    assert message.startswith(PROBLEM.message) and words in message
    assert [(event.type, event.reason) for event in found.events] == [("Warning", "UploadFailed")]
    assert verdict(found, "Running") == ("True", "Running") and not found.scales, "nothing stops"
    later = after(failing, found)
    assert not step(later).events, "one event"
    works = step(told(later, Uploads(last=LAST)))
    assert verdict(works, CONDITION) == ("True", "Uploaded")
    assert [(event.type, event.reason) for event in works.events] == [("Normal", "Uploaded")]


def test_condition_stays_false_until_something_is_committed(running: Observed) -> None:
    """Regression: after a restart, it was True with 'uploads work again', although nothing had ever been uploaded."""
    failing = told(running, Uploads(problem=PROBLEM.model_copy(update={"reason": "FolderChanges"})))
    restarted = told(after(failing, step(failing)), Uploads())
    found = step(restarted)
    assert verdict(found, CONDITION) == ("False", "FolderChanges") and not found.events
    assert verdict(step(told(after(restarted, found), Uploads(last=LAST))), CONDITION) == ("True", "Uploaded")


def test_reason_of_an_untrusted_report_is_bounded(running: Observed) -> None:
    odd = Uploads(problem=PROBLEM.model_copy(update={"reason": "Complete"}))
    assert verdict(step(told(running, odd)), CONDITION) == ("False", "UploadFailed")


def test_upload_of_a_script_does_not_bind_the_plan_as_a_checkpoint_of_dltrain_does(running: Observed) -> None:
    saved = told(running, Uploads(last=LAST), phase=RunPhase.RUNNING)
    desired = step(after(saved, step(saved)))
    assert verdict(desired, "Planned")[0] == "True" and not desired.scales


def test_latest_valid_time_of_an_upload(running: Observed) -> None:
    latest = LAST.model_copy(update={"unix_s": 2.5e11})
    found = step(told(running, Uploads(last=latest, problem=PROBLEM)))
    saved = status(found).last_checkpoint
    assert saved is not None and saved.time == datetime.fromtimestamp(2.5e11, UTC)
