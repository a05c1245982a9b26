"""Format ``batches``: one device over the batch size, from all Pollux and Gavel tables below the directory."""

from pathlib import Path

from benchmarks.perfmodel.formats import gavel_data, pollux_data
from benchmarks.perfmodel.scoring.compare import dropped
from benchmarks.perfmodel.scoring.table import Options, Table
from benchmarks.perfmodel.tasks import one_device


def run(directory: Path, options: Options) -> list[Table]:
    """Return a table for each kind of file and one for all curves. ``--only`` names workloads."""
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
            f"{directory}: found no Pollux or Gavel table with four batch sizes on one device; expected at least one"
        )
    if len(usable) > 1:
        usable["all"] = {key: c for group in usable.values() for key, c in group.items()}
    note = dropped(complaints)
    return [one_device.table(group, options, note, name) for name, group in usable.items()]
