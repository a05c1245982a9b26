"""Measure the main memory that a pod needs: what the kernel cannot drop, and the peaks of its ranks between two looks.

The kernel's own peak of a cgroup (``memory.peak``, ``memory.max_usage_in_bytes``) counts page cache. A rank that reads
files therefore has a peak at the memory limit, however little it needs. The anonymous and shared memory of a cgroup has
no recorded peak, so it is sampled. The recorded peak of each rank (``VmHWM``) shows what a rank needed between two
samples. It counts mapped files, which the kernel can drop, so that the most that the rank has mapped is subtracted.
Locked pages (``unevictable``) are anonymous or shared already.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dltrain.host.cgroup import ROOT, numbers

PROC = Path("/proc")
_KERNEL = ("kernel_stack", "pagetables", "sec_pagetables", "percpu", "sock", "slab_unreclaimable")
"""Parts of the kernel's memory for a cgroup that it cannot drop, in cgroup v2."""


def held_nbytes(root: Path = ROOT) -> int | None:
    """Return the memory in bytes of this container that the kernel cannot drop, or None if it is unreadable.

    It is anonymous memory and shared memory (such as files in /dev/shm), also of processes that do not run any more.
    With cgroup v2, the kernel's own memory for the container is added. cgroup v1 does not tell it apart from caches.
    """
    with suppress(OSError, KeyError):
        found = numbers(root / "memory.stat")
        return found["anon"] + found["shmem"] + sum(found.get(name, 0) for name in _KERNEL)
    with suppress(OSError, KeyError):
        found = numbers(root / "memory" / "memory.stat")
        return found["total_rss"] + found["total_shmem"]
    return None


def recorded_peak_nbytes(root: Path = ROOT) -> int | None:
    """Return the largest memory in bytes that this container has ever had, with page cache; None if it is unreadable.

    Linux before 5.19 has no such value with cgroup v2.
    """
    for path in (root / "memory.peak", root / "memory" / "memory.max_usage_in_bytes"):
        with suppress(OSError, ValueError):
            return int(path.read_text())
    return None


class PodMemory:
    """The most memory that the pod has needed since the start of its ranks.

    A look takes 0.3 ms with one rank (measured with cgroup v1), and the agent looks twice a second.
    """

    def __init__(self, root: Path = ROOT, proc: Path = PROC) -> None:
        self._root, self._proc = root, proc
        self._mapped: dict[int, int] = {}
        """The most bytes of files that each rank had mapped, by process id."""
        self.peak_nbytes = 0
        """The most bytes so far; 0 if nothing could be read."""
        self.of_ranks: dict[int, int] = {}
        """The most bytes that each rank has needed, without mapped files, by process id. Pages that a fork shares with
        the agent's interpreter count for each rank. Child processes do not count."""

    def begin(self) -> None:
        """Forget the peaks of earlier ranks."""
        self._mapped.clear()
        self.of_ranks.clear()
        self.peak_nbytes = 0

    def look(self, pids: Iterable[int]) -> int:
        """Measure the memory while the ranks with these process ids run, and return the peak so far in bytes.

        Peaks of several ranks between two looks are added up, because ranks load and step at the same time. The result
        is at most the recorded peak of the container, which no part of it can exceed.
        """
        held = held_nbytes(self._root)
        if held is None:
            return self.peak_nbytes
        held += sum(map(self._above_now_nbytes, pids))
        if (most := recorded_peak_nbytes(self._root)) is not None:
            held = min(held, most)
        self.peak_nbytes = max(self.peak_nbytes, held)
        return self.peak_nbytes

    def _above_now_nbytes(self, pid: int) -> int:
        """Return by how many bytes the recorded peak of a process exceeds what it has now, without mapped files."""
        try:
            now = numbers(self._proc / str(pid) / "status")
            mapped = self._mapped[pid] = max(self._mapped.get(pid, 0), 1024 * now["RssFile:"])
            held = 1024 * (now["RssAnon:"] + now["RssShmem:"])
            above = max(0, 1024 * now["VmHWM:"] - mapped - held)
            self.of_ranks[pid] = max(self.of_ranks.get(pid, 0), held + above)
            return above
        except (OSError, KeyError):  # The process has ended.
            return 0
