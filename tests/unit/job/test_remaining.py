"""Tests of the predicted remaining time of a job."""

from dljob.api import DLJobStatus
from dljob.job.remaining import remaining_p90_s


def status(step: int | None = None, measured_s: float | None = None, total_s: float = 1000.0) -> DLJobStatus:
    """Return the status of a job with 100 steps of 10 s each (p90: 15 s)."""
    document = {
        "plan": {
            "number": 1, "digest": "d", "summary": "", "groups": [], "nodes": 1, "ranks": 1, "collective": "Ring",
            "predicted": {
                "stepSeconds": 10.0, "stepSecondsP90": 15.0, "totalSeconds": total_s, "samplesPerSecond": 1.0,
            },
        },
    }  # fmt: skip
    if step is not None:
        document["progress"] = {"step": step, "steps": 100, "percent": step}
    if measured_s is not None:
        document["measured"] = {"stepSeconds": measured_s, "samplesPerSecond": 1.0}
    return DLJobStatus.model_validate(document)


def test_remaining_time() -> None:
    assert remaining_p90_s(DLJobStatus()) is None
    assert remaining_p90_s(status()) == 1500.0, "no step was made yet"
    assert remaining_p90_s(status(total_s=0.0)) is None
    assert remaining_p90_s(status(step=80)) == 300.0
    assert remaining_p90_s(status(step=80, measured_s=20.0)) == 600.0, "the job is slower than predicted"
    assert remaining_p90_s(status(step=100)) == 0.0
