"""The Python SDK: plan, submit and follow jobs from a notebook or a CI pipeline.

::

    from dljob.sdk import Client

    with Client() as client:
        job = client.submit("job.yaml")
        print(job.wait(timeout=3600).result)

All calls block until they have their result, also in a notebook. ``Client`` and ``Job`` need the operator's
dependencies (``pip install 'dljob[operator]'``), except for ``Client.plan`` with a cluster from a file.
"""

from dljob.api import DLJobSpec, DLJobStatus, Phase, Progress
from dljob.job.spec_errors import Problem
from dljob.sdk.client import Client
from dljob.sdk.errors import (
    DLJobError,
    InvalidJobError,
    JobDeletedError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    ServerError,
)
from dljob.sdk.job import Job
from dljob.sdk.plan import Plan
from dljob.sdk.targets import Target

__all__ = [
    "Client",
    "DLJobError",
    "DLJobSpec",
    "DLJobStatus",
    "InvalidJobError",
    "Job",
    "JobDeletedError",
    "JobFailedError",
    "JobNotFoundError",
    "JobTimeoutError",
    "Phase",
    "Plan",
    "Problem",
    "Progress",
    "ServerError",
    "Target",
]
