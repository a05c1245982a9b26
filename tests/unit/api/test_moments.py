"""Tests of fields that hold a point in time."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from dljob.api import DLJobSpec
from dljob.api.changes import planned_fields
from dljob.job.plan.stored import spec_digest
from support.specs.small_specs import spec_of


def finish_by(value: object) -> datetime | None:
    return DLJobSpec.model_validate(spec_of({"scheduling": {"finishBy": value}})).scheduling.finish_by


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-12-01T18:00:00Z", datetime(2026, 12, 1, 18, tzinfo=UTC)),
        ("2026-12-01t18:00:00.5z", datetime(2026, 12, 1, 18, 0, 0, 500_000, tzinfo=UTC)),
        ("2026-12-01T18:00:00+02:00", datetime(2026, 12, 1, 18, tzinfo=timezone(timedelta(hours=2)))),
    ],
)
def test_moment_is_rfc_3339(text: str, expected: datetime) -> None:
    assert finish_by(text) == expected


def test_moment_may_be_a_timestamp_of_yaml() -> None:
    moment = datetime(2026, 12, 1, 18, tzinfo=UTC)
    assert finish_by(moment) == moment


@pytest.mark.parametrize(
    "value",
    ["2026-12-01", "2026-12-01T18:00:00", "2026-02-31T18:00:00Z", "tomorrow", "1764612000", 1764612000, True, ""],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValidationError, match=r"scheduling\.finishBy"):
        finish_by(value)


def test_deadline_does_not_change_the_digest() -> None:
    """A job that gets another deadline keeps its plan and its pods."""
    plain, due = (
        DLJobSpec.model_validate(spec_of({"scheduling": scheduling}))
        for scheduling in ({}, {"finishBy": "2026-12-01T18:00:00Z"})
    )
    assert spec_digest(plain) == spec_digest(due)
    assert "scheduling" not in planned_fields(due)
