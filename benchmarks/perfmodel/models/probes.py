"""Predict times on a new device from probes on it and from other devices."""

from collections.abc import Mapping, Sequence

import numpy as np

from dljob.perf.fit.few_points import line
from dljob.perf.fit.fitting import Floats
from dljob.perf.fit.new_device import Point, Sheet, seconds


def with_probes(
    sheets: Mapping[str, Sheet], known: Mapping[Point, float], probes: Mapping[Point, float], asked: Sequence[Point]
) -> Floats:
    """Return ``seconds`` with ``probes`` on the new device, combined with a line through two probed batches.

    The prediction from other devices and the line through the probes have independent errors, so their geometric mean
    is returned. Errors as for ``seconds``.
    """
    found = seconds(sheets, {**known, **probes}, asked)
    for i, point in enumerate(asked):
        own = [(p.batch, t) for p, t in probes.items() if (p.device, p.workload) == (point.device, point.workload)]
        if len({b for b, _ in own}) >= 2:
            batches, times = (np.array(column, dtype=float) for column in zip(*own, strict=True))
            overhead, slope = line(batches, times)
            found[i] = float(np.sqrt(found[i] * (overhead + slope * point.batch)))
    return found
