"""The fields by which log lines about a job can be found: its name and uid, and the number of its plan and attempt."""

from dljob.job.observed import JobSeen


def log_fields(key: tuple[str, str], job: JobSeen | None) -> dict[str, object]:
    """Return the fields of a log line about a job. ``key``: its namespace and name. ``job``: None if it is gone.

    ``plan``: number of its plan; 0: no plan. ``attempt``: number of restarts plus 1.
    """
    status = job.status if job is not None else {}
    plan, restarts = status.get("plan"), status.get("restarts")
    number = plan.get("number") if isinstance(plan, dict) else None
    return {
        "job": f"{key[0]}/{key[1]}",
        "uid": job.uid if job is not None else "",
        "plan": number if isinstance(number, int) else 0,
        "attempt": restarts + 1 if isinstance(restarts, int) else 1,
    }
