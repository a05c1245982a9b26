"""Accuracy of the performance model on published measurements, with baselines computed in the same run.

    python -m benchmarks.perfmodel.published --format pollux --dir D --gpus-per-node 4 [--only cifar10,bert] [--json]

D (or the environment variable DLJOB_PERFDATA) is a directory of that format; nothing is keyed to the names of its
files' workloads. Formats and protocols: benchmarks/proof, docs/design/0006-performance-model.md.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.perfmodel.formats.registry import FORMATS, runner
from benchmarks.perfmodel.scoring.table import Options, machine


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the directory cannot be read as the format."""
    parser = argparse.ArgumentParser(description="Scores of the performance model on public measurements.")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--dir", type=Path, help="directory of that format; default: $DLJOB_PERFDATA")
    parser.add_argument("--gpus-per-node", type=int, metavar="K", help="devices that a node holds")
    parser.add_argument("--only", default="", metavar="NAMES", help="workloads to run, by comma; default: all")
    parser.add_argument("--seeds", type=int, default=5, help="repetitions of random draws")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    directory = asked.dir or (Path(os.environ["DLJOB_PERFDATA"]) if "DLJOB_PERFDATA" in os.environ else None)
    if directory is None:
        parser.error("no directory: give --dir or set DLJOB_PERFDATA")
    if asked.seeds < 1 or asked.resamples < 0 or (asked.gpus_per_node is not None and asked.gpus_per_node < 1):
        parser.error("--seeds and --gpus-per-node are 1 or more, --resamples 0 or more")
    only = tuple(name for name in asked.only.split(",") if name)
    options = Options(asked.gpus_per_node, only, asked.seeds, asked.resamples)
    try:
        tables = runner(asked.format)(directory, options)
    except (ValueError, OSError) as e:
        print(f"perfmodel: {e}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps({"machine": machine(), "format": asked.format, "tables": [t.as_dict() for t in tables]}))
    else:
        print("\n\n".join(table.text() for table in tables))
        print(f"\n{machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
