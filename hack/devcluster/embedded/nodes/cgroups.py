"""One cgroup per node, with its quota, for the unified hierarchy (v2) and the legacy hierarchies (v1).

kubelet puts its pods below the node's cgroup (`cgroupRoot`), so a limit here holds for all pods of the node.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Protocol

from devcluster.embedded.processes import identify, send
from devcluster.errors import ClusterError

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids", "hugetlb")


class Cgroups(Protocol):
    """Interface to the kernel's cgroups. `name`: path of a cgroup, such as `dljob-dev/n1`."""

    def create(self, name: str, cpus: float | None, memory_nbytes: int | None) -> None:
        """Create the cgroup and its parents, and set its limits. None: no limit."""

    def limit_cpus(self, name: str, cpus: float | None) -> None:
        """Set the CPU limit of an existing cgroup. None: no limit."""

    def trees(self, name: str) -> list[Path]:
        """Return the folders of this cgroup: one for cgroup v2, and one per hierarchy for cgroup v1."""


def detect(root: Path = ROOT) -> Cgroups:
    """Return the cgroup interface that this machine has. Raise ClusterError if it has none."""
    if (root / "cgroup.controllers").exists():
        return Unified(root)
    if (root / "cpu" / "cgroup.procs").exists():
        return Legacy(root)
    raise ClusterError(f"{root}: found no cgroup hierarchy; expected cgroup v2 or v1. Mount one of them at this path")


class Unified:
    """cgroup v2. It has one tree, in which each level enables controllers for the next level."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, name: str, cpus: float | None, memory_nbytes: int | None) -> None:
        folder = self._root
        for part in ("", *name.split("/")):
            folder = folder / part
            folder.mkdir(exist_ok=True)
            available = (folder / "cgroup.controllers").read_text().split()
            for controller in V2_CONTROLLERS:
                if controller in available:
                    (folder / "cgroup.subtree_control").write_text(f"+{controller}")
        if cpus is not None:
            self.limit_cpus(name, cpus)
        if memory_nbytes is not None:
            (folder / "memory.max").write_text(str(memory_nbytes))

    def limit_cpus(self, name: str, cpus: float | None) -> None:
        (self._root / name / "cpu.max").write_text(f"{'max' if cpus is None else quota_us(cpus)} {PERIOD_US}")

    def trees(self, name: str) -> list[Path]:
        folder = self._root / name
        return [folder] if folder.is_dir() else []


class Legacy:
    """cgroup v1. A cgroup has the same path in every hierarchy; several controllers may share a hierarchy."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def _hierarchies(self) -> list[Path]:
        found = {path.resolve() for path in self._root.iterdir() if (path / "cgroup.procs").exists()}
        return sorted(found)

    def create(self, name: str, cpus: float | None, memory_nbytes: int | None) -> None:
        for hierarchy in self._hierarchies():
            folder = hierarchy
            for part in name.split("/"):
                above, folder = folder, folder / part
                folder.mkdir(exist_ok=True)
                for needed in ("cpuset.cpus", "cpuset.mems"):  # a cpuset without these values accepts no process
                    if (above / needed).exists():
                        (folder / needed).write_text((above / needed).read_text().strip())
        if cpus is not None:
            self.limit_cpus(name, cpus)
        if memory_nbytes is not None:
            (self._root / "memory" / name / "memory.limit_in_bytes").write_text(str(memory_nbytes))

    def limit_cpus(self, name: str, cpus: float | None) -> None:
        (self._root / "cpu" / name / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._root / "cpu" / name / "cpu.cfs_quota_us").write_text(str(-1 if cpus is None else quota_us(cpus)))

    def trees(self, name: str) -> list[Path]:
        return [path / name for path in self._hierarchies() if (path / name).is_dir()]


def quota_us(cpus: float) -> int:
    """Return the CPU time in µs per period of PERIOD_US for `cpus` cores, at least the kernel's minimum of 1 ms."""
    return max(1000, round(cpus * PERIOD_US))


def remove(cgroups: Cgroups, name: str) -> None:
    """Kill the processes in the cgroup and remove the cgroup. Raise ClusterError if it cannot be removed."""
    deadline_s = time.monotonic() + 10
    while trees := cgroups.trees(name):
        for tree in trees:
            for folder, _, files in os.walk(tree, topdown=False):
                try:
                    if "cgroup.procs" in files:
                        _kill_all(Path(folder, "cgroup.procs"))
                    Path(folder).rmdir()
                except OSError:  # busy until the kernel has removed killed processes: retried below
                    continue
        if time.monotonic() > deadline_s:
            raise ClusterError(
                f"cgroup {trees[0]}: found it 10 s after its processes were killed; expected it to be removed. End "
                "the remaining processes, which its file cgroup.procs lists"
            )
        time.sleep(0.01)


def _kill_all(procs: Path) -> None:
    for line in procs.read_text().split():
        identity = identify(int(line)) if int(line) > 1 else None
        if identity:
            send(identity, signal.SIGKILL)
