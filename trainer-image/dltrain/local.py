"""What a DLJob runs, on this machine: ``python -m dltrain.local``, alone or under ``mpirun -n 2``, without a cluster.

    python -m dltrain.local --model gpt-mini --dataset python-source      a built-in model
    python -m dltrain.local train.py --augment                            a script for torchrun, as it is

Scripts with ``dltrain.init`` need nothing in front of them.
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
"""torchrun's own choice."""


def main(arguments: list[str]) -> int:
    """Returns the exit code once a script has ended; with a built-in model the process ends here."""
    parser = argparse.ArgumentParser(prog="python -m dltrain.local", description="A DLJob's training, without cluster.")
    parser.add_argument("script", nargs="?", help="a Python script that torchrun could run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.add_argument("--model", help="a built-in model, as spec.model.name")
    parser.add_argument("--dataset", default=None, help="a built-in dataset, or a path; default: digits")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step over all ranks; default: 64")
    parser.add_argument("--epochs", type=int, default=10, help="default: 10")
    parser.add_argument("--optimizer", choices=("SGD", "Adam", "AdamW"), default="SGD", help="default: SGD")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="default: 0.05")
    parser.add_argument("--collective", default="Auto", help="as spec.collective; default: Auto, the fastest measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", help="a folder to save to, and to continue from")
    given = parser.parse_args(arguments)
    if (given.script is None) == (given.model is None):
        parser.error("found both or neither of --model and a script, expected one of them")
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
    """What torchrun tells a script, from what mpirun tells its ranks; what is set already stays.

    Raises BadInputError when mpirun spans machines and nobody says where rank 0 listens.
    """
    size, here = env.get("OMPI_COMM_WORLD_SIZE", "1"), env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if size != here and "MASTER_ADDR" not in env:
        found = f"nothing, and {here} of {size} ranks on this machine"
        raise BadInputError("$MASTER_ADDR", found, "the address of rank 0", "set it: mpirun -x MASTER_ADDR=…")
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
