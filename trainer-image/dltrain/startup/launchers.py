"""Commands that begin with a launcher: torchrun, accelerate launch or deepspeed. No I/O.

The agents of a job start one process for each rank, as a launcher does. With a launcher in the command, each of these
processes would start all ranks once more. The agent therefore starts the script of such a command itself.

This module must run in the Python of any image (``nested_launcher``). It therefore needs the standard library of Python
3.8 only, and imports nothing of dltrain.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Tuple  # noqa: UP035 - Python 3.8 cannot subscribe tuple

Command = Tuple[str, ...]  # noqa: UP006

_PLANNED = (
    "--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf",
    "--master-addr", "--master-port", "--max-restarts",
)  # fmt: skip
"""Options of torchrun that have no effect, because the plan or ``runPolicy.backoffLimit`` sets these values."""
_UNUSED = (
    "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir", "-r", "--redirects", "-t",
    "--tee", "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--local-addr",
    "--logs-specs", "--numa-binding", "--signals-to-handle", "--shutdown-timeout",
)  # fmt: skip
"""Options of torchrun about processes and output, which have no effect, because the agent manages both."""
_MODULE, _NO_PYTHON = ("-m", "--module"), ("--no-python",)
TORCHRUN_VALUES = (*_PLANNED, *_UNUSED)
TORCHRUN_FLAGS = ("--standalone", "--run-path", *_MODULE, *_NO_PYTHON)
_USE_ENV = ("--use-env",)
"""An option of torch.distributed.launch: the script gets its local rank as a variable alone, as with torchrun."""

ACCELERATE_PLANNED = (
    "--num-processes", "--num-machines", "--machine-rank", "--main-process-ip", "--main-process-port", "--rdzv-backend",
    "--rdzv-conf", "--max-restarts", "--gpu-ids",
)  # fmt: skip
"""Options of accelerate launch that have no effect, because the plan or ``runPolicy`` sets these values."""
_ACCELERATE_UNUSED = ("--monitor-interval", "--role", "-t", "--tee", "--log-dir")
_ACCELERATE_FLAGS = ("--multi-gpu", "--same-network", "-q", "--quiet", *_MODULE, *_NO_PYTHON)
_ACCELERATE_VARIABLES = {
    "--mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "--dynamo-backend": "ACCELERATE_DYNAMO_BACKEND",
    "--num-cpu-threads-per-process": "OMP_NUM_THREADS",
}
"""Options of accelerate launch whose value is that of an environment variable. Each has no other effect."""
_ACCELERATE_CPU = "--cpu"
_SIMPLE_PRECISIONS = ("no", "fp16", "bf16")
"""Values of --mixed-precision that need one variable. The precision fp8 has variables of its own."""
ACCELERATE_SCRIPT = Path(__file__).with_name("accelerate_script.py")
"""The program that asks the installed Accelerate what the other options and a configuration file mean."""

_TORCHRUN_MODULE, _LAUNCH_MODULE = "torch.distributed.run", "torch.distributed.launch"
_ACCELERATE_MODULE = "accelerate.commands.launch"
_ACCELERATE_CLI = ("accelerate.commands.accelerate_cli", "launch")
_ACCELERATE_PROGRAM = "accelerate-launch"


@dataclass(frozen=True)
class ScriptCommand:
    """The command that each rank runs in place of the user's command, which may begin with a launcher like torchrun.

    ``env``: environment variables that replace options of the launcher. ``overridden``: names of the launcher's options
    that have no effect, because the plan determines the same settings, such as the number of ranks.
    """

    command: Command
    env: Mapping[str, str] = field(default_factory=dict)
    overridden: Command = ()


def script_command(
    command: Command,
    which: Callable[[str], str | None] = lambda _: None,
    has_accelerate_config: Callable[[], bool] = lambda: False,
    local_rank: Callable[[], str] | None = None,
) -> ScriptCommand:
    """Return the command that each rank runs for the user's ``command``, which may begin with a launcher.

    If it begins with torchrun or accelerate launch, the result starts the script, by default with the Python
    interpreter in the launcher's folder. ``which``: returns the path of a program on the PATH, or None; it is called to
    find this folder. ``has_accelerate_config``: returns True if there is a default configuration file of Accelerate.
    ``local_rank``: returns the argument by which torch.distributed.launch tells a script its local rank. It depends on
    the installed PyTorch. With None, a command that needs it stays as it is, so that the Python of the rank replaces
    the launcher (``nested_launcher``). Raise ValueError for deepspeed, and for an option of torchrun that the agent
    does not support.
    """
    name = PurePath(command[0]).name if command else ""
    if name == "deepspeed":
        raise ValueError(
            f"trainer.command: found the launcher deepspeed, {_text(command)}; expected torchrun, as the plan decides "
            f"about nodes and ranks. Use {_text(_as_torchrun(command[1:]))}: the deepspeed library runs in the script"
        )
    if name == "torchrun":
        return _torchrun(command[1:], _python_beside(command[0], which))
    if name == "accelerate" and command[1:2] == ("launch",):
        return _accelerate(command[2:], _python_beside(command[0], which), has_accelerate_config)
    if name == _ACCELERATE_PROGRAM:
        return _accelerate(command[1:], _python_beside(command[0], which), has_accelerate_config)
    if name.startswith("python"):
        rest = command[2:] if command[1:2] == ("-u",) else command[1:]
        if rest[:1] == ("-m",) and rest[1:2]:
            if rest[1] == _TORCHRUN_MODULE:
                return _torchrun(rest[2:], command[0])
            if rest[1] == _LAUNCH_MODULE:
                return _distributed_launch(rest[2:], command, local_rank)
            if rest[1:3] == _ACCELERATE_CLI:
                return _accelerate(rest[3:], command[0], has_accelerate_config)
            if rest[1] == _ACCELERATE_MODULE:
                return _accelerate(rest[2:], command[0], has_accelerate_config)
    return ScriptCommand(command)


def _python_beside(launcher: str, which: Callable[[str], str | None]) -> str:
    """Return the path of the Python interpreter in the folder of a launcher, such as /venv/bin/torchrun.

    ``which``: returns the path of a program on the PATH, or None. If the folder is unknown, return ``python``. If there
    is no ``python``, but a ``python3``, as in many images, return that.
    """
    path = PurePath(launcher if "/" in launcher else which(launcher) or launcher)
    python = str(path.with_name("python")) if path.is_absolute() else "python"
    return f"{python}3" if which(python) is None and which(f"{python}3") is not None else python


def _torchrun(arguments: Command, python: str) -> ScriptCommand:
    options, rest = _parsed("torchrun", arguments, TORCHRUN_VALUES, TORCHRUN_FLAGS)
    overridden = tuple(name for name, _ in options if name in _PLANNED)
    return ScriptCommand(_started(options, rest, python), {}, overridden)


def _distributed_launch(arguments: Command, command: Command, local_rank: Callable[[], str] | None) -> ScriptCommand:
    """Return the command that replaces ``command``, torch.distributed.launch with these ``arguments``."""
    options, rest = _parsed(_LAUNCH_MODULE, arguments, TORCHRUN_VALUES, (*TORCHRUN_FLAGS, *_USE_ENV))
    overridden = tuple(name for name, _ in options if name in _PLANNED)
    names = {name for name, _ in options}
    if not names & set(_USE_ENV):
        if names & set(_NO_PYTHON):
            raise ValueError(
                f"trainer.command: found --no-python without --use-env for {_LAUNCH_MODULE}; expected both. Add "
                "--use-env, or use torchrun"
            )
        if local_rank is None:
            return ScriptCommand(command)
        rest = (rest[0], local_rank(), *rest[1:])
    return ScriptCommand(_started(options, rest, command[0]), {}, overridden)


def _accelerate(arguments: Command, python: str, has_config: Callable[[], bool]) -> ScriptCommand:
    """Return the command that replaces accelerate launch with these ``arguments``.

    A table has the usual options. From others and from a configuration file, each version of Accelerate makes its own
    variables, so that its own code is asked for them. This costs the import of Accelerate and torch at each start.
    """
    values = (*ACCELERATE_PLANNED, *_ACCELERATE_UNUSED, *_ACCELERATE_VARIABLES)
    options, rest = _split(arguments, values, (*_ACCELERATE_FLAGS, _ACCELERATE_CPU))
    precisions = [value for name, value in options if name == "--mixed-precision"]
    # With --cpu, accelerate launch does not read the default configuration file either.
    configured = (_ACCELERATE_CPU, "") not in options and has_config()
    if not rest or rest[0].startswith("-") or not set(precisions) <= set(_SIMPLE_PRECISIONS) or configured:
        return ScriptCommand((python, "-u", str(ACCELERATE_SCRIPT), *arguments))
    env = {_ACCELERATE_VARIABLES[name]: value for name, value in options if name in _ACCELERATE_VARIABLES}
    if "ACCELERATE_DYNAMO_BACKEND" in env:
        env["ACCELERATE_DYNAMO_BACKEND"] = env["ACCELERATE_DYNAMO_BACKEND"].upper()
    if (_ACCELERATE_CPU, "") in options:
        env["ACCELERATE_USE_CPU"] = "true"
    overridden = tuple(name for name, _ in options if name in ACCELERATE_PLANNED)
    return ScriptCommand(_started(options, rest, python), env, overridden)


def accelerate_configs(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths at which Accelerate looks for its default configuration file. ``env``: environment of a rank."""
    cache = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME", "~"), ".cache")  # noqa: PTH118
    folder = PurePath(env.get("HF_HOME") or PurePath(cache, "huggingface"), "accelerate")
    return tuple(str(folder / f"default_config.{suffix}") for suffix in ("yaml", "json"))


def _started(options: list[tuple[str, str]], rest: Command, python: str) -> Command:
    names = {name for name, _ in options}
    if names & set(_NO_PYTHON):
        return rest
    return (python, "-u", *(("-m",) if names & set(_MODULE) else ()), *rest)


def _parsed(
    launcher: str, arguments: Command, values: Command, flags: Command
) -> tuple[list[tuple[str, str]], Command]:
    """Split a launcher's arguments into its options, as (name with dashes, value), and the script with its arguments.

    ``values``, ``flags``: the names of the accepted options with a value and without one. Raise ValueError for any
    other option, or if there is no script.
    """
    options, rest = _split(arguments, values, flags)
    if not rest:
        raise ValueError(
            f"trainer.command: found {launcher} without a script; expected a script, as in {launcher} train.py. Add "
            "the script"
        )
    if rest[0].startswith("-"):
        raise ValueError(
            f"trainer.command: found the option {rest[0]} of {launcher}; expected options that the agent can "
            f"replace: {', '.join(sorted({*values, *flags}))}. Start the script without {launcher} (python "
            "train.py), and set the option's value in the script or in trainer.env"
        )
    return options, rest


def _split(arguments: Command, values: Command, flags: Command) -> tuple[list[tuple[str, str]], Command]:
    """Split arguments into the options at their beginning, as (name with dashes, value), and the rest.

    The rest begins with the script, or with the first option that is in neither ``values`` nor ``flags``. It is empty
    if there is no script, or if the last option lacks its value.
    """
    options: list[tuple[str, str]] = []
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        written, equals, value = arguments[at].partition("=")
        if written == "--":
            return options, arguments[at + 1 :]
        name = written.replace("_", "-")
        if name in values and not equals:
            at += 1
            if at == len(arguments):
                break
            value = arguments[at]
        elif name not in values and (name not in flags or equals):
            break
        options.append((name, value))
        at += 1
    return options, arguments[at:]


def _as_torchrun(arguments: Command) -> Command:
    """Return the torchrun command that replaces deepspeed with these ``arguments``, without deepspeed's own options.

    An error message suggests this command to the user. The value of an option is the next argument, unless the option
    contains ``=`` or is a flag without a value.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        alone = "=" in arguments[at] or arguments[at].startswith(("--no_", "--force", "--save_pid", "--enable_"))
        at += 1 if alone or arguments[at] in ("--module", "--bind_cores_to_rank") else 2
    return ("torchrun", *arguments[at:])


def _text(command: Command) -> str:
    return repr(" ".join(command)[:200])
