"""Tests of what datasets may use of the Trainer in worker processes."""

import cloudpickle
import pytest

from dltrain.train.trainer import Trainer
from support.trainer.plans import make_plan


def test_dataset_that_names_the_trainer_reaches_workers() -> None:
    """Regression: "cannot pickle '_thread.lock' object", for a stream that reads its part by t.rank and t.size."""
    t = Trainer.__new__(Trainer)  # As a script has it, but without the ranks.
    t.rank, t.size, t.plan = 1, 3, make_plan(3)

    def part(count: int) -> list[int]:
        return list(range(t.rank, count, t.size))

    sent = cloudpickle.loads(cloudpickle.dumps(part))
    assert sent(9) == [1, 4, 7]

    def logs() -> None:
        t.log(loss=1.0)

    with pytest.raises(
        AttributeError, match=r"t\.log: found in a worker process.*; expected t\.rank, t\.size or t\.plan"
    ):
        cloudpickle.loads(cloudpickle.dumps(logs))()
