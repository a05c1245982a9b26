"""dltrain: data-parallel training over MPI in five lines of your own PyTorch script.

    t = dltrain.init()
    model, opt = t.wrap(model, opt)
    loader = t.loader(dataset)
    for x, y in t.steps(loader):
        loss = loss_function(model(x), y); loss.backward(); opt.step()

The same script runs with plain ``python``, with ``mpirun -n 2``, and in a DLJob (spec.trainer.command). Importing this
module is light; torch and MPI come with ``init``.
"""

from typing import TYPE_CHECKING

from dltrain import data

if TYPE_CHECKING:
    from dltrain.train.trainer import Trainer

__all__ = ["data", "init"]


def init(
    *,
    batch: int = 64,
    epochs: int = 10,
    seed: int = 0,
    collective: str = "Auto",
    checkpoints: str | None = None,
) -> "Trainer":
    """Join the other ranks of this run; call it once, before the model is made.

    The arguments are for runs without a manifest; in a DLJob the plan decides instead of them. ``batch``: samples of a
    step over all ranks. ``seed``: also of torch's, numpy's and Python's generators, so that all ranks make the same
    model and split data alike. ``collective``: Ring, MPI, Tree, Butterfly, HalvingDoubling or Torch; Auto measures them
    at the start. ``checkpoints``: a directory to save to and continue from.

    When the script ends, its ranks end together; an exception becomes the reason in the job's status.
    """
    from dltrain.train.script import init_script

    return init_script(batch=batch, epochs=epochs, seed=seed, collective=collective, checkpoints=checkpoints)
