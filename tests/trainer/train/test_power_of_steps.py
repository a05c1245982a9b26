"""Tests of the mean power that a rank reports with its times."""

from typing import cast

import pytest

from dltrain.device.energy import Meter
from dltrain.optim.grad_scaler import LossScale
from dltrain.optim.noise_scale import NoiseScale
from dltrain.protocol.rank_messages import Energy, Step
from dltrain.protocol.reporter import RankReporter
from dltrain.timing.step_times import Times
from dltrain.train import progress
from dltrain.train.progress import Progress


class Recorder:
    def __init__(self) -> None:
        self.rank, self.steps = 0, list[Step]()

    def send(self, message: object) -> None:
        if isinstance(message, Step):
            self.steps.append(message)


class Counter:
    """An energy counter that a test sets."""

    def __init__(self) -> None:
        self.joules: float | None = 0.0

    def used(self) -> Energy | None:
        return None if self.joules is None else Energy(joules=self.joules, source="NVML")


def test_power_is_the_energy_between_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    now, counter, recorder = [100.0], Counter(), Recorder()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    training = Progress(cast(RankReporter, recorder), 0, "gpu", NoiseScale(8), LossScale(), cast(Meter, counter))

    def update(seconds: float, joules: float | None) -> float | None:
        now[0] += seconds
        counter.joules = joules
        training.add(Times(0.1, 0.0, 0.0), 8, 8, ())
        training.report_step(1, 9, 0, 0.1, None, 8, 1)
        measure = recorder.steps[-1].measure
        assert measure is not None
        return measure.power_W

    assert update(1.0, 50.0) is None, "one reading has no duration"
    assert update(2.0, 650.0) == pytest.approx(300)
    assert update(0.1, 660.0) == pytest.approx(300), "too short to measure"
    assert update(0.9, 950.0) == pytest.approx(300), "the short time counts in the next one"
    training.end_epoch()
    assert update(60.0, 1000.0) == pytest.approx(300), "the power of a pause is left out"
    assert update(1.0, 1200.0) == pytest.approx(200)
    assert update(1.0, None) is None, "the counter has become unreadable"
