"""Ask the planner what a training takes: the same planner, and the same performance model, as for any job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dljob.cluster import ClusterView
from dljob.job.plan.recommendation import parse_job, recommend
from dljob.planner import Decision


@dataclass(frozen=True)
class Prediction:
    """What the planner predicts for a training. ``problem``: why no plan is possible; empty if one is."""

    summary: str = ""
    time_s: float = 0.0
    memory_nbytes: int = 0
    energy_J: float | None = None
    cost_usd: float | None = None
    problem: str = ""


def predicted(manifest: Mapping[str, Any], view: ClusterView) -> Prediction:
    """Return the prediction for the manifest of a DLJob on the nodes of ``view``.

    Raise ValueError for an invalid manifest.
    """
    answer = recommend(parse_job(manifest), view, {}).answer
    if not isinstance(answer, Decision):
        return Prediction(problem=answer.message)
    found = answer.chosen.prediction
    return Prediction(answer.chosen.summary, found.total_s, found.memory_nbytes, found.energy_J, found.cost_usd)
