"""The marker file of a finished job. It prevents a restarted pod from training the job again."""

import logging
import os
from pathlib import Path

from dlcontract import Outcome, Plan, Record

log = logging.getLogger(__name__)


class Marker(Record):
    """The content of ``finished-<uid>.json``, a file that records the result of a job that has succeeded."""

    uid: str
    plan_digest: str
    outcome: Outcome


def marker_path(plan: Plan) -> Path:
    """Return the path of the job's finished marker, a file in its checkpoint directory.

    The job's uid in the path prevents a new job of the same name from using the marker.
    """
    return Path(plan.checkpoint.directory) / f"finished-{plan.uid}.json"


def read(plan: Plan) -> Outcome | None:
    """Return the result that the job's finished marker records, or None if the job has no such marker.

    The marker is a file on the checkpoint volume. Also return None if it cannot be read, after a warning in the log.
    """
    if not plan.checkpoint.on_volume:
        return None
    try:
        marker = Marker.model_validate_json(marker_path(plan).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning(
            "cannot read file %s, which marks a finished job (%s); the job runs on if its report does not say that it "
            "has finished", marker_path(plan), error,
        )  # fmt: skip
        return None
    return marker.outcome if marker.uid == plan.uid else None


def write(plan: Plan, outcome: Outcome) -> None:
    """Write the job's finished marker, a file with the result ``outcome``, durably to the checkpoint volume.

    Do nothing if the job has no checkpoint volume. If writing fails, log a warning; the job's report still has the
    result.
    """
    if not plan.checkpoint.on_volume:
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
        log.warning(
            "file %s, which marks the job as finished: cannot be written (%s); expected a writable checkpoint volume. "
            "Check the volume. The job's report still holds the result",
            path,
            error,
        )
