"""Replace a launcher that a rank starts by the script of its command, such as torchrun in a shell script.

The agent replaces a launcher at the beginning of a job's command (``launchers``). It cannot see one in a shell script
or in a program. Each rank would then start all ranks once more. Launchers are Python programs, and each Python of a
rank calls this module when it starts (``path/sitecustomize.py``). Launchers that this module does not know, such as
``tune run`` of torchtune and ``fabric run`` of Lightning, call the function of torchrun that starts processes.

This module must run in the Python of any image. It therefore needs the standard library of Python 3.8 only, and imports
nothing of dltrain but its neighbor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

EXIT_BAD_INPUT = 64
"""As in dlcontract."""
_HINTS = (b"torchrun", b"torch.distributed", b"accelerate", b"deepspeed")
"""A command line without all of these is no launcher's. Most processes therefore import nothing more."""
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of Python whose value is the next argument."""
_PROGRAMS = {
    "torchrun": ("-m", "torch.distributed.run"),
    "accelerate": ("-m", "accelerate.commands.launch"),
    "accelerate-launch": ("-m", "accelerate.commands.launch"),
}


def replace_launcher(environ: Mapping[str, str], line: bytes | None = None) -> None:
    """Replace this process by a rank's script if it is a launcher. Return in any other process.

    ``environ``: the environment variables of this process. ``line``: its command line, with a zero byte after each
    word; None: that of the operating system. End the process with an error if the launcher or one of its options is not
    supported.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return
    if line is None:
        with open("/proc/self/cmdline", "rb") as file:  # noqa: PTH123 - pathlib takes longer to import
            line = file.read()
    if not any(hint in line for hint in _HINTS):
        return
    from . import launchers

    command = launcher_command(os.fsdecode(line).split("\0")[:-1])
    if command is None:
        return

    def has_config() -> bool:
        return any(os.path.isfile(path) for path in launchers.accelerate_configs(environ))  # noqa: PTH113

    try:
        script = launchers.script_command(
            command, has_accelerate_config=has_config, local_rank=lambda: _local_rank(environ)
        )
    except ValueError as error:
        _say(f"{error}")
        os._exit(EXIT_BAD_INPUT)  # Python is still starting, and would print a traceback of SystemExit.
    if script.command == command:
        return
    if script.overridden and environ["RANK"] == "0":
        _say(f"found {', '.join(script.overridden)}; these options have no effect, because the plan sets them")
    os.execvpe(script.command[0], script.command, {**environ, **script.env})


def replace_launches(environ: Mapping[str, str]) -> None:
    """Let the functions of torchrun that start processes replace this process by the script, if this is a rank.

    ``environ``: the environment variables of this process.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return
    from .imports import after_import

    def replace_run(module: Any) -> None:
        module.run = _run_once

    def replace_call(module: Any) -> None:
        launch = getattr(module, "elastic_launch", None)
        if launch is not None:
            launch.__call__ = _calls_once(launch.__call__)

    after_import("torch.distributed.run", replace_run)
    # ``runpy.run_module("torch.distributed.run")`` makes functions of its own, which call this one.
    after_import("torch.distributed.launcher.api", replace_call)


def _run_once(args: Any) -> None:
    """Run the script of ``args``, the options that torchrun has read, in place of this process."""
    local_rank = [] if getattr(args, "use_env", True) else [_local_rank(os.environ)]  # Of torch.distributed.launch.
    command = [args.training_script, *local_rank, *args.training_script_args]
    if not args.no_python:
        command = [sys.executable, "-u", *(["-m"] if args.module else []), *command]
    _execute(command)


def _calls_once(call: Any) -> Any:
    """Return the function in place of ``call``, which starts processes that run a command, or a function of Python."""

    def call_once(launch: Any, *args: Any) -> Any:
        program = getattr(launch, "_entrypoint", None)
        if not isinstance(program, str):
            return call(launch, *args)
        own = os.environ.get("LOCAL_RANK", "0")
        _execute([program, *(each.replace("${local_rank}", own) for each in args)])

    return call_once


def _execute(command: list[str]) -> NoReturn:
    """Replace this process by ``command``, the script of a program that would start it for each rank."""
    if os.environ["RANK"] == "0":
        _say(
            "found a program that starts processes with torchrun; expected the plan to set their number. Each rank "
            "runs its script once, and its options about processes have no effect"
        )
    sys.stdout.flush()
    os.execvp(command[0], command)


def _local_rank(environ: Mapping[str, str]) -> str:
    """Return the argument by which torch.distributed.launch tells a script its local rank.

    Its name has a dash since PyTorch 2.0, and an underscore before.
    """
    from importlib import metadata

    try:
        has_dash = int(metadata.version("torch").partition(".")[0]) >= 2
    except (metadata.PackageNotFoundError, ValueError):  # PyTorch was built from source, without metadata.
        has_dash = True
    return f"{'--local-rank' if has_dash else '--local_rank'}={environ.get('LOCAL_RANK', '0')}"


def launcher_command(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the launcher's command from the command line of a Python process; None if it is no launcher.

    The result begins with this interpreter and ``-m``, or with ``deepspeed``. ``words``: the interpreter, its options,
    the script or ``-m`` and a module, and their arguments.
    """
    at = 1
    while at < len(words) and words[at].startswith("-") and not words[at].endswith("m"):
        at += 2 if words[at] in _WITH_VALUE else 1
    rest = tuple(words[at:])
    if not rest:
        return None
    if rest[0].startswith("-"):  # -m or, with other options of one letter, such as -um.
        return (sys.executable, "-m", *rest[1:])
    name = os.path.basename(rest[0])  # noqa: PTH119 - pathlib takes longer to import
    if name == "deepspeed":
        return ("deepspeed", *rest[1:])
    if name not in _PROGRAMS or (name == "accelerate" and rest[1:2] != ("launch",)):
        return None
    return (sys.executable, *_PROGRAMS[name], *rest[2 if name == "accelerate" else 1 :])


def _say(line: str) -> None:
    sys.stderr.write(f"trainer.command: {line}\n" if not line.startswith("trainer.command") else f"{line}\n")
    sys.stderr.flush()
