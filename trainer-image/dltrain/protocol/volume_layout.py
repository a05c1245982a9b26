"""Where a job's files lie on the checkpoint volume. Light: ``agent`` imports it too.

``<directory>/<job>-<uid>/step-0000000100/`` holds a checkpoint; the uid, so that a new job of the same name never
continues an old one's training.
"""

from pathlib import Path

from dlcontract import Plan

TERM = "term"
"""A file beside the checkpoints: the highest term that anyone wrote under."""


def job_directory(plan: Plan) -> Path:
    """The folder of the job's checkpoints."""
    return Path(plan.checkpoint.directory) / f"{plan.job}-{plan.uid}"


def step_name(step: int) -> str:
    return f"step-{step:010d}"


def claimed_term(plan: Plan) -> int:
    """The highest term that anyone wrote checkpoints under; 0 if none did, or the folder cannot be read."""
    try:
        return term_in(job_directory(plan))
    except OSError:
        return 0


def term_in(folder: Path) -> int:
    """The highest term that anyone wrote under; 0 if none did, or the file is damaged. Raises OSError."""
    try:
        return int((folder / TERM).read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0
