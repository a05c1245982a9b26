"""Measure the CPUs that other processes of the machine use while the probe computes on one core.

The kernel's account of CPU time in ``/proc/stat`` covers the whole machine, also in a container. What the probe's own
process did not use of it went to others: the kubelet, daemons, other pods, and other virtual machines of the host
(steal). Processes with a positive nice value are left out, because they give way to ranks.

The result is the lower quartile of several intervals. Plans leave these CPUs to others for as long as a job runs, so a
load of some seconds must not count. A probe often runs right after the installation of a cluster or of a node, whose
pods are then still starting.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

INTERVAL_S = 0.4
"""Minimum duration of an interval. The kernel counts CPU time in units of 10 ms."""
MIN_INTERVALS = 4
"""Minimum number of intervals for a result, so that one disturbance does not count."""
TOLERANCE = 0.2
"""Largest relative difference between the accounted and the elapsed CPU time of an interval, and largest number of CPUs
by which the probe's own use may exceed the accounted one. Some sandboxes show accounts that are not the machine's."""


@dataclass(frozen=True)
class Account:
    """CPU time in seconds that the kernel has counted since its start, as sums over its ``cpus`` CPUs.

    ``busy_s``: in processes, in interrupts, and stolen by the host. ``total_s``: the same and idle time.
    """

    busy_s: float
    total_s: float
    cpus: int


def account(text: str, unit_s: float, niced: bool = False) -> Account | None:
    """Return the account in the content of ``/proc/stat``, or None if it has another form.

    ``unit_s``: seconds of a unit. ``niced``: True if time with a positive nice value counts as busy; otherwise it
    counts as idle.
    """
    lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
    cpus = sum(line[0] != "cpu" for line in lines)
    try:
        # The last columns, guest and guest_nice, are parts of user and nice.
        user, nice, system, idle, iowait, irq, softirq, *rest = (int(word) for word in lines[0][1:])
    except (IndexError, ValueError):
        return None
    busy = user + system + irq + softirq + (rest[0] if rest else 0) + (nice if niced else 0)
    total = busy + idle + iowait + (0 if niced else nice)
    return Account(busy * unit_s, total * unit_s, cpus) if cpus else None


def covers_machine(stat: Path) -> bool:
    """Return False if another file system, such as LXCFS, replaces the file by an account of the container alone."""
    try:
        return stat.stat().st_dev == stat.parent.stat().st_dev
    except OSError:
        return False


class Background:
    """The CPUs that other processes use, from samples between which the probe computes in this process only.

    ``clock``, ``own``: functions that return the elapsed time, and the CPU time of this process, in seconds.
    """

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        clock: Callable[[], float] = time.perf_counter,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        self._stat, self._clock, self._own = stat, clock, own
        self._unit_s = 1 / os.sysconf("SC_CLK_TCK")
        self._niced = os.getpriority(os.PRIO_PROCESS, 0) > 0
        self._covers = covers_machine(stat)
        self._last: tuple[float, float, Account] | None = None
        self._others: list[float] = []

    def sample(self) -> None:
        """Read the account, if the last interval is long enough. Call this often, while the probe's steps run."""
        now_s = self._clock()
        if not self._covers or (self._last is not None and now_s - self._last[0] < INTERVAL_S):
            return
        try:
            found = account(self._stat.read_text(encoding="utf-8"), self._unit_s, self._niced)
        except OSError:
            found = None
        last, own_s = self._last, self._own()
        self._last = None if found is None else (now_s, own_s, found)
        if last is not None and found is not None:
            elapsed_s, (_, own_before_s, before) = now_s - last[0], last
            part = (found.total_s - before.total_s) / (elapsed_s * found.cpus)
            if abs(part - 1) <= TOLERANCE:
                self._others.append((found.busy_s - before.busy_s - (own_s - own_before_s)) / elapsed_s)

    def cores(self) -> float | None:
        """Return the number of CPUs that others used (the lower quartile), or None if it is unknown."""
        if len(self._others) < MIN_INTERVALS:
            return None
        found = quantiles(self._others, method="inclusive")[0]
        return None if found < -TOLERANCE else max(0.0, round(found, 3))
