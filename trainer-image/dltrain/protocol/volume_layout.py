"""Paths of a job's files on the checkpoint volume. The agent imports this module, so it imports neither torch nor MPI.

``<directory>/<job>-<uid>/step-0000000100/`` holds a checkpoint. The uid prevents a new job from continuing the
training of an older job with the same name.
"""

from pathlib import Path

from dlcontract import Plan

TERM = "term"
"""The file beside the checkpoints that holds the highest term of any writer."""


def job_directory(plan: Plan) -> Path:
    """Return the directory of the job's checkpoints."""
    return Path(plan.checkpoint.directory) / f"{plan.job}-{plan.uid}"


def step_name(step: int) -> str:
    return f"step-{step:010d}"


def claimed_term(plan: Plan) -> int:
    """Return the highest term of any checkpoint writer, or 0 if there is none or the directory is unreadable."""
    try:
        return term_in(job_directory(plan))
    except OSError:
        return 0


def term_in(folder: Path) -> int:
    """Return the highest term of any writer, or 0 if there is none or the file is damaged. Raise OSError."""
    try:
        return int((folder / TERM).read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0
