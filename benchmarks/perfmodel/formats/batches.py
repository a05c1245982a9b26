"""Format ``batches``: one device over the batch, of every Pollux and Gavel table below the directory together."""

from pathlib import Path

from benchmarks.perfmodel.formats import gavel_data, pollux_data
from benchmarks.perfmodel.scoring.compare import dropped
from benchmarks.perfmodel.scoring.table import Options, Table
from benchmarks.perfmodel.tasks import one_device


def run(directory: Path, options: Options) -> list[Table]:
    """A table of each kind of file found, and of all curves. ``--only`` names workloads."""
    found: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    complaints: list[str] = []
    for cluster in sorted({path.parent.parent for path in directory.rglob("placements.csv")}):
        workloads = pollux_data.load(cluster, options.gpus_per_node)
        found[cluster.name] = {(cluster.name, w.name): {b: m.step_s for b, m in w.one.items()} for w in workloads}
    if next(directory.rglob("*throughputs*.json"), None) is not None:
        rates = gavel_data.load(directory)
        found["gavel"], complaints = rates.curves(), rates.complaints
    curves = {name: {k: c for k, c in group.items() if options.wants(k[1])} for name, group in found.items()}
    usable = {name: group for name, group in curves.items() if any(len(c) >= 4 for c in group.values())}
    if not usable:
        raise ValueError(
            f"{directory}: no Pollux or Gavel table with four batches on one device; expected one at least"
        )
    if len(usable) > 1:
        usable["all"] = {key: c for group in usable.values() for key, c in group.items()}
    note = dropped(complaints)
    return [one_device.table(group, options, note, name) for name, group in usable.items()]
