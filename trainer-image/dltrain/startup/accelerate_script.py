"""Start the script of an ``accelerate launch`` command as one rank, with the environment that Accelerate gives to it.

A rank runs ``python accelerate_script.py OPTIONS train.py ARGS``. The Accelerate of the image reads the options and the
configuration file. It believes that it starts two processes on one machine. In their place, this program replaces
itself by the script. The number of ranks, their addresses and their GPUs stay those of the plan.

This program must run in the Python of any image. It therefore needs the standard library of Python 3.8 and Accelerate
only, and imports nothing of dltrain.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from typing import Any, Dict, List, NoReturn  # noqa: UP035 - Python 3.8 cannot subscribe the built-in types

EXIT_BAD_INPUT = 64
"""As in dlcontract."""
PLANNED: Dict[str, Any] = {  # noqa: UP006
    "num_machines": 1, "machine_rank": 0, "num_processes": 2, "main_process_ip": "127.0.0.1", "main_process_port": 0,
    "gpu_ids": "all", "max_restarts": 0, "rdzv_backend": "static", "rdzv_conf": "", "mpirun_hostfile": None,
    "deepspeed_hostfile": None, "deepspeed_multinode_launcher": "standard",
}  # fmt: skip
"""Values with which Accelerate starts processes on this machine alone. Two, as it refuses ``--multi_gpu`` for one."""
RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables that the agent has set for this rank. Those of Accelerate would be wrong."""
UNSUPPORTED = ("tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher")


class Started(BaseException):
    """Accelerate would start the processes now, with the variables ``env``. Its ``except Exception`` let this pass."""

    def __init__(self, env: Dict[str, str]) -> None:  # noqa: UP006
        super().__init__()
        self.env = env


def environment(launch: Any, args: Any) -> Dict[str, str]:  # noqa: UP006
    """Return the environment that Accelerate gives to the processes of a script.

    ``launch``: the module ``accelerate.commands.launch``. ``args``: the options that its parser has read. They are
    changed. Raise ValueError if Accelerate starts the script in another way, and any error that Accelerate raises.
    """
    import torch.distributed.run

    def popen(command: Any, env: Any = None, **others: Any) -> NoReturn:
        raise Started(dict(env or os.environ))

    def run(args: Any) -> NoReturn:
        raise Started(dict(os.environ))

    def refuse(*args: Any) -> NoReturn:
        raise ValueError("a TPU or Amazon SageMaker, which a job does not use; expected CPUs or GPUs. Remove it")

    for name, value in PLANNED.items():
        setattr(args, name, value)
    # Accelerate takes the other values from its configuration file.
    args.nondefault = {*getattr(args, "nondefault", ()), *PLANNED}
    replaced = types.SimpleNamespace(Popen=popen, CalledProcessError=subprocess.CalledProcessError)
    launch.subprocess, torch.distributed.run.run = replaced, run
    for name in UNSUPPORTED:
        setattr(launch, name, refuse)
    try:
        launch.launch_command(args)
    except Started as started:
        return started.env
    raise ValueError("an Accelerate that starts processes in another way; expected torchrun or one process")


def main(arguments: List[str]) -> NoReturn:  # noqa: UP006
    """Replace this process by the script of ``accelerate launch`` with these ``arguments``."""
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        from accelerate.commands import launch
    except ImportError as error:
        _refuse(f"no Accelerate in the image ({error}); expected it. Install it, or start the script with torchrun")
    try:
        args = launch.launch_command_parser().parse_args(arguments)
    except SystemExit as end:  # The parser has printed what is wrong, or its help.
        if end.code in (0, None):
            raise
        _refuse("options that the installed version does not have; expected those above. Correct the command")
    given = sorted({"--" + name for name in getattr(args, "nondefault", ()) if name in PLANNED})
    if given and is_first:
        _say(f"trainer.command: found {', '.join(given)}; these options have no effect, because the plan sets them")
    if not is_first:
        logging.disable(logging.WARNING)  # Accelerate warns of options that the command lacks. One rank is enough.
    own = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
    try:
        env = environment(launch, args)
    except Exception as error:  # noqa: BLE001 - Accelerate raises errors of several kinds about options and files
        _refuse(f"{error}")
    logging.disable(logging.NOTSET)
    for name in RANK_VARIABLES:
        env.pop(name, None)
    env.update(own)
    command = [args.training_script, *args.training_script_args]
    if not args.no_python:
        command = [sys.executable, "-u", *(["-m"] if args.module else []), *command]
    sys.stdout.flush()
    os.execvpe(command[0], command, env)


def _refuse(found: str) -> NoReturn:
    _say(f"trainer.command: accelerate launch: found {found}")
    sys.exit(EXIT_BAD_INPUT)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
