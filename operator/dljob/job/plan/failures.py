"""The operator's record of counted failures, for rules about conditions of nodes and pods.

It is in the plan's ConfigMap under a key of its own. The agents read the part that ``dlcontract`` defines.
"""

from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from dlcontract import FailureAllowance

MAX_OPEN = 10
"""Maximum number of failures that wait for a condition. Ranks that fail at once restart six times in 120 s."""


MAX_EVICTED = 32
"""Number of evicted pods whose uids are stored, so that each is counted once. The cache remembers fewer per job."""


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
    """Counted failures of a job with rules about conditions, and counted evictions of any job, across its plans."""

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
