"""Format ``neusight``: one training iteration by GPU and workload, with the GPUs' data sheets in ``devices/*.json``.

Files ``*train_latency*.csv``: device, ``model-train-sequence-batch``, ms. Workloads on several devices (with a fifth
part in the name) are skipped.
"""

import csv
import json
import re
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.scoring.compare import dropped
from benchmarks.perfmodel.scoring.table import Options, Table
from benchmarks.perfmodel.tasks import new_device

from dljob.cluster.catalogue import vendor
from dljob.perf.fit.new_device import Sheet


def run(directory: Path, options: Options) -> list[Table]:
    """Score a left-out device without probes and with two."""
    complaints: list[str] = []
    found = sheets(directory, complaints)
    times = rows(directory, complaints)
    times = {key: s for key, s in times.items() if options.wants(key[0])}
    missing = sorted({d for d, _, _ in times} - set(found))
    complaints += [f"{d}: no data sheet devices/{d}.json" for d in missing]
    tables = new_device.tables(found, times, options, dropped(complaints))
    if not tables:
        raise ValueError(f"{directory}: fewer than three devices with times and a data sheet; expected three or more")
    return tables


def sheets(directory: Path, complaints: list[str]) -> dict[str, Sheet]:
    """Read data sheets by file name. ``SingleFLOPs`` or ``SingleFLOPsMM`` in GFLOP/s, ``Mem_Bw`` in GB/s."""
    found = {}
    for path in sorted(directory.rglob("devices/*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            peak = float(facts.get("SingleFLOPs") or facts["SingleFLOPsMM"])
            found[path.stem] = Sheet(1e9 * peak, 1e9 * float(facts["Mem_Bw"]), vendor(path.stem))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            complaints.append(f"{path.name}: malformed data sheet ({type(e).__name__}: {e})")
    return found


def rows(directory: Path, complaints: list[str]) -> dict[tuple[str, str, int], float]:
    """Read (device, model and sequence, batch) → seconds."""
    files = sorted(directory.rglob("*train_latency*.csv"))
    if not files:
        raise ValueError(f"{directory}: no *train_latency*.csv; expected NeuSight's measured iterations")
    found = {}
    for path in files:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                if number == 1:
                    continue
                name = re.fullmatch(r"(.+)-train-(\d+)-(\d+)(-.+)?", row[1]) if len(row) == 3 else None
                try:
                    seconds = float(row[2]) / 1e3 if name else np.nan
                except ValueError:
                    seconds = np.nan
                if name is None or not 0 < seconds < np.inf or int(name[3]) < 1:
                    complaints.append(f"{path.name} line {number}: {','.join(row)[:60]}")
                elif name[4] is None:
                    found[row[0], f"{name[1]}-{name[2]}", int(name[3])] = seconds
    return found
