"""Paths of a job's files on the checkpoint volume.

``<directory>/<job>-<uid>/step-0000000100/`` holds a checkpoint. The uid prevents a new job from continuing the training
of an older job with the same name. The agent uses this module, too, so the module imports neither torch nor MPI.
"""

from pathlib import Path

from dlcontract import Plan

TERM = "term"
"""Name of the term file beside the checkpoints.

A term is a number that rises whenever another coordinator (the agent that directs the job) takes over. The file
contains the highest term of any run that writes checkpoints there."""


def job_directory(plan: Plan) -> Path:
    """Return the directory of the job's checkpoints."""
    return Path(plan.checkpoint.directory) / f"{plan.job}-{plan.uid}"


def checkpoint_place(plan: Plan) -> str:
    """Return where users find the job's checkpoints: a directory, or a URI such as s3://bucket/prefix/job-uid."""
    uri = plan.checkpoint.uri
    return str(job_directory(plan)) if uri is None else f"{uri.rstrip('/')}/{plan.job}-{plan.uid}"


def logs_directory(plan: Plan) -> Path | None:
    """Return the directory with the output of each rank, or None if the job has no volume."""
    return job_directory(plan) / "logs" if plan.checkpoint.on_volume else None


def is_own_file(path: str) -> bool:
    """Return True if the agent, not the script, writes the file ``path``, relative to the job's directory."""
    return path == TERM or path.startswith("logs/") or path.lstrip(".").startswith(("report.json", "report.html"))


def step_name(step: int) -> str:
    return f"step-{step:010d}"


def claimed_term(plan: Plan) -> int:
    """Return the term in the job's term file, a file beside the checkpoints.

    A term is a number that rises whenever another coordinator (the agent that directs the job) takes over. The file
    contains the highest term of all runs of this job that write checkpoints. Return 0 if it is missing or unreadable,
    or if the job has no volume.
    """
    if not plan.checkpoint.on_volume:
        return 0
    try:
        return term_in(job_directory(plan))
    except OSError:
        return 0


def term_in(folder: Path) -> int:
    """Return the number in the term file of ``folder``, or 0 if there is no such file or it is damaged.

    The number rises whenever another coordinator (the agent that directs the job) takes over. Raise OSError if the file
    exists but cannot be read.
    """
    try:
        return int((folder / TERM).read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0
