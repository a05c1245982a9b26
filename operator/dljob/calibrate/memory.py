"""Main memory of the pods of a training script: what runs have shown, and what the next pods need at least."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

MARGIN = 1.15
"""Factor on a measured peak. The peak is sampled, equal runs differ by some per cent (other samples, another order of
allocations), and a pod without room for the page cache of its libraries reads them again and again."""
ROOM_NBYTES = 64 * 2**20
"""Bytes that are added to a measured peak: the working set of mapped libraries, and with cgroup v1 the kernel's memory,
such as page tables and sockets. Both count against the limit but not in the peak, and matter in small pods."""
DECAY = 0.9
"""Factor by which a complete run that needed less lowers a stored peak at most. The key of a script does not contain
all that its memory depends on, such as its environment, so that one large run must not count for ever, and one small
run must not undo a large one."""
MORE_MEMORY = (2.0, 1.5, 1.25)
"""Factors on the memory of pods that reached their limit, in the order in which the planner tries them."""
MAX_POINTS = 8
"""Maximum number of stored points of a script on a type of device. The least recent ones are dropped."""


@dataclass(frozen=True)
class MemoryPoint:
    """What runs with equal ranks in a pod, local batch size and strategy have shown about the memory of a pod.

    ``batch``: largest local batch size in the pod, of a micro-batch; None: the script decides it. All amounts are in
    bytes. ``peak_nbytes``: the most that a pod needed; None: not measured. ``sufficient_nbytes``: the least memory of a
    pod with which a run was complete. ``insufficient_nbytes``: the most with which pods reached their limit and the job
    failed, since the last complete run.
    """

    ranks: int
    batch: int | None = None
    strategy: str = "Data"
    peak_nbytes: int | None = None
    sufficient_nbytes: int | None = None
    insufficient_nbytes: int | None = None

    @property
    def place(self) -> tuple[int, int | None, str]:
        return self.ranks, self.batch, self.strategy

    @property
    def needed_nbytes(self) -> int:
        """Return the bytes that a pod like those of the runs needs; 0 if only an insufficient amount is known.

        It is the peak with a margin. If no peak is known, or if the run counts as one that needed all that it had
        because its peak was missed, it is what was enough for a complete run.
        """
        peak, enough = self.peak_nbytes or 0, self.sufficient_nbytes or 0
        return int(MARGIN * peak) + ROOM_NBYTES if peak and peak != enough else enough

    @property
    def without_margin(self) -> "MemoryPoint":
        """Return the point with which pods need no more than what was enough for a complete run.

        It is this point itself if no complete run has shown that less than the peak with its margin is enough.
        """
        peak, enough = self.peak_nbytes or 0, self.sufficient_nbytes
        if not peak or enough is None or enough >= self.needed_nbytes:
            return self
        return replace(self, peak_nbytes=None, sufficient_nbytes=max(peak, enough))


def remembered(points: Sequence[MemoryPoint], new: MemoryPoint) -> tuple[MemoryPoint, ...]:
    """Return the stored points after another run, which ``new`` describes; the most recent one is the last.

    A run that goes on or failed has no ``sufficient_nbytes``: its peak counts if it is larger than the stored one.
    """
    others = [point for point in points if point.place != new.place]
    old = next((point for point in points if point.place == new.place), MemoryPoint(*new.place))
    complete = new.sufficient_nbytes is not None
    peak = _largest(old.peak_nbytes, new.peak_nbytes)
    if complete and old.peak_nbytes is not None and new.peak_nbytes is not None:
        peak = max(new.peak_nbytes, int(DECAY * old.peak_nbytes))
    insufficient = None if complete else _largest(old.insufficient_nbytes, new.insufficient_nbytes)
    least = max(peak or 0, (insufficient or 0) + 1)
    enough = [each for each in (old.sufficient_nbytes, new.sufficient_nbytes) if each is not None and each >= least]
    return (*others, MemoryPoint(*new.place, peak, min(enough, default=None), insufficient))[-MAX_POINTS:]


def _largest(*amounts: int | None) -> int | None:
    return max((each for each in amounts if each is not None), default=None)


def amounts_nbytes(
    points: Sequence[MemoryPoint], ranks: int, batch: int | None, strategy: str, process_nbytes: int
) -> tuple[int, ...]:
    """Return the amounts of memory in bytes to give a pod at least, those to prefer first; empty if none is known.

    ``ranks``, ``batch``: as in a point. ``process_nbytes``: memory of a rank that does not depend on its batch.

    The need of a run with as many ranks and samples counts. Otherwise, one with more bounds the need from above, so
    that the smallest such amount is preferred. If no node has as much, it is scaled down, but not below the need of
    runs with fewer. Without a run with more, the need of runs with fewer is scaled up. If no node has that much, the
    need is not scaled by the batch, and at last not by the ranks: a script's data may depend on neither, and a pod that
    ends at its limit gets more memory.

    The need is scaled linearly with the ranks of a pod, and with the batch in the part above the processes. After an
    insufficient amount, there are several amounts, as after pods that reached their limit.
    """
    known = [point for point in points if point.strategy == strategy]
    above = [p for p in known if p.ranks >= ranks and _covers(p.batch, batch) and p.needed_nbytes]
    below = [p for p in known if p.ranks <= ranks and _covers(batch, p.batch)]
    own = next((p.needed_nbytes for p in below if p.place == (ranks, batch, strategy)), 0)
    least = max((p.needed_nbytes for p in below), default=0)
    if own:
        least = plain = scaled = own
    elif above:
        bound = min(above, key=lambda p: p.needed_nbytes)
        scaled = bound.needed_nbytes
        least = plain = min(scaled, max(least, _scaled(bound, ranks, batch, process_nbytes)))
    else:
        plain = max((p.needed_nbytes * ranks // p.ranks for p in below), default=0)
        scaled = max((_scaled(p, ranks, batch, process_nbytes) for p in below), default=0)
    found = [scaled, plain, least]
    tight = max((p.insufficient_nbytes or 0 for p in below), default=0)
    if tight:
        of_ranks = max((p.insufficient_nbytes or 0) * ranks // p.ranks for p in below)
        more = zip(found, MORE_MEMORY, (of_ranks, of_ranks, tight), strict=True)
        found = [max(needed, int(factor * amount)) for needed, factor, amount in more]
    return tuple(dict.fromkeys(each for each in found if each))


def _covers(larger: int | None, smaller: int | None) -> bool:
    """Return True if a batch of ``larger`` samples is not smaller. Unknown batches are those of the same script."""
    return larger is None or smaller is None or larger >= smaller


def _scaled(point: MemoryPoint, ranks: int, batch: int | None, process_nbytes: int) -> int:
    needed, fixed = point.needed_nbytes, min(point.needed_nbytes, point.ranks * process_nbytes)
    factor = 1.0 if batch is None or point.batch is None else batch / point.batch
    return int((fixed + factor * (needed - fixed)) * ranks / point.ranks)
