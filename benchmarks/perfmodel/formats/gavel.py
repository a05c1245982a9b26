"""Format ``gavel``: one device over the batch size, 2 → 4 and 8 devices, a left-out device, and uneven splits."""

from pathlib import Path

import numpy as np
from benchmarks.perfmodel.formats.gavel_data import SPREAD, Rates, load
from benchmarks.perfmodel.models.growth import Pair, on_devices
from benchmarks.perfmodel.scoring.compare import compared, dropped
from benchmarks.perfmodel.scoring.scoring import Floats, ape
from benchmarks.perfmodel.scoring.table import Options, Table
from benchmarks.perfmodel.tasks import new_device, one_device, splits

from dljob.cluster.catalogue import gpu, vendor
from dljob.perf.fit.new_device import Sheet

COUNTS = (4, 8)


def run(directory: Path, options: Options) -> list[Table]:
    """Return four kinds of tables. ``--only`` names devices as in the file."""
    rates = load(directory)
    rates.step_s = {key: s for key, s in rates.step_s.items() if options.wants(key[0])}
    note = dropped(rates.complaints)
    curves = rates.curves()
    tables = [one_device.table(curves, options, note)] if any(len(c) >= 4 for c in curves.values()) else []
    tables += [table for device in rates.devices() for table in _scaling(rates, device, options)]
    together = {(d, w): c for (d, w), c in curves.items() if not d.endswith(SPREAD)}
    sheets, unknown = _sheets({d for d, _ in together})
    rows = {(d, w, b): s for (d, w), c in together.items() for b, s in c.items() if d in sheets}
    tables += new_device.tables(sheets, rows, options, unknown)
    tables += splits.tables(together, options)
    if not tables:
        raise ValueError(
            f"{directory}: found nothing to score; expected four batch sizes, two worker counts or three devices"
        )
    return tables


def _sheets(devices: set[str]) -> tuple[dict[str, Sheet], str]:
    """Return the data sheets of devices in the catalogue, and a note on the others."""
    found = {name: gpu(name) for name in sorted(devices)}
    sheets = {
        name: Sheet(d.fp32_FLOPs, d.memory_bandwidth_Bps, vendor(name)) for name, d in found.items() if d is not None
    }
    missing = sorted(set(found) - set(sheets))
    return sheets, f"not in the catalogue: {', '.join(missing)}" if missing else ""


def _scaling(rates: Rates, device: str, options: Options) -> list[Table]:
    """Score larger counts from the times on one and two devices; one table per count, with workloads as groups."""
    one, two = rates.curves(1), rates.curves(2)
    tables = []
    complaints = []
    for count in COUNTS:
        errors: dict[str, dict[str, Floats]] = {"model": {}, "ring, added": {}, "as on two": {}}
        for (_, workload), times in ((k, v) for k, v in rates.curves(count).items() if k[0] == device):
            singles, pairs = one.get((device, workload), {}), two.get((device, workload), {})
            batches = sorted(set(times) & set(singles) & set(pairs))
            if not batches:
                continue
            known = [Pair(b, singles[b], pairs[b]) for b in batches]
            measured = np.array([times[b] for b in batches])
            try:
                predicted = on_devices(known, count)
            except ValueError as e:
                complaints.append(f"{workload}: {e}")
                continue
            t1, t2 = np.array([p.one_s for p in known]), np.array([p.two_s for p in known])
            ring = 2 * (count - 1) / count
            errors["model"][workload] = ape(measured, predicted)
            errors["ring, added"][workload] = ape(measured, t1 + np.maximum(t2 - t1, 0.0) * ring)
            errors["as on two"][workload] = ape(measured, t2)
        if errors["model"]:
            title = f"{device}: {count} devices from one device and one probe on two"
            tables.append(compared(title, errors, options, dropped(complaints)))
    return tables
