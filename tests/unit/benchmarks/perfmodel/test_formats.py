"""Tests of the formats of benchmarks/perfmodel/published.py on small synthetic files."""

import csv
import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from benchmarks.perfmodel.formats.registry import runner
from benchmarks.perfmodel.scoring.scoring import Estimate
from benchmarks.perfmodel.scoring.table import Options, Table
from benchmarks.perfmodel.tasks import splits

from dljob.perf.fit.curve import Curve

QUICK = Options(seeds=2, resamples=20)


def write(path: Path, rows: Iterable[Iterable[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def mean_of(table: Table, method: str) -> float:
    value = next(row[3] for row in table.rows if row[0] == method)
    assert isinstance(value, Estimate)
    return value.value


POWER_HEADER = ["dataset", "network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power"]


class TestZeus:
    def rows(self) -> list[list[object]]:
        limits = (100, 125, 150, 175, 200, 225, 250)
        clocks = [(min(0.98 * w, 200.0) - 70) / 130 for w in limits]
        return [
            ["d", "n", b, "sgd", w, 100 * (0.3 + 0.7 / f), min(0.98 * w, 200.0)]
            for b in (8, 16)
            for w, f in zip(limits, clocks, strict=True)
        ]

    def test_model_is_better_than_baselines(self, tmp_path: Path) -> None:
        write(tmp_path / "deep" / "summary_power_x1.csv", [POWER_HEADER, *self.rows()])
        (table,) = runner("zeus")(tmp_path, QUICK)
        assert table.title.startswith("x1")
        assert mean_of(table, "model") < 6 < mean_of(table, "time and power on lines")

    def test_invalid_rows_are_ignored_and_named(self, tmp_path: Path) -> None:
        bad = [
            ["d", "n", 8, "sgd", 110, 0, 90],
            ["d", "n", 8, "sgd", 120, "nan", 90],
            ["d", "n", 8, "sgd", 130, "x", 9],
        ]
        write(tmp_path / "summary_power_x1.csv", [POWER_HEADER, *self.rows(), *bad])
        write(tmp_path / "clean" / "summary_power_x1.csv", [POWER_HEADER, *self.rows()])
        clean, dirty = runner("zeus")(tmp_path, QUICK)
        assert clean.rows == dirty.rows
        assert "line 16" in dirty.note and "line 17" in dirty.note and "line 18" in dirty.note

    def test_device_of_the_catalogue_has_tables_without_measurements(self, tmp_path: Path) -> None:
        write(tmp_path / "summary_power_v100.csv", [POWER_HEADER, *self.rows()])
        _, time, energy = runner("zeus")(tmp_path, QUICK)
        assert "v100: time" in time.title and "v100: energy" in energy.title
        for table in (time, energy):
            assert all(mean_of(table, name) > 0 for name in ("power known", "typical job", "no effect"))

    def test_missing_column_is_rejected(self, tmp_path: Path) -> None:
        write(tmp_path / "summary_power_x1.csv", [POWER_HEADER[:-1], *(row[:-1] for row in self.rows())])
        with pytest.raises(ValueError, match="no column average_power"):
            runner("zeus")(tmp_path, QUICK)


class TestNccl:
    def fill(self, folder: Path, bad: list[list[object]]) -> None:
        for n in (2, 4, 8):
            sizes = [2**24 * k for k in range(1, 64, 7)]
            rows = [[v, v // 4, "float", 1e9 * (2e-5 + 2 * (n - 1) / n * v / 2e11), 0] for v in sizes]
            write(folder / f"AR_GPU{n}_LUT", [["size(B)", "count", "type", "time(ns)", "busbw"], *rows, *bad])

    def test_ideal_ring_is_predicted_from_two_counts(self, tmp_path: Path) -> None:
        self.fill(tmp_path / "dev", [])
        every, fewer = runner("nccl")(tmp_path, QUICK)
        assert mean_of(every, "model") < 3
        assert mean_of(fewer, "model") < 3

    def test_invalid_lines_are_named(self, tmp_path: Path) -> None:
        self.fill(tmp_path / "a", [])
        self.fill(tmp_path / "b", [[2**31, 1, "float", 0, 0], [2**30 + 1, 1, "float", "nan", 0], ["?"]])
        tables = runner("nccl")(tmp_path, QUICK)
        assert tables[0].rows == tables[2].rows
        assert "AR_GPU2_LUT line 11" in tables[0].note

    def test_narrow_sweep_with_one_count_is_scored(self, tmp_path: Path) -> None:
        rows = [[2**20 * k, 1, "float", 1e9 * (1e-5 + k * 1e-5), 0] for k in (100, 101, 102)]
        write(tmp_path / "AR_GPU4", [["size(B)", "count", "type", "time(ns)", "busbw"], *rows])
        (table,) = runner("nccl")(tmp_path, QUICK)
        assert mean_of(table, "model") < 1

    def test_missing_files_are_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no AR_GPU"):
            runner("nccl")(tmp_path, QUICK)


class TestVtrain:
    header = [
        "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
        "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)",
    ]  # fmt: skip

    def rows(self) -> list[list[object]]:
        found: list[list[object]] = []
        for t, d, p, m, h, batch in product((1, 2), (1, 2, 4), (1, 2), (1, 2, 4), (1024, 2048), (16, 32)):
            slots = batch / (d * m) + p - 1
            ms = slots * m * h * h * 1e-6 / (t * p) + slots * 0.5 + (d > 1) * h * h * 1e-6 / (t * p)
            found.append([t * d * p, batch, m, h, 16, 24, 1024, t, d, p, ms])
        return found

    def test_model_is_better_than_baselines(self, tmp_path: Path) -> None:
        write(tmp_path / "ground_truth_x.csv", [self.header, *self.rows()])
        every, pure = runner("vtrain")(tmp_path, QUICK)
        assert mean_of(every, "model") < 0.5 * mean_of(every, "operations per device")
        assert mean_of(pure, "model") < mean_of(pure, "nearest given row")

    def test_invalid_rows_are_named(self, tmp_path: Path) -> None:
        good = self.rows()
        bad = [[*good[0][:-1], 0], [*good[0][:-1], "nan"], [8, 2, 4, 1024, 16, 24, 1024, 1, 8, 1, 5.0]]
        write(tmp_path / "a" / "ground_truth_x.csv", [self.header, *good])
        write(tmp_path / "b" / "ground_truth_x.csv", [self.header, *good, *bad])
        clean, dirty = (runner("vtrain")(tmp_path / name, QUICK)[0] for name in ("a", "b"))
        assert clean.rows == dirty.rows
        assert dirty.note.count("ground_truth_x.csv line") == 3


def gavel_table(devices: dict[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        device: {
            f"('{model} (batch size {b})', {n})": {
                "null": n / (slowness * (0.01 + work * b) + (0.02 * 2 * (n - 1) / n if n > 1 else 0.0))
            }
            for model, work in (("Net", 1e-3), ("Other", 2e-4))
            for b in (8, 16, 32, 64, 128)
            for n in (1, 2, 4, 8)
        }
        for device, slowness in devices.items()
    }


class TestGavel:
    devices = {"k80": 4.0, "p100": 1.5, "v100": 1.0}

    def run(self, folder: Path, table: object) -> dict[str, Table]:
        folder.mkdir(parents=True)
        (folder / "x_throughputs.json").write_text(json.dumps(table))
        return {t.title: t for t in runner("gavel")(folder, QUICK)}

    def test_every_task_is_scored(self, tmp_path: Path) -> None:
        tables = self.run(tmp_path / "a", gavel_table(self.devices))
        assert mean_of(tables["One device: batch → time from three batches, %"], "model") < 2
        assert mean_of(tables["v100: 8 devices from one device and one probe on two, %"], "model") < 15
        assert mean_of(tables["A device type left out, two probe batches on it, %"], "model") < 5
        split = tables["Uneven split from three batches a device: time over the exhaustive optimum, %"]
        assert mean_of(split, "model") < 1 < mean_of(split, "even")

    def test_zero_nan_outliers_and_unknown_devices_are_named(self, tmp_path: Path) -> None:
        table = gavel_table({**self.devices, "abacus": 50.0})
        clean = self.run(tmp_path / "a", table)
        table["k80"]["('Net (batch size 256)', 1)"] = {"null": 0.0}
        table["k80"]["('Net (batch size 512)', 1)"] = {"null": float("nan")}
        table["k80"]["Net?"] = {"null": 1.0}
        table["v100"]["('Net (batch size 1024)', 1)"] = {"null": 1e3}
        dirty = self.run(tmp_path / "b", table)
        one = "One device: batch → time from three batches, %"
        assert clean[one].rows == dirty[one].rows
        assert "k80 Net (batch size 256) on 1: 0 steps/s" in dirty[one].note
        assert "nan steps/s" in dirty[one].note and "Net?" in dirty[one].note
        assert "v100 Net (batch size 1024) on 1: 0.001 s per step" in dirty[one].note
        assert "abacus" in dirty["A device type left out, no probe on it, %"].note

    def test_file_without_a_table_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "throughputs.json").write_text("[1]")
        with pytest.raises(ValueError, match="expected an object of devices"):
            runner("gavel")(tmp_path, QUICK)


class TestNeusight:
    sheets = {"A": (8e3, 300), "B": (14e3, 900), "C": (20e3, 1500), "D": (60e3, 3300)}

    def fill(self, folder: Path, extra: list[list[object]]) -> None:
        rows = [
            [d, f"{m}-train-512-{b}", 1e5 * work * b / (f * w) ** 0.5]
            for d, (f, w) in self.sheets.items()
            for m, work in (("x", 1.0), ("y", 5.0))
            for b in (1, 4)
        ]
        write(folder / "train_latency_summary.csv", [["gpu", "workload", "e2e_ms"], *rows, *extra])
        for name, (f, w) in self.sheets.items():
            path = folder / "devices" / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"SingleFLOPs": f, "Mem_Bw": w}))

    def test_held_out_devices_are_predicted(self, tmp_path: Path) -> None:
        self.fill(tmp_path, [])
        none, two = runner("neusight")(tmp_path, QUICK)
        assert mean_of(none, "model") < 15
        assert mean_of(two, "model") < 5

    def test_invalid_rows_and_missing_data_sheets_are_named(self, tmp_path: Path) -> None:
        self.fill(tmp_path / "a", [])
        bad = [
            ["A", "x-train-512-2", "nan"],
            ["E", "x-train-512-1", 5.0],
            ["A", "?", 5.0],
            ["A", "x-train-512-8-dp4", 9.0],
        ]
        self.fill(tmp_path / "b", bad)
        clean, dirty = (runner("neusight")(tmp_path / name, QUICK)[0] for name in ("a", "b"))
        assert clean.rows == dirty.rows
        for part in ("line 18", "line 20", "E: no data sheet"):
            assert part in dirty.note


def test_optimum_is_the_exhaustive_one() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        truths = [Curve((1.0, 3.0, 6.0), tuple(np.sort(rng.uniform(1, 9, 3)).tolist()), 1.0) for _ in range(3)]
        lows, highs = [1, 2, 1], [6, 5, 6]
        for size in (4, 9, 17):
            times = [
                max(t.seconds(b) for t, b in zip(truths, pick, strict=True))
                for pick in product(*(range(lo, hi + 1) for lo, hi in zip(lows, highs, strict=True)))
                if sum(pick) == size
            ]
            assert splits.optimum(truths, lows, highs, size) == min(times)
