"""How far the times of equal runs are apart. A prediction from one earlier run cannot be surer than that.

Equal runs differ where devices are shared or their clocks change, as on virtual machines: there, runs of the same plan
took 1.1 times as long as before at the median (benchmarks/predictions/__main__.py). Such differences are a property of
the devices and their neighbours, not of the model, so the profiles of all models on a device type count together.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, log, sqrt
from statistics import fmean

from dljob.calibrate.learned import Learned, Repeats
from dljob.perf.step.step import SPREAD

MAX_RUNS = 20
"""Maximum number of repeats of a profile that count. Older ones count less, because neighbours come and go."""
ASSUMED_RUNS = 4
"""Number of repeats that the assumed deviation (``SPREAD``) counts as, besides the measured ones."""
MOST = 1.0
"""Largest logarithm of a ratio that counts as such. Runs that differ more were disturbed by something else."""


def after(before: Repeats | None, times_s: Sequence[tuple[float, float]]) -> Repeats | None:
    """Return ``before`` with one more run that repeats earlier ones; unchanged if it repeats none.

    ``times_s``: for each rank, (stored computing seconds, those of the run) at the same batch and layout.
    """
    if not times_s:
        return before
    error = fmean(log(new / old) for old, new in times_s)
    if not isfinite(error):
        return before
    runs, deviation = (min(before.runs, MAX_RUNS - 1), before.deviation) if before else (0, 0.0)
    squares = runs * deviation**2 + min(abs(error), MOST) ** 2
    return Repeats(runs + 1, sqrt(squares / (runs + 1)))


def repeat_spread(device: str, learned: Mapping[tuple[str, str], Learned]) -> float:
    """Return the standard deviation of log(measured / predicted) of a time that earlier equal runs predict.

    It is the root mean square over all repeats on the device type, together with ``ASSUMED_RUNS`` assumed ones.
    ``learned``: measured constants by (model key, device type).
    """
    found = [known.repeats for (_, of), known in learned.items() if of == device and known.repeats is not None]
    runs = ASSUMED_RUNS + sum(each.runs for each in found)
    squares = ASSUMED_RUNS * SPREAD["profile"] ** 2 + sum(each.runs * each.deviation**2 for each in found)
    return sqrt(squares / runs)
