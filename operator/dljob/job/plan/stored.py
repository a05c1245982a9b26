"""The accepted plan of a job, as stored in the ConfigMap ``<job>-plan``.

The key ``plan.json`` is for the agents. The key ``operator.json`` contains what the operator needs in addition, so that
it does not plan again after a restart. The groups of a plan (its pods on one type of device) are not stored as a list,
because each rank in ``plan.json`` names its group.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

import dlcontract
from dljob.api import DLJobSpec, PlanGroup, PlanStatus
from dljob.api.changes import planned_fields
from dljob.api.defaults import JobDefaults
from dljob.cluster.domains import Domain, Requirement
from dljob.job.plan.failures import FailureRecord
from dljob.job.plan.node_terms import MAX_TERMS, NodeRequirement
from dljob.job.plan.pod_groups import PodGroup, ranks_by_group
from dljob.job.queue import QueueAdmission
from dljob.scheduling import Charge

OPERATOR_KEY = "operator.json"
PROBLEM_KEY = "problem"
"""Key of a message that the cache has in place of a plan that it does not store."""
DIGEST_VERSION = "v1"
"""Version of the method of ``spec_digest``. A release with another version must also compute digests of this one."""
PARSED_NCHARS = 2**14
"""Maximum length of the texts of a plan that is cached after parsing.

A plan of 4 ranks has about 3,000 characters. Parsed plans of thousands of ranks would need too much memory.
"""
MAX_PARSED, PARSED_NRANKS = 256, 256
"""Maximum number of cached plans, and of the ranks of each: a short text can also state thousands of ranks."""
MAX_AMOUNT = 2**63 - 1
"""Largest amount of a resource, as in Kubernetes. Users can edit a stored plan, and larger integers fit no float."""
MAX_AVOIDED = 200
"""Maximum number of nodes that the pods of a plan avoid."""

MAX_REFUSED_RANKS = 4 * dlcontract.MAX_REFUSED_SIZES
"""Maximum number of stored numbers of ranks on which a script failed."""


class StoredPlan(BaseModel):
    """The accepted plan of a job: the trainer's plan, its status, and what the operator needs in addition.

    Unknown fields are ignored, because a later release may have written the plan before a rollback.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    plan: dlcontract.Plan
    status: PlanStatus
    cpu_m: Annotated[
        dict[str, Annotated[int, Field(ge=1, le=MAX_AMOUNT)]],
        Field(description="CPU request of one pod by node group, in thousandths of a CPU."),
    ]
    memory_nbytes: Annotated[int, Field(ge=1, le=MAX_AMOUNT, description="Main memory of the largest pod, in bytes.")]
    memory_by_group: Annotated[
        dict[str, Annotated[int, Field(ge=1, le=MAX_AMOUNT)]] | None,
        Field(description="Main memory in bytes of a pod, by node group, where it is less than memory_nbytes."),
    ] = None
    spec_digest: str
    spec: Annotated[
        dict[str, Any] | None,
        Field(
            description="Fields of the spec that the plan depends on (planned_fields). None: a release before 0.3 "
            "made the plan."
        ),
    ] = None
    replans: Annotated[
        int,
        Field(ge=0, description="Number of plans of this spec that the operator has replaced by itself."),
    ] = 0
    resizes: Annotated[
        int | None,
        Field(
            ge=0,
            description="Number of the plans in ``replans`` that were replaced after a change of the cluster. None: "
            "the plan is of an earlier release, and the number is 0.",
        ),
    ] = None
    splitting_disabled: Annotated[
        bool,
        Field(
            description="True: plans of this spec must not use model parallelism, because the steps of an earlier "
            "plan with it took longer than predicted."
        ),
    ] = False
    refused_ranks: Annotated[
        tuple[Annotated[int, Field(ge=1, le=2**31)], ...] | None,
        Field(
            max_length=MAX_REFUSED_RANKS,
            description="Numbers of ranks on which the job's script failed, with earlier plans of this spec.",
        ),
    ] = None
    warning: str | None = None
    defaults: Annotated[
        JobDefaults | None,
        Field(
            description="The administrator's defaults when the job was planned. Later changes of the defaults do not "
            "apply to the job."
        ),
    ] = None
    avoid: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...] | None,
        Field(max_length=MAX_AVOIDED, description="Nodes with repeated faults, on which the pods must not run."),
    ] = None
    domain: Annotated[
        tuple[tuple[NodeRequirement, ...], ...] | None,
        Field(
            max_length=MAX_TERMS,
            description="The nodes for which the plan was priced, as terms of node requirements. The pods run only on "
            "nodes that meet all requirements of at least one term. None: the pods may run on any node.",
        ),
    ] = None
    crosses_border: Annotated[
        bool | None,
        Field(
            description="True: the pods run on several nodes, which may be in several zones or racks with a slower "
            "network between them. None: they are in one, or the administrator describes no such network."
        ),
    ] = None
    charges: Annotated[
        dict[str, Charge] | None,
        Field(
            description="Amounts that count against quotas: those of one pod by node group, and under the empty name, "
            "those of all other new objects together. None: the namespace had no quota when the job was planned."
        ),
    ] = None
    pod_group_api: Annotated[
        str | None,
        Field(
            max_length=317,
            description="API version of the PodGroup that the pods name. None: the pods name no PodGroup.",
        ),
    ] = None
    topology_key: Annotated[
        str | None,
        Field(
            max_length=317,
            description="Label that has the same value on all nodes of the pods, as the PodGroup requires. None: the "
            "PodGroup does not require it.",
        ),
    ] = None
    new_nodes: Annotated[
        int | None,
        Field(
            ge=1,
            description="Number of pods for which an autoscaler must add nodes. None: the nodes existed when the job "
            "was planned.",
        ),
    ] = None
    start_timeout_s: Annotated[
        float | None,
        Field(
            gt=0, description="Start time-out of a plan that needs new nodes, if the job sets none; None: the default."
        ),
    ] = None
    provisioning_class: Annotated[
        str | None,
        Field(max_length=253, description="Class of the ProvisioningRequest for the new nodes; None: there is none."),
    ] = None
    admission: Annotated[
        QueueAdmission | None,
        Field(description="Kueue's admission, under which the pods run. None: the pods run without Kueue."),
    ] = None
    least_nodes: Annotated[
        int | None,
        Field(ge=1, description="Smallest number of pods that Kueue may admit. None: Kueue must admit all pods."),
    ] = None
    failures: Annotated[
        FailureRecord | None,
        Field(
            exclude=True,
            description="Counted failures, for failure rules about conditions. The ConfigMap has this record under "
            "its own key.",
        ),
    ] = None
    _stored: dict[str, str] | None = PrivateAttr(None)
    """The ConfigMap's data from which ``parse`` made the plan; None for a new plan."""

    @model_validator(mode="after")
    def _groups_have_requests(self) -> Self:
        groups = {rank.group for rank in self.plan.ranks}
        if groups != self.cpu_m.keys():
            raise ValueError(
                f"cpu_m (CPU request by node group): found the node groups {sorted(self.cpu_m)}; expected "
                f"{sorted(groups)}, as in the plan"
            )
        return self

    @property
    def revision(self) -> str:
        """Return the revision: a text that identifies the pods of this plan.

        It changes with the fields of the spec on which the plan depends, with each replacement of the plan, and with
        each admission by Kueue. All pods of the old revision stop before pods of a new revision start.
        """
        found = f"{self.spec_digest}-{self.replans}" if self.replans else self.spec_digest
        if self.admission is None:
            return found
        # An admission may change the number of pods and where they may run.
        admitted = json.dumps([self.plan.number, self.admission.model_dump(mode="json")], sort_keys=True)
        return f"{found}-q{hashlib.sha256(admitted.encode()).hexdigest()[:8]}"

    @property
    def groups(self) -> tuple[PodGroup, ...]:
        """Return the groups of pods (one StatefulSet each) that run the plan's ranks, in rank order."""
        return tuple(
            PodGroup(
                name, ranks[0].device, ranks[0].gpu, nodes, len(ranks) // nodes, self.cpu_m[name], self.memory_of(name)
            )
            for name, ranks, nodes in ranks_by_group(self.plan)
        )

    def memory_of(self, group: str) -> int:
        """Return the memory request in bytes of each pod of a group, unless the spec sets it."""
        return min(self.memory_nbytes, (self.memory_by_group or {}).get(group, self.memory_nbytes))

    @property
    def least_memory_nbytes(self) -> int:
        """Return the memory request in bytes of the pods that request least."""
        return min(group.memory_nbytes for group in self.groups)

    @property
    def nodes(self) -> int:
        return len(self.plan.pods)

    @property
    def node_domain(self) -> Domain:
        """Return the part of the cluster on whose nodes the pods may run, as a Domain made from the field ``domain``.

        If ``domain`` is None, the result includes all nodes. Only ``terms`` of the result are set. Its description,
        network and prices have their defaults, because the stored plan does not contain them.
        """
        return Domain(
            terms=tuple(tuple(Requirement(r.key, r.operator, r.values) for r in term) for term in self.domain or ())
        )

    def accepted_spec(self) -> DLJobSpec | None:
        """Return the spec for which the plan was made, to compare it with the present spec of the job.

        The plan stores only the fields on which it depends. The others, whose changes take effect without a new plan,
        have their default values in the result. Return None if the plan contains no spec, or one that is not valid for
        this release.
        """
        try:
            return None if self.spec is None else DLJobSpec.model_validate(self.spec, extra="ignore")
        except ValidationError:
            return None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the fields in ``update`` changed.

        If ``update`` is not empty, ``data`` serializes the fields of the copy. Otherwise, if the original was parsed,
        ``data`` of the copy returns the texts that were parsed.
        """
        copy = super().model_copy(update=update, deep=deep)
        if update:
            copy._stored = None
        return copy

    def with_term(self, term: int) -> Self:
        """Return the plan with another term, a number that the operator raises when it fences a lost node.

        If the plan was parsed, ``data`` returns the parsed texts with only the term changed, so that running agents
        find no other difference.
        """
        changed = self.model_copy(update={"plan": self.plan.model_copy(update={"term": term})})
        if self._stored is not None:
            document = json.loads(self._stored[dlcontract.PLAN_KEY]) | {"term": term}
            text = json.dumps(document, separators=(",", ":"))
            changed._stored = {**self._stored, dlcontract.PLAN_KEY: text}
        return changed

    def with_failures(self, failures: FailureRecord | None) -> Self:
        """Return the plan with another record of failures; None: without a record.

        Nothing else changes in the data that ``data`` returns.
        """
        if failures == self.failures:
            return self
        changed = self.model_copy(update={"failures": failures})
        changed._stored = self._stored
        return changed

    def data(self) -> dict[str, str]:
        """Return the data (key → text) of the ConfigMap in which the plan is stored. ``parse`` reads it.

        If ``parse`` made this plan, return the texts that it read, with the present record of failures. They must not
        be serialized again: an upgraded operator might write them in another form, and running agents would then
        receive a changed plan.
        """
        failures = {} if self.failures is None else {dlcontract.FAILURES_KEY: self.failures.model_dump_json()}
        if self._stored is not None:
            return dict(self._stored) | failures
        mine = self.model_dump(
            mode="json", by_alias=True, exclude={"plan": True, "status": {"groups"}}, exclude_none=True
        )
        return {
            dlcontract.PLAN_KEY: self.plan.to_json(),
            OPERATOR_KEY: json.dumps(mine, sort_keys=True, separators=(",", ":")),
        } | failures

    @classmethod
    def parse(cls, data: Mapping[str, str]) -> "StoredPlan":
        """Parse the ConfigMap's data, in the form that ``data`` returns. Raise ValueError for any other form.

        Plans are immutable. The result for the same short texts may therefore be the same object.
        """
        data = dict(data.items())  # once, because the cache has packed them
        if (problem := data.get(PROBLEM_KEY)) is not None:
            raise ValueError(problem)
        missing = [key for key in (dlcontract.PLAN_KEY, OPERATOR_KEY) if key not in data]
        if missing:
            raise ValueError(f"plan ConfigMap: found the keys {sorted(data)}; expected also {' and '.join(missing)}")
        texts = data[dlcontract.PLAN_KEY], data[OPERATOR_KEY]
        found = _parsed_once(*texts)
        return found.with_failures(_failures(data.get(dlcontract.FAILURES_KEY)))

    @classmethod
    def _parsed(cls, plan_text: str, operator_text: str) -> Self:
        mine: Any = json.loads(operator_text)
        if not isinstance(mine, dict):
            raise ValueError(f"{OPERATOR_KEY}: found {type(mine).__name__}; expected an object")  # noqa: TRY004
        plan = dlcontract.Plan.parse(plan_text, ignore_unknown=True)
        if isinstance(mine.get("status"), dict):
            mine["status"]["groups"] = _plan_groups(plan)
        mine.pop("failures", None)  # They have a key of their own.
        found = cls.model_validate({**mine, "plan": plan}, extra="ignore")
        found._stored = {dlcontract.PLAN_KEY: plan_text, OPERATOR_KEY: operator_text}
        return found


_KNOWN: dict[tuple[str, str], StoredPlan] = {}  # by their texts, the oldest first


def _parsed_once(plan_text: str, operator_text: str) -> StoredPlan:
    """Return the plan with these texts. Store it for the next call if it is small."""
    texts = plan_text, operator_text
    if (known := _KNOWN.get(texts)) is not None:
        return known
    found = StoredPlan._parsed(*texts)
    if sum(map(len, texts)) <= PARSED_NCHARS and len(found.plan.ranks) <= PARSED_NRANKS:
        while len(_KNOWN) >= MAX_PARSED:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        _KNOWN[texts] = found
    return found


def _failures(text: str | None) -> FailureRecord | None:
    """Parse the record of failures from its JSON text.

    Return None if there is no text, or if it is invalid because somebody has edited it.
    """
    try:
        return None if text is None else FailureRecord.parse(text)
    except ValidationError:
        return None


def _plan_groups(plan: dlcontract.Plan) -> tuple[PlanGroup, ...]:
    """Return the entries of ``status.plan.groups`` for a trainer's plan: nodes of one device type, with their ranks."""
    return tuple(
        PlanGroup(
            name=name,
            device=ranks[0].device,
            nodes=nodes,
            ranks=len(ranks),
            batch_per_rank=tuple(rank.share for rank in ranks),
        )
        for name, ranks, nodes in ranks_by_group(plan)
    )


def spec_digest(spec: DLJobSpec) -> str:
    """Return a digest of the fields of the spec on which plan and pods depend.

    Plan and pods need not change if the digest of a changed spec is the same.

    Fields with their default values are left out, because a release that adds a field with a default must not change
    the digests of existing jobs. A default must therefore never change.
    """
    manifest = planned_fields(spec)
    return f"{DIGEST_VERSION}-{hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]}"
