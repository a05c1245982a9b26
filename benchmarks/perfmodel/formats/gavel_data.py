"""Read the throughputs of the Gavel artifact (OSDI 2020) as step times.

The files are JSON: ``{device: {"('Model (batch size b)', n)": {"null": steps/s}}}``. The batch size is per worker, and
the rate is summed over n workers, so a step takes n / rate. Entries of pairs (space sharing) are skipped.
"""

import ast
import json
import re
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from dljob.perf.fit.fitting import agreeing

SPREAD = "_unconsolidated"
"""Suffix of a device whose workers were spread over nodes."""


@dataclass
class Rates:
    """Step seconds by device, workload, batch size and workers, and the reasons for skipped entries."""

    step_s: dict[tuple[str, str, int, int], float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def devices(self) -> list[str]:
        return sorted({device for device, *_ in self.step_s})

    def curves(self, workers: int = 1) -> dict[tuple[str, str], dict[int, float]]:
        """Return (device, workload) → batch size → seconds with ``workers`` workers."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        for (device, workload, batch, n), seconds in sorted(self.step_s.items()):
            if n == workers:
                found.setdefault((device, workload), {})[batch] = seconds
        return found


def load(directory: Path) -> Rates:
    """Read every throughput file below ``directory``. Raise ValueError if there is none or one is malformed."""
    rates = Rates()
    for path in sorted(directory.rglob("*throughputs*.json")):
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{path}: not JSON ({e}); expected Gavel's throughputs") from None
        if not isinstance(table, dict) or not all(isinstance(v, dict) for v in table.values()):
            raise ValueError(f"{path}: expected an object of devices, each an object of workloads")
        for device, entries in table.items():
            for name, entry in entries.items():
                _add(rates, device, name, entry)
    if not rates.step_s:
        raise ValueError(f"{directory}: no *throughputs*.json with step rates; expected Gavel's measurements")
    for workers in sorted({n for *_, n in rates.step_s}):
        _drop_absurd(rates, workers)
    return rates


def _drop_absurd(rates: Rates, workers: int) -> None:
    """Drop measurements that contradict most other batch sizes of their curve."""
    for (device, workload), curve in rates.curves(workers).items():
        for (batch, seconds), agrees in zip(curve.items(), agreeing(list(curve.items())), strict=True):
            if not agrees:
                del rates.step_s[device, workload, batch, workers]
                rates.complaints.append(
                    f"{device} {workload} (batch size {batch}) on {workers}: {seconds:g} s per step "
                    "contradicts other batch sizes"
                )


def _add(rates: Rates, device: str, name: str, entry: object) -> None:
    try:
        label, workers = ast.literal_eval(name)
        rate = float(entry["null"])  # type: ignore[index]
    except (ValueError, SyntaxError, TypeError, KeyError):
        rates.complaints.append(f"{device} {name[:60]}: expected ('Model (batch size b)', workers) with a rate 'null'")
        return
    batch = re.fullmatch(r"(.*) \(batch size (\d+)\)", str(label))
    if batch is None:
        return  # a workload with a fixed batch size has no curve
    if not (isfinite(rate) and rate > 0 and isinstance(workers, int) and workers >= 1 and int(batch[2]) >= 1):
        rates.complaints.append(f"{device} {label} on {workers}: {rate:g} steps/s")
        return
    rates.step_s[device, batch[1], int(batch[2]), workers] = workers / rate
