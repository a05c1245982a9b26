"""An unmodified MPI program: it finds the other ranks through mpi4py alone, and sums gradients with allreduce.

mpirun -n 2 python examples/scripts/train_mpi4py.py
in a DLJob with spec.trainer.framework: MPI and spec.trainer.command: [python, train_mpi4py.py]
"""

import os
from pathlib import Path

import numpy as np
from mpi4py import MPI

STEPS, SAMPLES, SAVE_EVERY = int(os.environ.get("STEPS", "300")), int(os.environ.get("SAMPLES", "2048")), 50

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()

random = np.random.default_rng(0)
x = random.standard_normal((SAMPLES, 20))
y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).astype(float)
own_x, own_y = x[rank::size], y[rank::size]

folder = os.environ.get("DLJOB_CHECKPOINT_DIR")
saved = Path(folder) / "weights.npz" if folder else None
weights, begin = np.zeros(20), 0
if rank == 0 and saved is not None and saved.exists():  # After a restart, rank 0 reads what it saved.
    with np.load(saved) as found:
        weights, begin = found["weights"], int(found["step"])
weights, begin = world.bcast((weights, begin))
if rank == 0:
    print(f"resumed from step {begin}", flush=True)

for step in range(begin, STEPS):
    error = 1 / (1 + np.exp(-own_x @ weights)) - own_y
    gradient = own_x.T @ error
    world.Allreduce(MPI.IN_PLACE, gradient)
    weights -= 0.5 * gradient / len(x)
    if rank == 0 and saved is not None and (step + 1) % SAVE_EVERY == 0:
        saved.parent.mkdir(parents=True, exist_ok=True)
        with saved.with_suffix(".new").open("wb") as file:
            np.savez(file, weights=weights, step=step + 1)
        saved.with_suffix(".new").replace(saved)

right = world.allreduce(int(((own_x @ weights > 0) == (own_y > 0.5)).sum()))
if rank == 0:
    print(f"world size {size}, accuracy {right / len(x):.4f}", flush=True)
