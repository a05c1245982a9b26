"""Commands that begin with a launcher of MPI programs: mpirun, mpiexec or horovodrun. No I/O.

dljob starts mpirun itself, once for the job. With another mpirun in the command, each rank would start all ranks once
more. The ranks therefore run the program of such a command.
"""

import re
from collections.abc import Mapping
from pathlib import PurePath

from dltrain.startup.launchers import Command, ScriptCommand

MPI_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "horovodrun")

_PLANNED: Mapping[str, int] = {
    "n": 1, "np": 1, "c": 1, "N": 1, "npernode": 1, "npersocket": 1, "ppn": 1, "perhost": 1, "H": 1, "host": 1,
    "hosts": 1, "hostfile": 1, "machinefile": 1, "f": 1, "default-hostfile": 1, "map-by": 1, "rank-by": 1, "bind-to": 1,
    "with-ft": 1, "bynode": 0, "byslot": 0, "pernode": 0, "oversubscribe": 0, "nooversubscribe": 0,
}  # fmt: skip
"""Options of mpirun and mpiexec that have no effect, because the plan sets these values: name → number of values."""
_UNUSED: Mapping[str, int] = {
    "allow-run-as-root": 0, "v": 0, "verbose": 0, "q": 0, "quiet": 0, "tag-output": 0, "timestamp-output": 0,
    "report-bindings": 0, "display-map": 0, "display-allocation": 0, "display": 1, "output": 1, "output-filename": 1,
    "merge-stderr-to-stdout": 0, "launch-agent": 1, "personality": 1, "genvall": 0, "iface": 1,
}  # fmt: skip
"""Options of mpirun and mpiexec about output and daemons, which have no effect, because the agents manage both."""
_PARAMETERS: Mapping[str, str] = {"mca": "OMPI_MCA_", "gmca": "OMPI_MCA_", "omca": "OMPI_MCA_"}
"""Options whose two values are the name and the value of an Open MPI parameter: option → prefix of an environment
variable. The prefix and the parameter's name together are the variable that sets the parameter."""
_OTHER_PARAMETERS: Mapping[str, int] = {"prtemca": 2, "gprtemca": 2, "pmixmca": 2, "gpmixmca": 2}
_LAUNCH_PARAMETERS = re.compile(
    r"(pml|btl|mtl|btl_tcp_.*|btl_openib_.*|(plm|rmaps|ras|rml|oob|orte|prte|ess|odls)(_.*)?)"
)
"""Matches the parameters of Open MPI that the plan and the agents set: network, hosts and start of processes."""

_HOROVOD_PLANNED: Mapping[str, int] = {
    "np": 1, "num-proc": 1, "H": 1, "hosts": 1, "hostfile": 1, "p": 1, "ssh-port": 1, "i": 1, "ssh-identity-file": 1,
    "network-interface": 1, "network-interfaces": 1, "mpi": 0, "gloo": 0, "mpi-args": 1, "start-timeout": 1,
}  # fmt: skip
_HOROVOD_UNUSED: Mapping[str, int] = {
    "verbose": 0, "disable-cache": 0, "output-filename": 1, "prefix-output-with-timestamp": 0, "binding-args": 1,
}  # fmt: skip
_HOROVOD_VARIABLES: Mapping[str, str] = {
    "cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "timeline-filename": "HOROVOD_TIMELINE",
    "log-level": "HOROVOD_LOG_LEVEL",
}
"""Options of horovodrun → the environment variables from which the Horovod library reads the same values."""

_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh")
_IN_SHELL = re.compile(r"(?:^|[\s;&|(/])(mpirun|mpiexec|horovodrun)\s")


def mpi_script_command(command: Command) -> ScriptCommand | None:
    """Return the program that each rank runs for a command that begins with an MPI launcher; None for other commands.

    Raise ValueError for an unknown option of the launcher, for a launcher without a program or with several programs,
    and for a shell command that contains a launcher.
    """
    name = PurePath(command[0]).name if command else ""
    if name in _SHELLS and (inside := next(filter(None, map(_IN_SHELL.search, command[1:])), None)) is not None:
        raise ValueError(
            f"trainer.command: found {inside[1]} inside a shell command; expected the program alone, because dljob "
            f"starts each rank itself and every rank would start all ranks once more. Remove {inside[1]} and its "
            "options from the shell command"
        )
    if name == "horovodrun":
        return _unwrapped(name, command[1:], _HOROVOD_PLANNED, _HOROVOD_UNUSED)
    if name in MPI_LAUNCHERS or name.startswith(("mpirun.", "mpiexec.")):
        return _unwrapped(name, command[1:], _PLANNED, _UNUSED)
    return None


def _unwrapped(
    launcher: str, arguments: Command, planned: Mapping[str, int], unused: Mapping[str, int]
) -> ScriptCommand:
    horovod = launcher == "horovodrun"
    counts: dict[str, int] = {**planned, **unused}
    if horovod:
        counts |= dict.fromkeys((*_HOROVOD_VARIABLES, "fusion-threshold-mb"), 1)
    else:
        counts |= {"x": 1, "genv": 2, **dict.fromkeys(_PARAMETERS, 2), **_OTHER_PARAMETERS}
    env: dict[str, str] = {}
    overridden: list[str] = []
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
        written, equals, value = arguments[at].partition("=")
        name = written.lstrip("-")
        if name not in counts or (equals and counts[name] != 1):
            raise ValueError(_unknown(launcher, arguments[at], counts))
        values = (value,) if equals else arguments[at + 1 : at + 1 + counts[name]]
        at += 1 if equals else 1 + counts[name]
        if name == "x" or name == "genv":
            env |= _exported(values)
        elif name in _PARAMETERS and len(values) == 2 and not _LAUNCH_PARAMETERS.fullmatch(values[0]):
            env[_PARAMETERS[name] + values[0]] = values[1]
        elif name == "fusion-threshold-mb" and values:
            env["HOROVOD_FUSION_THRESHOLD"] = str(int(float(values[0]) * 2**20))
        elif horovod and name in _HOROVOD_VARIABLES and values:
            env[_HOROVOD_VARIABLES[name]] = values[0]
        elif name in planned or name in _OTHER_PARAMETERS:
            overridden.append(written)
        elif name in _PARAMETERS:
            overridden.append(" ".join((written, *values[:1])))
    program = arguments[at + 1 :] if arguments[at : at + 1] == ("--",) else arguments[at:]
    if not program:
        raise ValueError(
            f"trainer.command: found {launcher} without a program; expected a program, as in {launcher} python "
            "train.py. Add the program"
        )
    if ":" in program and not horovod:
        raise ValueError(
            f"trainer.command: found several programs after {launcher}, separated by ':'; expected one, because all "
            "ranks of a job run the same command. Choose the work of a rank in the program, by its rank"
        )
    return ScriptCommand(program, env, tuple(dict.fromkeys(overridden)))


def _exported(values: Command) -> dict[str, str]:
    """Return the environment variable that mpirun's option -x or -genv sets, as {name: value}.

    ``values``: the option's values, either (name, value) or ("name=value",). A name alone exports a variable that
    every rank has anyway, so the result is then empty.
    """
    if len(values) == 2:
        return {values[0]: values[1]}
    name, equals, value = values[0].partition("=") if values else ("", "", "")
    return {name: value} if equals else {}


def _unknown(launcher: str, option: str, counts: Mapping[str, int]) -> str:
    return (
        f"trainer.command: found the option {option} of {launcher}; expected options that the plan can replace: "
        f"{', '.join(sorted(counts))}. Start the program without {launcher} (python train.py), and set the option's "
        "value in the program or in trainer.env"
    )
