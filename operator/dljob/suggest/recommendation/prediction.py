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


LIBRARIES_NBYTES = 600 * 2**20
"""Memory of a process on this machine beyond the planner's figure, which is for the trainer image.

PyTorch's CUDA build maps its libraries. Measured as peak RSS of small trainings: 955 MB, with 426 MiB predicted.
"""


def predicted(
    manifest: Mapping[str, Any], view: ClusterView, data_nbytes: int = 0, *, here: bool = False
) -> Prediction:
    """Return the prediction for the manifest of a DLJob on the nodes of ``view``.

    ``data_nbytes``: memory that the data takes in the process. ``here``: True for a process on this machine. Raise
    ValueError for an invalid manifest.
    """
    answer = recommend(parse_job(manifest), view, {}).answer
    if not isinstance(answer, Decision):
        return Prediction(problem=answer.message)
    found = answer.chosen.prediction
    memory = found.memory_nbytes + data_nbytes + (LIBRARIES_NBYTES if here else 0)
    return Prediction(answer.chosen.summary, found.total_s, memory, found.energy_J, found.cost_usd)
