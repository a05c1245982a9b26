"""The operator's record of failures that the coordinator counted, for failure rules about conditions of nodes and pods.

The operator stores it in the plan's ConfigMap under a key of its own. The agents in the pods read only those of its
fields that ``dlcontract.FailureAllowance`` defines.
"""

from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from dlcontract import FailureAllowance

MAX_OPEN = 10
"""Maximum number of open failures: those to which a rule about conditions may still apply. The oldest are dropped.

A failure is open for 120 s. In this time, ranks that always fail at their start restart about six times."""


MAX_EVICTED = 32
"""Number of evicted pods whose uids are stored, so that each eviction is counted once.

It exceeds the number of evictions that the operator's cache holds for one job (16)."""


class OpenFailure(BaseModel):
    """A counted failure to which the action of a rule about conditions may still apply."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    number: Annotated[int, Field(ge=1)]
    """Number of counted failures of the job so far, including this one."""
    reason: Annotated[str, Field(max_length=64)]
    rank: int | None = None
    pod: Annotated[str, Field(max_length=253)]
    uid: Annotated[str, Field(max_length=64)]
    node: Annotated[str, Field(max_length=253)]
    at: AwareDatetime
    """Time when the operator noticed the failure. The clock of the trainer is not trusted."""


class FailureRecord(FailureAllowance):
    """Record of a job's counted failures and counted evictions, which continues when the job gets another plan.

    Failures are recorded only for jobs with failure rules about conditions, evictions for all jobs.
    """

    seen: Annotated[
        int,
        Field(ge=0, description="Number of failures in the job's report (Report.failures) that this record covers."),
    ] = 0
    open: Annotated[tuple[OpenFailure, ...], Field(max_length=MAX_OPEN)] = ()
    evictions: Annotated[
        int, Field(ge=0, description="Number of evictions of pods that used more storage than their limit or request.")
    ] = 0
    evicted: Annotated[
        tuple[Annotated[str, Field(max_length=64)], ...],
        Field(max_length=MAX_EVICTED, description="UIDs of the pods that were last evicted because of storage."),
    ] = ()
    eviction: Annotated[
        str, Field(max_length=2048, description="Description of the last counted eviction, for messages.")
    ] = ""
    eviction_digest: Annotated[
        str, Field(max_length=64, description="Digest of the spec at the last counted eviction.")
    ] = ""
