"""Times on a new device after probes were measured on it."""

from collections.abc import Mapping, Sequence

import numpy as np

from dljob.perf.fit.few_points import line
from dljob.perf.fit.fitting import Floats
from dljob.perf.fit.new_device import Point, Sheet, seconds


def with_probes(
    sheets: Mapping[str, Sheet], known: Mapping[Point, float], probes: Mapping[Point, float], asked: Sequence[Point]
) -> Floats:
    """``seconds`` with ``probes`` on the new device, and the best line through them where a workload has two batches.

    What other devices say of a batch and what the line through the probes says of it are two opinions that err for
    different reasons; their mean in the logarithm is taken. Errors as of ``seconds``.
    """
    found = seconds(sheets, {**known, **probes}, asked)
    for i, point in enumerate(asked):
        own = [(p.batch, t) for p, t in probes.items() if (p.device, p.workload) == (point.device, point.workload)]
        if len({b for b, _ in own}) >= 2:
            batches, times = (np.array(column, dtype=float) for column in zip(*own, strict=True))
            overhead, slope = line(batches, times)
            found[i] = float(np.sqrt(found[i] * (overhead + slope * point.batch)))
    return found
