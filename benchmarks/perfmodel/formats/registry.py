"""List the formats of ``benchmarks/perfmodel/published.py``. Each is the name of a module of this package."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks.perfmodel.scoring.table import Options, Table

FORMATS = ("pollux", "gavel", "neusight", "vtrain", "zeus", "clocks", "nccl", "batches")


def runner(name: str) -> Callable[[Path, Options], list[Table]]:
    """Return ``run`` of the format's module."""
    run: Callable[[Path, Options], list[Table]] = import_module(f"benchmarks.perfmodel.formats.{name}").run
    return run
