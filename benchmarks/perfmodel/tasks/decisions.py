"""Task: choose a placement from predictions, and decide if it meets a deadline.

Candidates of one decision have about the same global batch size (within a factor of the square root of 2 of a power of
2), and are compared by seconds per sample.
"""

from dataclasses import dataclass

import numpy as np
from benchmarks.perfmodel.formats.pollux_data import Key
from benchmarks.perfmodel.scoring.scoring import Floats

SLACK = (1.2, 1.5, 2.0, 3.0)
"""Deadlines, as multiples of the time of the fastest candidate."""


@dataclass(frozen=True)
class Candidates:
    """Candidates of one workload; arrays have one element per key."""

    samples: Floats
    devices: Floats
    groups: tuple[np.ndarray, ...]
    """Indices of the candidates of each decision."""


def candidates(keys: tuple[Key, ...]) -> Candidates:
    devices = np.array([k.devices for k in keys], dtype=float)
    samples = devices * np.array([k.batch for k in keys], dtype=float)
    octave = np.round(np.log2(samples))
    groups = tuple(np.flatnonzero(octave == o) for o in np.unique(octave))
    return Candidates(samples, devices, tuple(g for g in groups if len(g) > 1))


def missed(found: Candidates, measured_s: Floats, predicted_s: Floats, bound_s: Floats) -> tuple[Floats, Floats]:
    """Return for every deadline 1 if it was missed, else 0; and the excess device time over the minimum, per cent.

    The choice is the candidate with the smallest predicted device time per sample among those whose ``bound_s`` meets
    the deadline. If there is none, it is the candidate with the smallest ``bound_s``. The excess is returned only for
    deadlines that were met.
    """
    late, excess = list[float](), list[float]()
    for group in found.groups:
        time, bound, predicted = (x[group] / found.samples[group] for x in (measured_s, bound_s, predicted_s))
        cost = time * found.devices[group]
        for slack in SLACK:
            deadline = slack * time.min()
            meets = np.flatnonzero(bound <= deadline)
            at = meets[np.argmin((predicted * found.devices[group])[meets])] if len(meets) else int(np.argmin(bound))
            late.append(float(time[at] > deadline))
            if time[at] <= deadline:
                excess.append(100 * (cost[at] / cost[time <= deadline].min() - 1))
    return np.array(late), np.array(excess)
