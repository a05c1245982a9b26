"""Round the metrics of an analysis. Sums over ranks differ in their last bits, which would hide equal metrics."""


def rounded(value: float) -> float:
    """Return ``value`` with 6 significant digits."""
    return float(f"{value:.6g}")


def ratio(part: int, whole: int) -> float | None:
    """Return ``part`` / ``whole``; None if ``whole`` is 0. Counts are exact, so the ratio needs no rounding."""
    return part / whole if whole else None
