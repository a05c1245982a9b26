"""The finished marker beside the checkpoints: a job that ended well is not trained again by a pod that restarts."""

import logging
import os
from pathlib import Path

from dlcontract import Outcome, Plan, Record

log = logging.getLogger(__name__)


class Marker(Record):
    """What ``finished-<uid>.json`` holds."""

    uid: str
    plan_digest: str
    outcome: Outcome


def marker_path(plan: Plan) -> Path:
    """By the job's uid, so that a new job of the same name does not take it for its own."""
    return Path(plan.checkpoint.directory) / f"finished-{plan.uid}.json"


def read(plan: Plan) -> Outcome | None:
    """The result of this job, if it is marked as finished."""
    if not plan.checkpoint.enabled:
        return None
    try:
        marker = Marker.model_validate_json(marker_path(plan).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("finished marker %s ignored: %s", marker_path(plan), error)
        return None
    return marker.outcome if marker.uid == plan.uid else None


def write(plan: Plan, outcome: Outcome) -> None:
    """Durable when this returns. Where it cannot be written the report alone tells, and that is logged."""
    if not plan.checkpoint.enabled:
        return
    path = marker_path(plan)
    temporary = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w") as file:
            file.write(Marker(uid=plan.uid, plan_digest=plan.digest(), outcome=outcome).model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        log.warning("finished marker %s not written: %s", path, error)
