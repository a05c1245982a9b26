"""Test of the status of a script's uploads, with the CRD and the events of a real API server."""

import time

import pytest

from dlcontract import RunPhase, Upload, UploadProblem, Uploads
from support.cluster.live_job import Play

pytestmark = pytest.mark.api


def test_uploads_of_a_script_and_their_failures_are_shown(play: Play) -> None:
    play.run("uploads")
    made = Upload(
        unix_s=time.time(), path="s3://models/a/uploads-1/commits/0000000002.json", name="checkpoint-500", nbytes=1200,
        files=3, new_nbytes=1200, duration_s=2.5, step=9,
    )  # fmt: skip
    play.report("uploads", RunPhase.RUNNING, uploads=Uploads(count=1, last=made))
    wanted = {"name": "checkpoint-500", "bytes": 1200, "writeSeconds": 2.5, "step": 9}
    play.kubectl.wait_job(
        "uploads", "upload", lambda j: wanted.items() <= j["status"].get("lastCheckpoint", {}).items(), 20
    )
    problem = UploadProblem(
        reason="UploadFailed", message="spec.checkpoint.uri: found AccessDenied", unix_s=time.time()
    )
    unknown = made.model_copy(update={"step": None})
    play.report("uploads", RunPhase.RUNNING, uploads=Uploads(count=1, failures=1, last=unknown, problem=problem))
    job = play.until_reported("uploads", "CheckpointsUploaded", "UploadFailed", "AccessDenied", "checkpoint-500")
    assert "step" not in job["status"]["lastCheckpoint"], "the field is optional, and an unknown step is removed"
    assert "links" in job["status"]["plan"]
    play.report("uploads", RunPhase.RUNNING, uploads=Uploads(count=1, failures=1, last=unknown))
    play.until_reported("uploads", "CheckpointsUploaded", "Uploaded", "work again", status="True")
    play.report("uploads", RunPhase.RUNNING, uploads=Uploads(count=1, failures=1))
    play.kubectl.wait_job("uploads", "no checkpoint", lambda j: "lastCheckpoint" not in j["status"], 20)
