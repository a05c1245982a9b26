"""Assign devices to waiting jobs one after another, and compare assignments by their completion times."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from dljob.scheduling.assignment.together import fastest_fitting, less
from dljob.scheduling.assignment.types import Choices, Jobs, Option


def in_order(jobs: Jobs, free: Mapping[str, int]) -> Choices:
    """Return the option of each job if one after another takes its fastest option that fits; None: none fits."""
    left, found = dict(free), list[Option | None]()
    for options in jobs:
        best = fastest_fitting(options, left)
        found.append(best)
        left = less(left, (best,))
    return tuple(found)


def total_s(jobs: Jobs, choices: Choices, free: Mapping[str, int]) -> float:
    """Return the predicted seconds from now until the end of each job, summed over all jobs.

    A job without a choice waits. It starts, in order, at the first end of another job after which one of its options
    fits. A job that never fits counts nothing: no choice changes its time.
    """
    left = less(free, choices)
    ends = [(choice.seconds, i, choice) for i, choice in enumerate(choices) if choice is not None]
    total, now_s = sum(seconds for seconds, _, _ in ends), 0.0
    heapify(ends)
    for i, options in enumerate(jobs):
        if choices[i] is not None or all(option.devices > free.get(option.device, 0) for option in options):
            continue
        while (best := fastest_fitting(options, left)) is None:
            now_s, _, ended = heappop(ends)
            left[ended.device] += ended.devices
        left[best.device] -= best.devices
        total += now_s + best.seconds
        heappush(ends, (now_s + best.seconds, i, best))
    return total
