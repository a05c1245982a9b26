"""Statistics of the trainer's benchmarks: ratios with intervals, thresholds, and a description of the machine.

Times are arrays over rounds. In each round all candidates run one after another.
"""

import os
import platform
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Interval = tuple[float, float, float]
"""Median, and the bounds of its 95 % interval."""
_DRAWS = 2000


def ratio(over: Times, under: Times) -> Interval:
    """Return the median of the rounds' ratios, with its bootstrap interval over rounds."""
    ratios = over / under
    return _interval(float(np.median(ratios)), np.median(ratios[_drawn(len(ratios))], axis=1))


def geometric_mean(pairs: list[tuple[Times, Times]]) -> Interval:
    """Return the geometric mean of the median ratios of several cases, with its bootstrap interval."""
    logs = [np.log(over / under) for over, under in pairs]
    drawn = np.mean([np.median(log[_drawn(len(log), i)], axis=1) for i, log in enumerate(logs)], axis=0)
    return _interval(float(np.exp(np.mean([np.median(log) for log in logs]))), np.exp(drawn))


def text(interval: Interval) -> str:
    middle, low, high = interval
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def at_least(interval: Interval, bar: float) -> str:
    """Return a verdict: the threshold ``bar`` is missed if the whole interval is below it."""
    return f"{text(interval)}, threshold ≥ {bar:g}: {'MISSED' if interval[2] < bar else 'met'}"


def at_most(interval: Interval, bar: float) -> str:
    """Return a verdict: the threshold ``bar`` is missed if the whole interval is above it."""
    return f"{text(interval)}, threshold ≤ {bar:g}: {'MISSED' if interval[1] > bar else 'met'}"


def machine() -> str:
    """Return the processor, the load and the relevant versions."""
    import torch

    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} x {found[1] if found else '?'}, load {os.getloadavg()[0]:.1f} before, {versions}"


def _drawn(rounds: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, rounds, (_DRAWS, rounds))


def _interval(middle: float, draws: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(draws, [2.5, 97.5])
    return middle, float(low), float(high)
