"""Where a job's files lie on the checkpoint volume. Light: ``agent`` imports it too.

``<directory>/<job>-<uid>/step-0000000100/`` holds a checkpoint; the uid, so that a new job of the same name never
continues an old one's training.
"""

from pathlib import Path

from dljob.contract import Plan


def job_directory(plan: Plan) -> Path:
    """The folder of the job's checkpoints."""
    return Path(plan.checkpoint.directory) / f"{plan.job}-{plan.uid}"


def step_name(step: int) -> str:
    return f"step-{step:010d}"
