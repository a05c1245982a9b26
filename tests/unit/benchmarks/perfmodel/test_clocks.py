"""Tests of the format ``clocks`` of benchmarks/perfmodel/published.py on small synthetic files."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.perfmodel.formats.clocks_data import load
from benchmarks.perfmodel.formats.registry import runner
from benchmarks.perfmodel.scoring.table import Options, Table

from dljob.cluster.catalogue import Device, gpu_or_assumed
from dljob.perf.resources.power import under_clock

QUICK = Options(seeds=1, resamples=10)
TOP = 1000


def write(path: Path, rows: Iterable[Iterable[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def ideal(clock: float, demand_W: float = 280.0, idle_W: float = 55.0) -> tuple[float, float]:
    """Return the seconds and watts that the model predicts, so that it has no error."""
    fields = {"max_clock_MHz": float(TOP), "clock_limit_MHz": clock, "idle_power_W": idle_W}
    return under_clock(Device(**{**vars(gpu_or_assumed("a100")), **fields}), demand_W)


def cells(table: Table, quantity: str, method: str) -> tuple[Any, ...]:
    return next(row[2:] for row in table.rows if row[:2] == (quantity, method))


def layers(path: Path) -> None:
    header = ["stage", "instruction", "frequency", "time", "energy"]
    rows: list[list[object]] = [header]
    for clock in (TOP, 800, 700, 600, 400):
        seconds, watts = ideal(clock)
        for stage in (0, 1):
            rows += [[stage, "forward", clock, seconds, seconds * watts]]
            rows += [[stage, "backward", clock, 2 * seconds, 2 * seconds * watts]]
    write(path, rows)


def pipeline(folder: Path, clocks: list[list[int]], busy: float = 0.95) -> None:
    folder.mkdir(parents=True)
    for number, states in enumerate(clocks):
        seconds, watts = ideal(1 / (sum(1 / each for each in states) / len(states)), idle_W=28.0)
        profile = {
            "time_breakdown": {name: [[part * seconds] * 2] * 5 for name, part in (("forward", 0.5), ("backward", 1))},
            "iter_time": [3 * seconds / busy] * 5,
            "iter_energy": [3 * seconds / busy * watts] * 5,
        }
        (folder / f"{number}.sched.json").write_text(json.dumps([{"power_states": states}]), encoding="utf-8")
        (folder / f"{number}.prof.json").write_text(json.dumps([profile]), encoding="utf-8")


def test_layers_of_a_fitted_and_of_another_program(tmp_path: Path) -> None:
    layers(tmp_path / "x" / "stage_profile" / "gpt3-175b+a100_sxm_bf16.csv")
    layers(tmp_path / "x" / "stage_profile" / "bloom+a100_sxm_bf16.csv")
    fitted, held_out = runner("clocks")(tmp_path, QUICK)
    assert fitted.title.startswith("fitted") and held_out.title.startswith("other programs on the same devices")
    for table in (fitted, held_out):
        assert cells(table, "energy", "model") == (1, 3, pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9))
        assert cells(table, "choice", "model")[2] == 0 < cells(table, "choice", "no effect")[2]
        assert cells(table, "time", "no effect")[3] > 20, "the clock at 0.4 of the highest does not count"


def test_ranks_count_at_one_clock_and_their_power_if_they_compute(tmp_path: Path) -> None:
    schedules = [[TOP, TOP], [800, 800], [650, 700], [TOP, 600], [TOP, TOP]]
    pipeline(tmp_path / "perseus" / "A40" / "dp1" / "merak+gpt+custom", schedules)
    pipeline(tmp_path / "perseus" / "A40" / "dp1" / "merak+t5+custom", schedules, busy=0.5)
    pipeline(tmp_path / "perseus" / "A40" / "dp2" / "merak+big+custom", [[TOP, 600], [800, 800]])
    (table,) = runner("clocks")(tmp_path, QUICK)
    assert table.title.startswith("training on other devices")
    assert cells(table, "time", "model")[:2] == (2, 4) and cells(table, "power", "model")[:2] == (1, 2)
    assert cells(table, "energy", "model")[3] == pytest.approx(0, abs=1e-6)
    assert "A40/big rank 0: no schedule at one clock" in table.note


def test_kernels_count_at_the_highest_memory_clock(tmp_path: Path) -> None:
    header = ["benchmark", "argNo", "kernel", "core_frequency", "memory_frequency", "time", "average_power"]
    rows = [["mul", 0, "k", clock, memory, *ideal(clock, idle_W=40.0)] for clock in (TOP, 700) for memory in (877, 800)]
    write(tmp_path / "v100-dvfs-real.csv", [header, *rows])
    (table,) = runner("clocks")(tmp_path, QUICK)
    assert table.title.startswith("kernels on other devices")
    assert cells(table, "time", "model")[:2] == (1, 1)


def test_directory_without_measurements_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found no measurements"):
        load(tmp_path)


def test_file_of_another_form_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "v100-dvfs-real.csv", [["benchmark", "time"], ["a", 1]])
    with pytest.raises(ValueError, match="no column kernel"):
        load(tmp_path)
