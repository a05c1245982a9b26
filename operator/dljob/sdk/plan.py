"""The plan of a job that need not exist."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dljob.api import PlanStatus


@dataclass(frozen=True)
class Plan:
    """The plan that a job would get now, as ``dljob plan`` shows it."""

    document: Mapping[str, Any]
    """The JSON object that ``dljob plan --json`` prints, with the keys ``job``, ``plan``, ``warning``, ``infeasible``,
    ``unsupported`` and ``scaling``."""
    refusal: str | None = None
    """Why the manifest must not be applied to the existing job of its name; None if it may be applied."""
    unread: str | None = None
    """What the user may not read, and what the plan uses instead; None if the user may read all that it depends on."""

    @property
    def job(self) -> str:
        """Name of the job."""
        return str(self.document["job"])

    @property
    def feasible(self) -> bool:
        """True if the cluster can run the job."""
        return self.document["plan"] is not None

    @property
    def status(self) -> PlanStatus | None:
        """The plan with its predictions and candidates, in the type of ``Job.status.plan``. None if infeasible."""
        found = self.document["plan"]
        return None if found is None else PlanStatus.model_validate(found)

    @property
    def summary(self) -> str:
        """One line: the chosen nodes and algorithm, or the reason why there is no plan."""
        if (status := self.status) is not None:
            return next((each.summary for each in status.candidates if each.chosen), f"{status.nodes} nodes")
        found = self.document["infeasible"]
        return f"{found['reason']}: {found['message']}"

    @property
    def warning(self) -> str | None:
        found = self.document["warning"]
        return None if found is None else str(found)

    @property
    def scaling(self) -> list[dict[str, float]]:
        """Predictions by number of nodes: ``nodes``, ``ranks``, ``stepSeconds``, ``samplesPerSecond``, ``efficiency``.

        Empty if infeasible, or if there is no prediction.
        """
        return list(self.document["scaling"])
