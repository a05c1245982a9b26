"""Task: decisions from predictions, that is, the choice of a placement and whether it meets a deadline.

Candidates of one decision have about the same global batch (within a factor of the square root of 2 of a power of 2),
and are compared by seconds per sample.
"""

from dataclasses import dataclass

import numpy as np
from benchmarks.perfmodel.formats.pollux_data import Key
from benchmarks.perfmodel.scoring.scoring import Floats

SLACK = (1.2, 1.5, 2.0, 3.0)
"""Deadlines, as multiples of the time of the fastest candidate."""


@dataclass(frozen=True)
class Candidates:
    """Of one workload; an array element a key."""

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


def missed(found: Candidates, measured_s: Floats, predicted_s: Floats, sure_s: Floats) -> tuple[Floats, Floats]:
    """Of every deadline: whether it was missed (1 or 0), and by how many per cent device time exceeded the least one's.

    Chosen is the candidate of the least predicted device time per sample among those whose ``sure_s`` meets the
    deadline, or the surest one. Overspending counts where the deadline was met.
    """
    late, excess = list[float](), list[float]()
    for group in found.groups:
        time, sure, said = (x[group] / found.samples[group] for x in (measured_s, sure_s, predicted_s))
        cost = time * found.devices[group]
        for slack in SLACK:
            deadline = slack * time.min()
            meets = np.flatnonzero(sure <= deadline)
            at = meets[np.argmin((said * found.devices[group])[meets])] if len(meets) else int(np.argmin(sure))
            late.append(float(time[at] > deadline))
            if time[at] <= deadline:
                excess.append(100 * (cost[at] / cost[time <= deadline].min() - 1))
    return np.array(late), np.array(excess)
