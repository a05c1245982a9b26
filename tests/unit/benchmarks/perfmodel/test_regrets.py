"""Tests of the benchmark of decisions over all data sets, with invented decisions and small synthetic files."""

import csv
from pathlib import Path

import numpy as np
import pytest
from benchmarks.perfmodel.tasks import regrets
from benchmarks.perfmodel.tasks.regrets import Decision, between, failures, table

from dljob.perf.fit.new_device import Sheet


def decision(predicted: list[float], neighbours: list[float] | None = None, source: str = "a set") -> Decision:
    near = None if neighbours is None else np.array(neighbours)
    return Decision(source, "a workload", ("a", "b", "c"), np.array([1.0, 1.2, 2.0]), np.array(predicted), near)


def test_regret_is_relative_to_the_best_measured_candidate() -> None:
    wrong = decision([3.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    assert wrong.regret(wrong.predicted) == pytest.approx(20) and wrong.floor == pytest.approx(100)
    right = decision([1.0, 2.0, 4.0])
    assert right.regret(right.predicted) == 0 and right.floor == 0


def test_all_is_the_mean_of_the_sources_and_the_worst_decision() -> None:
    found = [decision([3.0, 2.0, 4.0]), decision([1.0, 2.0, 4.0]), decision([3.0, 2.0, 1.0], source="another")]
    *_, everything = table(found).rows
    assert everything[:3] == ("all (mean of the sources)", 3, pytest.approx((10 + 100) / 2))
    assert everything[4] == pytest.approx(100)


def test_check_accepts_a_regret_below_the_floor_of_the_same_decision() -> None:
    good = [decision([1.0, 2.0, 4.0]) for _ in range(99)]
    assert failures([*good, decision([3.0, 2.0, 1.0], [3.0, 2.0, 1.0])]) == []
    (text,) = failures([*good, decision([3.0, 2.0, 1.0])])
    assert text.startswith("100 %") and "c instead of a" in text
    assert "mean regret" in failures([decision([3.0, 2.0, 4.0])])[0]


def test_between_follows_a_power_law_and_keeps_the_ends() -> None:
    x = np.array([1.0, 2.0, 8.0])
    assert between(3 * x**2, x) == pytest.approx(3 * x**2)
    assert between(np.array([1.0, 50.0, 4.0]), np.array([1.0, 2.0, 4.0])) == pytest.approx([1, 2, 4])


def test_new_device_is_probed_on_batches_that_do_not_count() -> None:
    sheets = {"a": Sheet(1e12, 1e11), "b": Sheet(2e12, 2e11), "c": Sheet(4e12, 4e11)}
    speed = {"a": 1.0, "b": 2.0, "c": 4.0}
    rows = {(d, "w", b): (1 + b) / speed[d] for d in sheets for b in (8, 16, 32, 64)}
    found = list(regrets.new_devices("s", sheets, rows))
    assert {d.source for d in found} == {"s, new device, no probe, time", "s, new device, two probes, time"}
    assert len(found) == 3 * 4 + 3 * 2
    assert all(d.regret(d.predicted) == 0 for d in found)


def test_command_reads_power_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = ["dataset", "network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power"]
    with (tmp_path / "summary_power_x1.csv").open("w", newline="") as file:
        rows = [["d", "n", 8, "sgd", w, s, p] for w, s, p in ((100, 20, 100), (150, 11, 150), (200, 10, 200))]
        csv.writer(file).writerows([header, *rows])
    assert regrets.main(["--zeus", str(tmp_path)]) == 0
    assert "zeus, power limit" in capsys.readouterr().out
