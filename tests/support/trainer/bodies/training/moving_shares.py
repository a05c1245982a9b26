"""Train digits. If the first argument is ``move``, change the shares before steps 5 and 20."""

import sys

from dltrain.builtin import rank
from dltrain.train import session
from dltrain.train.trainer import Trainer

MOVES = {5: (90, 30), 20: (40, 80)}
after_update = Trainer._after_update


def update_and_move(trainer: Trainer) -> None:
    after_update(trainer)
    if (shares := MOVES.get(trainer.step)) is not None:
        trainer.reshard(shares, "a test")


if sys.argv[1] == "move":
    Trainer._after_update = update_and_move  # type: ignore[method-assign]
session.leave(rank.main())
