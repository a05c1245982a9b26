"""What the jobs of an assignment hold and need of each resource: devices of a type, and what quotas limit."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dljob.scheduling.assignment.types import Candidate, Choices, Held, Option, QuotaAmounts

Resource = str | tuple[str, int]
"""A device type, or (owner, index): what the entry of ``Candidate.allowed`` at this index limits for this owner."""
Amounts = Mapping[Resource, int]


@dataclass(frozen=True, slots=True)
class Resources:
    """What each job holds, and what it needs for its part. Each resource of a quota counts like a device type.

    ``held``: empty for a job that waits. ``needed``: empty for a job without a part. ``free``: what all of these jobs
    may have together, including what they hold.
    """

    held: tuple[Amounts, ...]
    needed: tuple[Amounts, ...]
    free: Amounts

    @classmethod
    def of(
        cls, jobs: Sequence[Candidate], held: Sequence[Held], parts: Choices, free: Mapping[str, int]
    ) -> "Resources":
        """Return the resources of jobs. ``free``: number of devices by type, including those that the jobs hold."""
        allowed = {(job.owner, i): most for job in jobs for i, most in enumerate(job.allowed)}
        return cls(
            tuple(dict(mine.devices) | _limited(job, mine.uses) for job, mine in zip(jobs, held, strict=True)),
            tuple({} if part is None else needs(job, part) for job, part in zip(jobs, parts, strict=True)),
            dict(free) | allowed,
        )

    def missing(self, moving: Collection[int], *, waiting: bool) -> dict[Resource, int]:
        """Return how much of each resource is missing if only the jobs ``moving`` (indices) move.

        ``waiting``: True if the waiting jobs also start on their parts.
        """
        used = Counter[Resource]()
        for i, (mine, part) in enumerate(zip(self.held, self.needed, strict=True)):
            if i not in moving:
                used.update(mine)
            if i in moving or (waiting and not mine):
                used.update(part)
        return {each: count - self.free.get(each, 0) for each, count in used.items() if count > self.free.get(each, 0)}

    def lacks_more(self, moving: Collection[int], than: Collection[int]) -> bool:
        """Return True if more is missing with the moves of the jobs ``moving`` than with those of the jobs ``than``.

        Devices of all types count together, and each resource of a quota for itself, because their units differ. The
        waiting jobs start on their parts.
        """
        more, less = (_by_unit(self.missing(each, waiting=True)) for each in (moving, than))
        return any(count > less[unit] for unit, count in more.items())

    def fitting(self, moving: Collection[int]) -> set[int]:
        """Return those of the jobs ``moving`` (indices) whose parts fit beside what all jobs hold that do not move."""
        fitting = set(moving)
        while missing := self.missing(fitting, waiting=False).keys():
            wrong = [i for i in fitting if not missing.isdisjoint(self.needed[i])]
            if not wrong:
                break  # Jobs hold more than there is, such as after the loss of a node.
            fitting.remove(max(wrong))
        return fitting

    def released(self, i: int, moving: Collection[int]) -> set[Resource]:
        """Return the resources of which others get more because job ``i`` moves.

        It releases a part of these. ``moving``: the jobs that move. If it moves for others that need quota, only what
        they lack without its move counts, because they need none of the devices that it also releases.
        """
        found = {each for each, count in self.held[i].items() if count > self.needed[i].get(each, 0)}
        lacking = found & self.missing(set(moving) - {i}, waiting=True).keys()
        return lacking if any(map(is_of_quota, lacking)) else {each for each in found if not is_of_quota(each)}

    def gets_more(self, i: int, of: Collection[Resource]) -> bool:
        """Return True if the part of job ``i`` needs more of one of these resources than the job holds."""
        return any(self.needed[i].get(each, 0) > self.held[i].get(each, 0) for each in of)

    def left_beside(self, i: int) -> Counter[Resource]:
        """Return what is left for job ``i`` beside what the other jobs hold, or get for their starts."""
        left = Counter(self.free)
        for j, (mine, part) in enumerate(zip(self.held, self.needed, strict=True)):
            if j != i:
                left.subtract(mine or part)
        return left


def needs(job: Candidate, option: Option) -> Amounts:
    """Return what a job needs for one of its options."""
    return {option.device: option.devices} | _limited(job, option.needs)


def is_of_quota(resource: Resource) -> bool:
    return not isinstance(resource, str)


def _limited(job: Candidate, amounts: QuotaAmounts) -> dict[tuple[str, int], int]:
    """Return those of the ``amounts`` that are not 0, and that the quotas of the job's owner limit."""
    return {(job.owner, i): n for i, (n, _) in enumerate(zip(amounts, job.allowed, strict=False)) if n > 0}


def _by_unit(amounts: Amounts) -> Counter[Resource]:
    """Return the sum of the devices of all types, as the resource '', and the amounts of the other resources."""
    found = Counter[Resource]()
    for resource, count in amounts.items():
        found[resource if is_of_quota(resource) else ""] += count
    return found
