"""Jobs whose pods use more of a quota than it allows, because somebody has lowered the quota.

The API server stops no pod for this reason, but rejects new ones. A job therefore trains on, and a pod that it loses
is not replaced until the quota grows or other pods end.
"""

from collections.abc import Iterator

from dljob.reconcile.parsed import ParsedJob
from dljob.status import FALSE, TRUE, Verdict, find

CONDITION = "WithinQuota"


def verdicts(parsed: ParsedJob) -> Iterator[Verdict]:
    """Yield the condition WithinQuota. A job gets it when a quota is below what its pods use for the first time."""
    if overdrawn := parsed.observed.overdrawn:
        listed = "; ".join(str(each) for each in overdrawn)
        text = (
            f"{listed}; expected no more than the quota allows. The pods of the job run on, but lost pods cannot be "
            "replaced. Raise the quota, or stop other jobs of the namespace"
        )
        yield Verdict(CONDITION, FALSE, "QuotaBelowUsage", text)
    elif find(parsed.before.conditions, CONDITION) is not None:
        yield Verdict(CONDITION, TRUE, "WithinQuota", "no quota of the namespace is below what the job's pods use")
