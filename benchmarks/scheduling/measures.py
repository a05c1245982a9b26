"""The figures of one simulation, and their medians over streams."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from benchmarks.scheduling.simulator import Result


@dataclass(frozen=True)
class Measures:
    """Figures of a policy on one stream. Times in hours."""

    average_h: float
    p95_h: float
    makespan_h: float
    deadlines: float
    """Part of the jobs that ended by their deadline."""
    energy_kWh: float
    """Energy per job."""
    used: float
    """Part of the device-time until the end of the stream that jobs held."""
    moves: float
    """Restarts per job."""


def measures(result: Result, devices: int) -> Measures:
    states = result.states
    took = np.array([state.ended_s - state.job.arrival_s for state in states]) / 3600
    return Measures(
        float(took.mean()),
        float(np.percentile(took, 95)),
        (result.end_s - states[0].job.arrival_s) / 3600,
        float(np.mean([state.ended_s <= state.job.deadline_s for state in states])),
        float(np.mean([state.energy_J for state in states])) / 3.6e6,
        result.held_s / devices / (result.end_s - states[0].job.arrival_s),
        float(np.mean([state.moves for state in states])),
    )


def median(found: Sequence[Measures]) -> Measures:
    return Measures(*(float(np.median([getattr(each, field.name) for each in found])) for field in fields(Measures)))
