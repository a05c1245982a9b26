"""Train with a sharded dataset, with a folder per rank in place of a disk per pod: ``sharded_ranks.py FOLDER [DEATHS]``.

Each rank writes FOLDER/out-RANK.npz: weights, accuracy, the blocks that it has, and the shards that it began with.
DEATHS are arguments of ``rank_that_dies.py``.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import dltrain.builtin.rank
import dltrain.data.sharded.dataset
from dlcontract import DatasetRef
from dltrain.train import session
from dltrain.train.trainer import Trainer

folder = Path(sys.argv.pop(1))
opened: list[dltrain.data.sharded.dataset.ShardedDataset] = []
open_sharded = dltrain.data.sharded.dataset.open_sharded
finish = session.finish


def open_own(ref: DatasetRef) -> Any:
    import os

    assert ref.path is not None
    path = folder / f"pod-{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}" / Path(ref.path).name
    opened.append(open_sharded(ref.model_copy(update={"path": str(path)})))
    return opened[-1]


def finish_and_write(trainer: Trainer) -> None:
    finish(trainer)
    (data,) = opened
    assert data.sampler is not None
    np.savez(
        folder / f"out-{trainer.rank}.npz",
        weights=np.concatenate([tensor.detach().numpy().ravel() for tensor in trainer.model.parameters()]),
        accuracy=trainer.outcome().accuracy or 0.0,
        present=np.array(data.file.present),
        home=np.array(data.sampler.home[data.sampler.nodes[trainer.rank]]),
        fetched_nbytes=data.file.fetched_nbytes,
        batch=data.sampler.batch,
    )


dltrain.data.sharded.dataset.open_sharded = open_own
session.finish = finish_and_write
if len(sys.argv) > 1:
    import support.trainer.bodies.faults.rank_that_dies  # noqa: F401 - it trains and exits
session.leave(dltrain.builtin.rank.main())
