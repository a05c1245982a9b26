"""Compare measured figures with goals, and print them as a table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A measured figure. ``low`` and ``high`` are the bounds of its goal; None: no bound on this side."""

    name: str
    measured: float
    unit: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def missed(self) -> bool:
        """Return True if the figure has a goal and misses it. A figure that is not a number misses its goal."""
        below = self.low is not None and not self.measured >= self.low
        above = self.high is not None and not self.measured <= self.high
        return below or above

    def row(self) -> tuple[str, str, str, str]:
        """Return the columns of the table: name, goal, measured, verdict."""
        bounds = [f"≥ {self.low:g}"] if self.low is not None else []
        bounds += [f"≤ {self.high:g}"] if self.high is not None else []
        goal = f"{' and '.join(bounds)} {self.unit}".strip() if bounds else ""
        verdict = ("MISSED" if self.missed else "ok") if bounds else ""
        return self.name, goal, f"{self.measured:.4g} {self.unit}".strip(), verdict


def table(figures: list[Figure]) -> str:
    """Return the figures as lines of aligned columns."""
    rows = [("figure", "goal", "measured", ""), *(figure.row() for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(f"{row[i]:{widths[i]}}" for i in range(4)).rstrip() for row in rows)
