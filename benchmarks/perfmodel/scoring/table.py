"""Options and result tables of the format adapters."""

import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.scoring.scoring import Estimate

Cell = str | float | int | Estimate | None


@dataclass(frozen=True)
class Options:
    """Command-line options; each format reads those that apply to it."""

    gpus_per_node: int | None = None
    """Devices per node of the measured cluster; None: not stated."""
    only: tuple[str, ...] = ()
    """Workloads to run, by name; empty: all."""
    seeds: int = 5
    """Repetitions of random draws."""
    resamples: int = 1000
    """Bootstrap resamples."""

    def wants(self, workload: str) -> bool:
        return not self.only or workload in self.only


@dataclass(frozen=True)
class Table:
    """Scores of one task. Column names state the units; an Estimate has a 95 % interval."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def text(self) -> str:
        cells = [self.columns, *(tuple(_shown(c) for c in row) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [_line(row, widths) for row in cells]
        return "\n".join([self.title, lines[0], "  ".join("-" * w for w in widths), *lines[1:], *_note(self.note)])

    def as_dict(self) -> dict[str, object]:
        """Return the table for ``--json``: a list of objects, keyed by column."""
        rows = [
            {c: asdict(v) if isinstance(v, Estimate) else v for c, v in zip(self.columns, row, strict=True)}
            for row in self.rows
        ]
        return {"title": self.title, "rows": rows, "note": self.note}


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, Estimate):
        return f"{cell.value:.1f} [{cell.low:.1f}, {cell.high:.1f}]"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first, *rest = (f"{cell:{'<' if i == 0 else '>'}{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
    return "  ".join([first, *rest]).rstrip()


def _note(note: str) -> list[str]:
    return [note] if note else []


def machine() -> str:
    """Return the processor and the versions of Python and numpy."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{len(names) or '?'} x {processor}, Python {platform.python_version()}, numpy {np.__version__}"
