"""Paths of a job's files on the checkpoint volume. This module imports neither torch nor MPI, for the agent's sake.

``<directory>/<job>-<uid>/step-0000000100/`` holds a checkpoint. The uid prevents a new job from continuing the training
of an older job with the same name.
"""

from pathlib import Path

from dlcontract import Plan

TERM = "term"
"""Name of the term file beside the checkpoints. It holds the highest term of any writer."""


def job_directory(plan: Plan) -> Path:
    """Return the directory of the job's checkpoints."""
    return Path(plan.checkpoint.directory) / f"{plan.job}-{plan.uid}"


def step_name(step: int) -> str:
    return f"step-{step:010d}"


def claimed_term(plan: Plan) -> int:
    """Return the highest term of any checkpoint writer, or 0 if there is no readable term file."""
    try:
        return term_in(job_directory(plan))
    except OSError:
        return 0


def term_in(folder: Path) -> int:
    """Return the highest term in the term file, or 0 if there is no file or it is damaged. Raise OSError."""
    try:
        return int((folder / TERM).read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0
