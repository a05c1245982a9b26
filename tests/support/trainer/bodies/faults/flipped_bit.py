"""Run ``dltrain.builtin.rank``, but flip a bit of a parameter of rank 1 once. Arguments: the step and a marker file."""

import os
import sys
from pathlib import Path

import dltrain.builtin.rank
from dltrain.train import session
from dltrain.train.trainer import Trainer

step, marker = int(sys.argv[1]), Path(sys.argv[2])
after_update = Trainer._after_update


def flip_bit(trainer: Trainer) -> None:
    after_update(trainer)
    if trainer.step == step - 1:
        trainer.checkpoint_manager.wait()  # a checkpoint exists even if the volume is slow
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1" and trainer.step == step and not marker.exists():
        marker.touch()
        last = list(trainer.model.parameters())[-1].detach().numpy()
        last.view("int32")[0] ^= 1 << 12  # a lower bit could be lost by rounding before the comparison


Trainer._after_update = flip_bit  # type: ignore[method-assign]
session.leave(dltrain.builtin.rank.main())
