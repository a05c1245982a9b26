"""Run the training of a DLJob on this machine, without a cluster: ``python -m dltrain.local``.

``mpirun -n 2 python -m dltrain.local`` runs it with two ranks.

    python -m dltrain.local --model gpt-mini --dataset python-source      a built-in model
    python -m dltrain.local train.py --augment                            an unchanged script for torchrun

Scripts that call ``dltrain.init`` do not need this command.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT

MASTER_PORT = 29500
"""Default value of ``MASTER_PORT``, the TCP port at which rank 0 awaits the other ranks, as in torchrun."""


def main(arguments: list[str]) -> int:
    """Run the script or the built-in model that the command line ``arguments`` name.

    Return 0 after a script, or EXIT_BAD_INPUT if the script cannot be started. A built-in model ends the process
    instead of returning.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dltrain.local", description="Run the training of a DLJob without a cluster."
    )
    parser.add_argument("script", nargs="?", help="a Python script written for torchrun")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.add_argument("--model", help="a built-in model, as in spec.model.name")
    parser.add_argument("--dataset", default=None, help="a built-in dataset, or a path; default: digits")
    parser.add_argument("--batch", type=int, default=64, help="global batch size; default: 64")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the dataset; default: 10")
    parser.add_argument("--optimizer", choices=("SGD", "Adam", "AdamW"), default="SGD", help="default: SGD")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="default: 0.05")
    parser.add_argument(
        "--collective", default="Auto", help="all-reduce algorithm, as in spec.collective; default: Auto, the fastest"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--checkpoints", help="a folder, or s3://BUCKET/PREFIX, to save checkpoints to and to resume from"
    )
    parser.add_argument("--report", help="a folder for the run report; default: beside the checkpoints, if any")
    given = parser.parse_args(arguments)
    if (given.script is None) == (given.model is None):
        parser.error("--model, SCRIPT: found both or neither; expected exactly one of them")
    if given.report is not None:
        os.environ["DLTRAIN_REPORT"] = given.report
    if given.script is None:
        _built_in(given)
    try:
        if not Path(given.script).is_file():
            raise BadInputError("script", given.script, "a Python file", "correct the path")
        variables = torchrun_variables(os.environ)
    except BadInputError as error:
        print(f"dltrain: BadInput: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_INPUT
    from dltrain.launch.zygote import Order, run

    os.environ.update(variables)
    run(Order((given.script, *given.arguments), dict(os.environ), str(Path.cwd())))
    return 0


def _built_in(given: argparse.Namespace) -> NoReturn:
    from dlcontract import ModelRef, OptimizerRef, Plan
    from dltrain.builtin import rank
    from dltrain.data.datasets import reference
    from dltrain.train import session

    def plan(ranks: int) -> Plan:
        return session.local_plan(
            ranks,
            batch=given.batch,
            epochs=given.epochs,
            seed=given.seed,
            collective=given.collective,
            checkpoints=given.checkpoints,
            model=ModelRef(name=given.model),
            dataset=reference(given.dataset or "digits"),
            optimizer=OptimizerRef(name=given.optimizer, learning_rate=given.learning_rate),
        )

    session.leave(session.run(rank.train, plan))


def torchrun_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank, derived from those of mpirun in ``env``.

    Variables of torchrun that are already in ``env`` keep their values. Raise BadInputError if mpirun spans several
    machines and ``MASTER_ADDR``, the address of rank 0, is not set.
    """
    size, here = env.get("OMPI_COMM_WORLD_SIZE", "1"), env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if size != here and "MASTER_ADDR" not in env:
        found = f"nothing, and {here} of {size} ranks on this machine"
        raise BadInputError("$MASTER_ADDR", found, "the address of rank 0", "set MASTER_ADDR: mpirun -x MASTER_ADDR=…")
    ours = {
        "RANK": env.get("OMPI_COMM_WORLD_RANK", "0"),
        "WORLD_SIZE": size,
        "LOCAL_RANK": env.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(MASTER_PORT),
    }
    return {name: env.get(name, value) for name, value in ours.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
