"""Main memory of the pods of a training script: what runs have shown, and what the next pods need at least."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dljob.perf.resources.memory import AGENT_NBYTES

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
class Split:
    """How the ranks of a run split a model. Runs with equal splits and batches need equal memory.

    ``parts``: ranks of each replica. ``checkpoints``: True if the run writes checkpoints, for which rank 0 gathers the
    state of the whole model.
    """

    parts: int
    replicas: int = 1
    micro_batches: int = 1
    checkpoints: bool = True


@dataclass(frozen=True)
class MemoryPoint:
    """What runs with equal ranks in a pod, local batch size, strategy and split have shown about the memory of a pod.

    ``batch``: largest local batch size in the pod, of a micro-batch; None: the script decides it. All amounts are in
    bytes. ``peak_nbytes``: the most that a pod needed; None: not measured. ``sufficient_nbytes``: the least memory of a
    pod with which a run was complete. ``insufficient_nbytes``: the most with which pods reached their limit and the job
    failed, since the last complete run. ``split``: None without model parallelism. ``parts_nbytes``: the most that a
    rank with each part of the model needed, in the order of parts; empty if it is unknown for one of them.
    """

    ranks: int
    batch: int | None = None
    strategy: str = "Data"
    peak_nbytes: int | None = None
    sufficient_nbytes: int | None = None
    insufficient_nbytes: int | None = None
    split: Split | None = None
    parts_nbytes: tuple[int, ...] = ()

    @property
    def place(self) -> tuple[int, int | None, str, Split | None]:
        return self.ranks, self.batch, self.strategy, self.split

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

    def with_ranks(self, ranks: int) -> "MemoryPoint":
        """Return the point for pods with ``ranks`` ranks, from what ranks with each part of a split model needed.

        A pod has consecutive ranks, and rank r has part r modulo the number of parts. All pods request the same, so
        that the pod whose ranks need the most counts. Return this point itself if pods have as many ranks, or if the
        need of a part is unknown.
        """
        parts = self.parts_nbytes
        if ranks == self.ranks or not parts:
            return self
        whole, rest = divmod(ranks, len(parts))
        firsts = {pod * ranks % len(parts) for pod in range(len(parts))}
        most = max(sum(parts[(first + i) % len(parts)] for i in range(rest)) for first in firsts)
        peak = AGENT_NBYTES + whole * sum(parts) + most
        return MemoryPoint(ranks, self.batch, self.strategy, peak, split=self.split, parts_nbytes=parts)


def remembered(points: Sequence[MemoryPoint], new: MemoryPoint) -> tuple[MemoryPoint, ...]:
    """Return the stored points after another run, which ``new`` describes; the most recent one is the last.

    A run that goes on or failed has no ``sufficient_nbytes``: its peak counts if it is larger than the stored one.
    """
    others = [point for point in points if point.place != new.place]
    unknown = MemoryPoint(new.ranks, new.batch, new.strategy, split=new.split)
    old = next((point for point in points if point.place == new.place), unknown)
    complete = new.sufficient_nbytes is not None
    peak = _later(old.peak_nbytes, new.peak_nbytes, complete=complete)
    parts = new.parts_nbytes or old.parts_nbytes
    if len(old.parts_nbytes) == len(new.parts_nbytes):
        pairs = zip(old.parts_nbytes, new.parts_nbytes, strict=True)
        parts = tuple(_later(*pair, complete=complete) or 0 for pair in pairs)
    insufficient = None if complete else _largest(old.insufficient_nbytes, new.insufficient_nbytes)
    least = max(peak or 0, (insufficient or 0) + 1)
    enough = [each for each in (old.sufficient_nbytes, new.sufficient_nbytes) if each is not None and each >= least]
    found = replace(
        unknown,
        peak_nbytes=peak,
        sufficient_nbytes=min(enough, default=None),
        insufficient_nbytes=insufficient,
        parts_nbytes=parts,
    )
    return (*others, found)[-MAX_POINTS:]


def _later(old: int | None, new: int | None, *, complete: bool) -> int | None:
    """Return a stored peak after a run with the peak ``new``."""
    if complete and old is not None and new is not None:
        return max(new, int(DECAY * old))
    return _largest(old, new)


def _largest(*amounts: int | None) -> int | None:
    return max((each for each in amounts if each is not None), default=None)


def amounts_nbytes(
    points: Sequence[MemoryPoint],
    ranks: int,
    batch: int | None,
    strategy: str,
    process_nbytes: int,
    split: Split | None = None,
) -> tuple[int, ...]:
    """Return the amounts of memory in bytes to give a pod at least, those to prefer first; empty if none is known.

    ``ranks``, ``batch``, ``split``: as in a point. ``process_nbytes``: memory of a rank that does not depend on its
    batch. Runs with another split do not count: they show nothing about the memory of these parts.

    The need of a run with as many ranks and samples counts. Otherwise, one with more bounds the need from above, so
    that the smallest such amount is preferred. If no node has as much, it is scaled down, but not below the need of
    runs with fewer. Without a run with more, the need of runs with fewer is scaled up. If no node has that much, the
    need is not scaled by the batch, and at last not by the ranks: a script's data may depend on neither, and a pod that
    ends at its limit gets more memory.

    The need is scaled linearly with the ranks of a pod, and with the batch in the part above the processes. After an
    insufficient amount, there are several amounts, as after pods that reached their limit.
    """
    known = _with_ranks([p for p in points if (p.strategy, p.split) == (strategy, split)], ranks)
    above = [p for p in known if p.ranks >= ranks and _covers(p.batch, batch) and p.needed_nbytes]
    below = [p for p in known if p.ranks <= ranks and _covers(batch, p.batch)]
    own = next((p.needed_nbytes for p in below if p.place == (ranks, batch, strategy, split)), 0)
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


def complete_run_nbytes(
    points: Sequence[MemoryPoint], ranks: int, batch: int | None, strategy: str, split: Split
) -> int | None:
    """Return the memory in bytes that a pod needs, with a margin, if a run with the same split was complete.

    The arguments are as in a point. Return None if no such run was measured, or if one with as much memory failed.
    """
    complete = [p for p in points if p.peak_nbytes and p.sufficient_nbytes and not p.insufficient_nbytes]
    place = ranks, batch, strategy, split
    return next((p.needed_nbytes for p in _with_ranks(complete, ranks) if p.place == place), None)


def _with_ranks(points: Sequence[MemoryPoint], ranks: int) -> list[MemoryPoint]:
    """Return the points, and those that follow from them for pods with ``ranks`` ranks (``MemoryPoint.with_ranks``)."""
    places = {point.place for point in points}
    moved = [point.with_ranks(ranks) for point in points]
    return [*points, *(point for point in moved if point.place not in places)]


def _covers(larger: int | None, smaller: int | None) -> bool:
    """Return True if a batch of ``larger`` samples is not smaller. Unknown batches are those of the same script."""
    return larger is None or smaller is None or larger >= smaller


def _scaled(point: MemoryPoint, ranks: int, batch: int | None, process_nbytes: int) -> int:
    needed, fixed = point.needed_nbytes, min(point.needed_nbytes, point.ranks * process_nbytes)
    factor = 1.0 if batch is None or point.batch is None else batch / point.batch
    return int((fixed + factor * (needed - fixed)) * ranks / point.ranks)
