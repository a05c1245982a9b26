"""Format ``pollux``: step times of 2 to 64 devices from the one-device curve and few probes.

Given are the times on one device; a model sees all keys of more devices, but only the values of its probes; all
other keys are scored. Both files of a workload are one set of keys.
"""

from pathlib import Path

import numpy as np

from proof.pollux_data import Key, Measurements, load
from proof.scoring import Floats, ape, mean, median, over_workloads, p90
from proof.table import Options, Table


def run(directory: Path, options: Options) -> list[Table]:
    """Scores of every workload below ``directory`` and their unweighted mean."""
    workloads = [w for w in load(directory, options.gpus_per_node) if options.wants(w.name)]
    if not workloads:
        raise ValueError(f"--only {','.join(options.only)}: no such workload below {directory}")
    errors = [ape(measured(w, list(w.multi)), no_communication(w, list(w.multi))) for w in workloads]
    rows = [
        (w.name, len(e), *(over_workloads([e], m, options.resamples) for m in (mean, median, p90)))
        for w, e in zip(workloads, errors, strict=True)
    ]
    total = (
        "mean",
        sum(map(len, errors)),
        *(over_workloads(errors, m, options.resamples) for m in (mean, median, p90)),
    )
    return [
        Table(
            "No communication: error of the step time, %", ("workload", "keys", "mean", "median", "p90"), (*rows, total)
        )
    ]


def measured(workload: Measurements, keys: list[Key]) -> Floats:
    return np.array([workload.multi[key].step_s for key in keys])


def no_communication(workload: Measurements, keys: list[Key]) -> Floats:
    """The one-device time of the key's batch, linear between measured batches: perfect scaling."""
    batches = sorted(workload.one)
    return np.interp([k.batch for k in keys], batches, [workload.one[b].step_s for b in batches])
