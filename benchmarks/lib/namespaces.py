"""Emulate machines with network namespaces behind rate-limited links, and run mpirun over them. Needs root.

Each machine has its own namespace and host name (``m0``, ``m1``, …), so that Open MPI and dljob treat them as
different machines, and one interface on a shared switch. One token bucket shapes the traffic that leaves a machine,
another the traffic that the switch sends to it.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

INTERFACE = "eth0"
_SWITCH = "switch"
_BRIDGE = "bridge0"
_BURST_NBYTES = 32 * 2**10
"""Bytes that may pass at full speed after a pause: half a TCP segment as the kernel hands it down."""
_QUEUE_NBYTES = 2 * 2**20
"""Queue of a shaped link before it drops packets; larger than a sender's window."""


def available() -> str | None:
    """Return None if namespaces can be created here, else the reason why not."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"namespaces need {', '.join(missing)} (Debian: iproute2, util-linux)" if missing else None


@contextmanager
def machines(count: int, rate_Bps: float | None) -> Iterator[str]:
    """Create ``count`` machines on links of ``rate_Bps`` (None: unlimited). Yield the name for ``mpirun_on``."""
    name = f"dlbench{os.getpid()}-"
    made: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an ended benchmark leaves no namespaces
    try:
        for host in (_SWITCH, *hosts(count)):
            _do("ip", "netns", "add", name + host)
            made.append(name + host)
            _do("ip", "-n", name + host, "link", "set", "lo", "up")
        _do("ip", "-n", name + _SWITCH, "link", "add", "name", _BRIDGE, "type", "bridge")
        _do("ip", "-n", name + _SWITCH, "link", "set", _BRIDGE, "up")
        for i, host in enumerate(hosts(count)):
            here = ("-n", name + host)
            port = ("-n", name + _SWITCH)
            _do("ip", *here, "link", "add", INTERFACE, "type", "veth", "peer", "name", host, "netns", name + _SWITCH)
            _do("ip", *here, "addr", "add", f"10.77.0.{i + 1}/24", "dev", INTERFACE)
            _do("ip", *port, "link", "set", host, "master", _BRIDGE)
            _do("ip", *port, "link", "set", host, "up")
            _do("ip", *here, "link", "set", INTERFACE, "up")
            if rate_Bps is not None:
                shape = ("tbf", "rate", f"{round(8 * rate_Bps)}bit", "burst", str(_BURST_NBYTES))
                for where, device in ((here, INTERFACE), (port, host)):
                    _do("tc", *where, "qdisc", "add", "dev", device, "root", *shape, "limit", str(_QUEUE_NBYTES))
        yield name
    finally:
        for namespace in made:
            inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
            for process in inside.split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _do("ip", "netns", "del", namespace)


def hosts(count: int) -> list[str]:
    return [f"m{i}" for i in range(count)]


def address(rank: int) -> str:
    """Return the address of the machine that runs a rank."""
    return f"10.77.0.{rank + 1}"


def mpirun_on(name: str, count: int, variables: Sequence[str], mpirun: Path) -> list[str]:
    """Return a command prefix that runs a command as ``count`` ranks, one on each of ``name``'s machines.

    The environment variables ``variables`` are passed on to the ranks.
    """
    agent = f"{sys.executable} -S {Path(__file__).resolve()} {name}"
    settings = ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    exported = [word for variable in variables for word in ("-x", variable)]
    place = ["--host", ",".join(f"{host}:1" for host in hosts(count)), "--map-by", "node", "--bind-to", "none"]
    network = ["--prtemca", "prte_if_include", INTERFACE, "--mca", "btl_tcp_if_include", INTERFACE]
    command = [str(mpirun), "--allow-run-as-root", *settings, *network, *exported, *place, "-n", str(count)]
    return [*_inside(name, "m0"), *command]


def _inside(name: str, host: str) -> list[str]:
    script = 'hostname "$0" && exec "$@"'
    return ["ip", "netns", "exec", name + host, "unshare", "--uts", "sh", "-c", script, host]


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":  # called instead of ssh: NAME HOST COMMAND, a shell line
    name, host, *line = sys.argv[1:]
    os.execvp("ip", [*_inside(name, host), "sh", "-c", " ".join(line)])
