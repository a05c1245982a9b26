"""An accepted plan with all that the operator needs to render and show it again, as kept in ``<job>-plan``.

``plan.json`` is for the agents, ``operator.json`` for the operator: after a restart it plans nothing anew.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

import dlcontract
from dljob.api import DLJobSpec, PlanStatus

OPERATOR_KEY = "operator.json"
_NOT_IN_DIGEST = ("suspend",)
_RUN_POLICY_NOT_IN_DIGEST = ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "nodeLostSeconds")


class StoredGroup(BaseModel):
    """One group of the plan, as its StatefulSet needs it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    device: str
    is_gpu: bool
    nodes: Annotated[int, Field(ge=1)]
    ranks_per_node: Annotated[int, Field(ge=1)]
    cpu_m: Annotated[int, Field(ge=1, description="CPU to request for a pod, in thousandths.")]


class StoredPlan(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: dlcontract.Plan
    status: PlanStatus
    groups: tuple[StoredGroup, ...]
    memory_nbytes: Annotated[int, Field(ge=1, description="Main memory of the largest pod.")]
    spec_digest: str
    replans: Annotated[int, Field(ge=0, description="Plans of this spec that measurements have replaced.")] = 0
    splitting_disabled: Annotated[
        bool, Field(description="Steps of this spec in parts of the model took too long: no plan has parts any more.")
    ] = False
    warning: str | None = None

    @property
    def revision(self) -> str:
        """What pods are made from: pods of another revision leave before those of this one start."""
        return f"{self.spec_digest}-{self.replans}" if self.replans else self.spec_digest

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    def data(self) -> dict[str, str]:
        """Data of the ConfigMap; ``parse`` reads it back."""
        mine = self.model_dump(mode="json", by_alias=True, exclude={"plan"}, exclude_none=True)
        return {
            dlcontract.PLAN_KEY: self.plan.to_json(),
            OPERATOR_KEY: json.dumps(mine, sort_keys=True, separators=(",", ":")),
        }

    @classmethod
    def parse(cls, data: Mapping[str, str]) -> Self:
        """Raises ValueError when the data are not what ``data`` wrote."""
        missing = [key for key in (dlcontract.PLAN_KEY, OPERATOR_KEY) if key not in data]
        if missing:
            raise ValueError(f"plan ConfigMap: found keys {sorted(data)}, expected {' and '.join(missing)} too")
        mine: Any = json.loads(data[OPERATOR_KEY])
        if not isinstance(mine, dict):
            raise ValueError(f"{OPERATOR_KEY}: found {type(mine).__name__}, expected an object")  # noqa: TRY004
        return cls.model_validate({**mine, "plan": dlcontract.Plan.parse(data[dlcontract.PLAN_KEY])})


def spec_digest(spec: DLJobSpec) -> str:
    """Digest of what a plan and its pods depend on: equal digests need no new plan and no new pods."""
    manifest = {key: value for key, value in spec.manifest().items() if key not in _NOT_IN_DIGEST}
    policy = manifest.get("runPolicy", {})
    manifest["runPolicy"] = {key: policy[key] for key in policy if key not in _RUN_POLICY_NOT_IN_DIGEST}
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
