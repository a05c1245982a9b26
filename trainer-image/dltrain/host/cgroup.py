"""Memory and CPU limits of the container, read from its cgroup, and the number of threads of a rank that follows.

``agent.member.local_ranks`` and ``train.session`` set the threads of ranks. Data-loading workers use one thread
(``data.feeding.worker``).
"""

import os
from contextlib import suppress
from math import floor
from pathlib import Path

from dlcontract import CPUS_VARIABLE

ROOT = Path("/sys/fs/cgroup")


def oom_kills(root: Path = ROOT) -> int | None:
    """Return how many processes of this container the kernel has killed for lack of memory, or None if unreadable.

    cgroup v2 has ``memory.events`` and v1 has ``memory/memory.oom_control``. Both contain a line ``oom_kill N``.
    """
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        try:
            text = path.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def free_nbytes(root: Path = ROOT, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the free memory in bytes, without swap, or None if it is unreadable.

    The result is the minimum of the free memory of the container (cgroup) and of the machine (``meminfo``).
    """
    found = []
    with suppress(OSError, KeyError):
        found.append(1024 * numbers(meminfo)["MemAvailable:"])
    for folder, limit, used, cached in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError, KeyError):  # ValueError: the limit is "max".
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            found.append(left + numbers(folder / "memory.stat")[cached])
    return min(found, default=None)


def numbers(path: Path) -> dict[str, int]:
    """Return {name: number} from a file with a name and a number on each line, such as /proc/meminfo."""
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def cpu_time_s(root: Path = ROOT) -> float | None:
    """Return the CPU time in seconds that this container has used since its start, or None if it is unreadable.

    It is read from cgroup v2 or, without cgroup v2, from v1.
    """
    with suppress(OSError, KeyError):
        return numbers(root / "cpu.stat")["usage_usec"] / 1e6
    with suppress(OSError, ValueError):
        return int((root / "cpuacct" / "cpuacct.usage").read_text()) / 1e9
    return None


def node_cpu_time_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Return the CPU time in seconds that the node's CPUs were busy since its start, or None if it is unreadable."""
    try:
        _name, user, nice, system, _idle, _iowait, irq, softirq, *_ = stat.read_text().splitlines()[0].split()
        return (int(user) + int(nice) + int(system) + int(irq) + int(softirq)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def cpu_quota(root: Path = ROOT) -> float:
    """Return the number of CPUs that this process may use: the minimum of its CPU affinity and its cgroup's quota.

    The quota is read from cgroup v2 or, without cgroup v2, from v1.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return cores if quota == "max" or int(quota) < 0 else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def threads(local_size: int) -> int:
    """Return the number of computing threads, at least 1, for each of ``local_size`` ranks that share the pod's CPUs.

    The CPU quota limits the number, because further threads would be throttled. The CPU request limits it too: a shared
    node guarantees no more, and threads that wait for each other are slow if one of them is not scheduled.
    If the environment variable OMP_NUM_THREADS has a number, return that number instead.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal() and int(asked):
        return int(asked)
    return max(1, floor(cpus(local_size)))


def cpus(local_size: int) -> float:
    """Return the number of CPUs, possibly a fraction, that each of ``local_size`` ranks of this pod can count on.

    The ranks divide the minimum of ``cpu_quota`` and, if the pod has one, the pod's CPU request.
    """
    found = cpu_quota()
    if requested_m := os.environ.get(CPUS_VARIABLE):
        found = min(found, int(requested_m) / 1000)
    return found / local_size
