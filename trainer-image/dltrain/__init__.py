"""dltrain: data-parallel training over MPI with five lines in your own PyTorch script.

    t = dltrain.init()
    model, opt = t.wrap(model, opt)
    loader = t.loader(dataset)
    for x, y in t.steps(loader):
        loss = loss_function(model(x), y); loss.backward(); opt.step()

The same script runs with plain ``python``, with ``mpirun -n 2``, and in a DLJob (spec.trainer.command). Importing this
module is cheap: ``init`` imports torch and starts MPI.

A script for another framework calls ``dltrain.report`` after its steps instead, which needs the standard library of
Python 3.8 only.
``dltrain.evaluate`` analyses predictions on held-out data for either.
"""

import sys
from typing import TYPE_CHECKING

# An injected agent shows dltrain to the Python of any image. These checks therefore precede all other imports.
if sys.version_info < (3, 8):  # noqa: UP036
    raise ImportError(
        "dltrain: found Python %d.%d; expected Python 3.8 or newer. Use an image with a newer Python, or remove the "  # noqa: UP031
        "import: scripts for torchrun and MPI programs also run without dltrain" % sys.version_info[:2]
    )
if sys.version_info < (3, 11):  # noqa: UP036
    from dltrain.reporting import older_python

    older_python.refuse_other_modules()

from dltrain import data
from dltrain.reporting.evaluation import evaluate
from dltrain.reporting.script_reports import busy, report, stop_requested

if TYPE_CHECKING:
    from os import PathLike

    from dltrain.train.trainer import Trainer

__all__ = ["busy", "data", "evaluate", "init", "report", "stop_requested"]


def init(
    *,
    batch: int = 64,
    epochs: int = 10,
    steps: "int | None" = None,
    seed: int = 0,
    collective: str = "Auto",
    checkpoints: "str | PathLike[str] | None" = None,
    precision: str = "FP32",
    activation_checkpointing: bool = False,
    strategy: str = "Data",
    deferred_init: bool = False,
) -> "Trainer":
    """Join the other ranks of this run. Call it once, before the script creates its model.

    The arguments apply only if the script runs without the operator, for example on a laptop. In a DLJob (the custom
    resource of a training), the operator's plan overrides them.

    ``batch``: global batch size, in samples. ``epochs``: number of passes over the dataset. ``steps``: number of steps,
    in place of ``epochs``. ``seed``: seeds the data order and the random generators of torch, numpy and Python, so that
    all ranks create the same model and split the data in the same way. ``collective``: the name of an all-reduce
    algorithm: Ring, MPI, Tree, Butterfly, HalvingDoubling, Torch, DDP, or Auto, which measures several at the start and
    uses the fastest. ``checkpoints``: a directory or ``s3://BUCKET/PREFIX`` to save checkpoints to and to resume from;
    None: save no checkpoints.
    ``precision``: FP32, BF16 or FP16, for ``t.autocast`` and ``t.grad_scaler``. ``activation_checkpointing``: True if
    the modules of ``t.checkpoint_activations`` keep only their inputs for the backward pass. ``strategy``: Data,
    Optimizer (sharded optimizer), Sharded (sharded parameters, gradients and optimizer, by PyTorch's fully_shard),
    Pipeline (each rank has some of the layers) or Tensor (each rank has a part of pairs of linear layers).
    ``deferred_init``: True if, with Sharded, ``t.create`` gives the model no memory until ``t.wrap``.

    When the script ends, all its ranks end together. An exception becomes the reason in the job's status.
    """
    try:
        from dltrain.train.script import init_script
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dltrain", "dlcontract"):
            raise
        raise ModuleNotFoundError(
            f"dltrain.init: found no package {error.name}; expected the packages that training with dltrain needs. "
            "Install dltrain in the image with its requirements, or build the image FROM the trainer image. "
            "dltrain.report needs no other package",
            name=error.name,
        ) from error

    return init_script(
        batch=batch,
        epochs=epochs,
        steps=steps,
        seed=seed,
        collective=collective,
        checkpoints=checkpoints,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        strategy=strategy,
        deferred_init=deferred_init,
    )
