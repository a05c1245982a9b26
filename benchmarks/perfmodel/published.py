"""Score the performance model on published measurements, with baselines computed in the same run.

    python -m benchmarks.perfmodel.published --format pollux --dir D --gpus-per-node 4 [--only cifar10,bert] [--json]

D (or the environment variable DLJOB_PERFDATA) is a directory of that format. Workload names have no special meaning.
Formats and protocols: benchmarks/perfmodel/formats, docs/design/0006-performance-model.md.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.perfmodel.formats.registry import FORMATS, runner
from benchmarks.perfmodel.scoring.table import Options, machine


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 if the directory cannot be read as the format."""
    parser = argparse.ArgumentParser(description="Scores of the performance model on public measurements.")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--dir", type=Path, help="directory of that format; default: $DLJOB_PERFDATA")
    parser.add_argument("--gpus-per-node", type=int, metavar="K", help="devices per node")
    parser.add_argument("--only", default="", metavar="NAMES", help="comma-separated workloads; default: all")
    parser.add_argument("--seeds", type=int, default=5, help="repetitions of random draws")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    directory = args.dir or (Path(os.environ["DLJOB_PERFDATA"]) if "DLJOB_PERFDATA" in os.environ else None)
    if directory is None:
        parser.error("no directory: give --dir or set DLJOB_PERFDATA")
    if args.seeds < 1 or args.resamples < 0 or (args.gpus_per_node is not None and args.gpus_per_node < 1):
        parser.error("--seeds, --gpus-per-node: expected 1 or more; --resamples: expected 0 or more")
    only = tuple(name for name in args.only.split(",") if name)
    options = Options(args.gpus_per_node, only, args.seeds, args.resamples)
    try:
        tables = runner(args.format)(directory, options)
    except (ValueError, OSError) as e:
        print(f"perfmodel: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"machine": machine(), "format": args.format, "tables": [t.as_dict() for t in tables]}))
    else:
        print("\n\n".join(table.text() for table in tables))
        print(f"\n{machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
