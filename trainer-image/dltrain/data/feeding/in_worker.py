"""What a dataset finds in a data-loading worker in the place of the Trainer that its script calls ``t``."""

from dataclasses import dataclass
from typing import Any

from dlcontract import Plan


@dataclass(frozen=True)
class TrainerInWorker:
    """The values of a Trainer that do not change during a run.

    A dataset that a script defines may name the script's ``t``, to read its part of a stream. Workers get a copy of the
    dataset, but the Trainer has threads and connections of its rank.
    """

    rank: int
    size: int
    plan: Plan

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"t.{name}: found in a worker process, which makes samples; expected t.rank, t.size or t.plan. Use it in "
            "the training loop, or keep its value in the dataset"
        )
