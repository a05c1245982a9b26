"""Digits on all ranks, and shares that move before steps 5 and 20 where the first argument is ``move``."""

import sys

from dltrain.builtin import rank
from dltrain.train import session
from dltrain.train.trainer import Trainer

MOVES = {5: (90, 30), 20: (40, 80)}
after_update = Trainer._after_update


def moving(trainer: Trainer) -> None:
    after_update(trainer)
    if (shares := MOVES.get(trainer.step)) is not None:
        trainer.reshard(shares, "a test")


if sys.argv[1] == "move":
    Trainer._after_update = moving  # type: ignore[method-assign]
session.leave(rank.main())
