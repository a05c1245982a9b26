"""Read the tables of the Pollux artifact (OSDI 2021): step times over placements, as keys with one value each.

The directory has one folder per workload with ``placements.csv`` (``placement`` "143": 3 nodes with 1, 4 and 3
devices) and ``scalability.csv`` (``num_nodes,num_replicas``), both with ``local_bsz`` and ``step_time``.
"""

import csv
from collections import defaultdict
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import median

FILES = ("placements.csv", "scalability.csv")


@dataclass(frozen=True, order=True)
class Key:
    """Key of a step time: devices of each node in falling order, and samples per device."""

    counts: tuple[int, ...]
    batch: int

    @property
    def devices(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, and of waiting for the all-reduce in it (NaN: not recorded); medians over equal keys."""

    step_s: float
    sync_s: float


@dataclass(frozen=True)
class Measurements:
    """One workload: times over the batch size on one device, and of every key with several devices."""

    name: str
    one: dict[int, Measured]
    multi: dict[Key, Measured]
    rows: tuple[tuple[Key, Measured], ...]
    """Single measurements on several devices. Permutations of the nodes have the same key."""


def spread(nodes: int, devices: int) -> tuple[int, ...]:
    """Return the devices of each node if they are spread as evenly as possible, in falling order."""
    each, remainder = divmod(devices, nodes)
    return tuple(each + (i < remainder) for i in range(nodes))


def load(directory: Path, gpus_per_node: int | None) -> list[Measurements]:
    """Read every workload below ``directory``, by name. Raise ValueError for no workload or a malformed row."""
    folders = sorted({path.parent for name in FILES for path in directory.glob(f"*/{name}")})
    if not folders:
        raise ValueError(f"{directory}: no */placements.csv or */scalability.csv; expected a folder for each workload")
    return [_workload(folder, gpus_per_node) for folder in folders]


def _workload(folder: Path, gpus_per_node: int | None) -> Measurements:
    found: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for path in (folder / name for name in FILES):
        if not path.exists():
            continue
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    key, step_s, sync_s = _row(row)
                except (KeyError, ValueError, TypeError) as e:
                    raise ValueError(f"{path}, line {number}: {row}: not a measurement ({e})") from e
                if gpus_per_node is not None and key.counts[0] > gpus_per_node:
                    raise ValueError(f"{path}, line {number}: {key.counts[0]} devices on a node of {gpus_per_node}")
                found[key].append((step_s, sync_s))
    values = {key: _median(rows) for key, rows in sorted(found.items())}
    one = {key.batch: value for key, value in values.items() if key.devices == 1}
    if not one:
        raise ValueError(f"{folder}: no rows of one device (placement 1); expected its curve over the batch")
    multi = {key: value for key, value in values.items() if key.devices > 1}
    return Measurements(folder.name, one, multi, tuple((k, Measured(*row)) for k in multi for row in found[k]))


def _row(row: dict[str, str]) -> tuple[Key, float, float]:
    if "placement" in row:
        counts = tuple(sorted((int(digit) for digit in row["placement"].strip()), reverse=True))
    else:
        counts = spread(int(row["num_nodes"]), int(row["num_replicas"]))
    key, step_s = Key(counts, int(row["local_bsz"])), float(row["step_time"])
    if not (isfinite(step_s) and step_s > 0 and min(key.counts) >= 1 and key.batch >= 1):
        raise ValueError("expected a positive finite time, a batch of 1 or more and devices on every node")
    return key, step_s, float(row.get("sync_time") or nan)


def _median(rows: list[tuple[float, float]]) -> Measured:
    steps, syncs = zip(*rows, strict=True)
    return Measured(median(steps), median(syncs))
