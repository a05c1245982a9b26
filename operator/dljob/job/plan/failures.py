"""The operator's record of a job's failures and evictions, stored in the plan's ConfigMap under a key of its own.

A failure rule of the spec may name conditions of nodes or pods, such as ``DisruptionTarget``. The coordinator (the
agent that directs the job's other agents) counts failures, but only the operator can read these conditions. The
operator therefore records the counted failures, and applies such rules itself. The agents in the pods read only those
fields of the record that ``dlcontract.FailureAllowance`` defines.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from dlcontract import FailureAllowance
from dljob.api.changes import computed_fields
from dljob.calibrate.memory import MORE_MEMORY

MAX_OPEN = 10
"""Maximum number of open failures: those to which a rule about conditions may still apply. The oldest are dropped.

A failure is open for 120 s. In this time, ranks that always fail at their start restart about six times."""


MAX_EVICTED = 32
"""Number of evicted pods whose uids are stored, so that each eviction is counted once.

It exceeds the number of evictions that the operator's cache holds for one job (16)."""


class OpenFailure(BaseModel):
    """A recent failure that the coordinator counted, and to which a rule about conditions may still apply.

    The condition that the rule names may appear some time after the failure. ``rank``: the failed rank; None if the
    job's report names none. ``pod``, ``uid`` and ``node``: the pod of this rank, the pod's uid, and its node.
    """

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
    """Record of a job's counted failures and counted evictions. A new plan of the job takes over the record.

    Failures are recorded only for jobs with failure rules about conditions. Evictions of pods that used too much
    storage, and processes that the kernel ended at the memory limit of their pod, are recorded for all jobs.
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
    evicted_at: Annotated[
        str, Field(max_length=64, description="Time of the first eviction that was counted last, in one attempt.")
    ] = ""
    evicted_pods: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...],
        Field(max_length=MAX_EVICTED, description="Names of the pods that were evicted in this attempt."),
    ] = ()
    memory_kills: Annotated[
        int, Field(ge=0, description="Number of times that ranks or whole pods were ended at their memory limit.")
    ] = 0
    pod_kills: Annotated[
        int,
        Field(ge=0, description="Number of these times at which a whole pod was ended, which the agent cannot count."),
    ] = 0
    memory_answered: Annotated[
        int, Field(ge=0, description="Number of memory_kills after which the operator has looked for more memory.")
    ] = 0
    rank_kills_seen: Annotated[
        int,
        Field(ge=0, description="Number of restarts because of memory in the job's report that this record covers."),
    ] = 0
    killed: Annotated[
        tuple[Annotated[str, Field(max_length=160)], ...],
        Field(max_length=MAX_EVICTED, description="UIDs of the pods that were ended last, with the time of the end."),
    ] = ()
    killed_at: Annotated[
        str, Field(max_length=64, description="Time of the first end of a pod that was counted last, in one attempt.")
    ] = ""
    memory_kill: Annotated[
        str, Field(max_length=2048, description="Description of the last such end of ranks or of a pod, for messages.")
    ] = ""
    memory_digest: Annotated[str, Field(max_length=64, description="Computation digest at that time.")] = ""
    memory_nbytes: Annotated[
        int,
        Field(ge=0, le=2**63 - 1, description="Memory in bytes that each pod needs at least for this computation."),
    ] = 0

    memory_exceeded_nbytes: Annotated[
        int,
        Field(ge=0, le=2**63 - 1, description="Memory in bytes that was too little, and was raised to memory_nbytes."),
    ] = 0
    killed_nbytes: Annotated[
        int,
        Field(ge=0, le=2**63 - 1, description="Memory request in bytes of the pod that reached its limit last."),
    ] = 0

    def counts_memory_of(self, planned: Mapping[str, Any] | None) -> bool:
        """Return True if ranks or pods reached their limit with a spec with which ranks compute the same.

        ``planned``: the planned fields of the other spec (``StoredPlan.spec``).
        """
        return self.memory_kills > 0 and self.memory_digest == computation_digest(planned)

    def exceeded_nbytes(self, present_nbytes: int) -> int:
        """Return the memory request in bytes of the pod that reached its limit last.

        ``present_nbytes``: that of the largest pods of the present plan, for a record of an earlier release.
        """
        return self.killed_nbytes or present_nbytes

    def memory_to_try(
        self, planned: Mapping[str, Any] | None, present_nbytes: int, *, changed: bool = False
    ) -> tuple[int, ...]:
        """Return the amounts of memory in bytes that the next plan may give a pod at least, those to prefer first.

        There are several if ranks or pods were ended at their memory limit since the operator last looked for more. The
        tuple is empty if no pod has reached its limit with such a spec, whose planned fields are ``planned``.
        ``present_nbytes``: the memory that pods of the present plan request, for a record of an earlier release, which
        lacks that of the pod that reached its limit. ``changed``: True if that plan is of another spec. The last amount
        is then that without the last end, so that the change takes effect in any case.
        """
        if not self.counts_memory_of(planned):
            return ()
        if self.memory_kills > self.memory_answered:
            exceeded = self.exceeded_nbytes(present_nbytes)
            more = tuple(max(self.memory_nbytes, int(factor * exceeded)) for factor in MORE_MEMORY)
            return (*more, self.memory_nbytes) if changed else more
        return (self.memory_nbytes,) if self.memory_nbytes else ()


def computation_digest(planned: Mapping[str, Any] | None) -> str:
    """Return a digest of the fields on which it depends what ranks compute; empty for a plan without its spec."""
    if planned is None:
        return ""
    return hashlib.sha256(json.dumps(computed_fields(planned), sort_keys=True).encode()).hexdigest()[:16]
