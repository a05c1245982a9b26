"""``dltrain.builtin.rank``, but the memory of rank 1 loses a bit of a parameter once: argument 1 is the step, 2 a marker file."""

import os
import sys
from pathlib import Path

import dltrain.builtin.rank
from dltrain.train import session
from dltrain.train.trainer import Trainer

step, marker = int(sys.argv[1]), Path(sys.argv[2])
after_update = Trainer._after_update


def forgetful(trainer: Trainer) -> None:
    after_update(trainer)
    if trainer.step == step - 1:
        trainer.checkpoint_manager.wait()  # there is something to go on from, however slow the volume
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1" and trainer.step == step and not marker.exists():
        marker.touch()
        last = list(trainer.model.parameters())[-1].detach().numpy()
        last.view("int32")[0] ^= 1 << 12  # the lowest one may be rounded away before anybody looks


Trainer._after_update = forgetful  # type: ignore[method-assign]
session.leave(dltrain.builtin.rank.main())
