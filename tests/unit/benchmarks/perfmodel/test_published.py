"""Tests of benchmarks/perfmodel/published.py: scoring, and the Pollux format with a synthetic cluster."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.perfmodel import published
from benchmarks.perfmodel.formats.pollux_data import Key, Measurements, load, spread
from benchmarks.perfmodel.scoring import scoring
from benchmarks.perfmodel.scoring.table import Options
from benchmarks.perfmodel.tasks import plans
from benchmarks.perfmodel.tasks.decisions import candidates, missed
from benchmarks.perfmodel.tasks.scaling_methods import Task, affine, chosen_probes, no_communication, simple
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.fit.scaling import Constants, Runs, steps

BATCHES = (8, 16, 32, 64)
PLACES = ("1", "2", "4", "11", "21", "12", "22", "44", "111", "211", "222", "444", "1111", "2211", "2222", "4444")
TRUE = Constants(0.2, 0.1, 0.2, -5.0, 0.2, 0.02, 0.05, 0.03, -2.0, 0.6)


def seconds(counts: tuple[int, ...], batch: int) -> float:
    one_s = 0.02 + 0.004 * batch
    columns = [[float(x)] for x in (len(counts), max(counts), sum(counts), batch, one_s)]
    return float(np.exp(steps(TRUE, Runs(*np.array(columns)), 0.1).log_s[0]))


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Create two workloads that follow the model. Permutations of a placement differ by a few per cent."""
    for name, noise in (("exact", 0.0), ("noisy", 0.03)):
        rng, folder = np.random.default_rng(1), tmp_path / name
        folder.mkdir()
        with (folder / "placements.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["placement", "local_bsz", "step_time", "sync_time"])
            for place in PLACES:
                for batch in BATCHES:
                    step_s = seconds(tuple(map(int, place)), batch) * np.exp(noise * rng.normal())
                    writer.writerow([place, batch, step_s, step_s / 10])
        with (folder / "scalability.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"])
            for devices in (8, 12, 16, 32):
                for batch in BATCHES:
                    writer.writerow([8, devices, batch, seconds(spread(8, devices), batch), 0.01])
    return tmp_path


positive = st.lists(st.floats(0.01, 100), min_size=2, max_size=20).map(np.array)


class TestScoring:
    @given(positive, st.floats(0.5, 2))
    def test_errors_are_relative(self, measured: scoring.Floats, factor: float) -> None:
        assert scoring.ape(measured, factor * measured) == pytest.approx(100 * abs(factor - 1), abs=1e-9)

    def test_workloads_have_equal_weight(self) -> None:
        found = scoring.over_workloads([np.full(1000, 2.0), np.array([10.0, 14.0])], scoring.mean)
        assert found.value == 7.0
        assert 6.0 <= found.low < 7.0 < found.high <= 8.0

    def test_empty_scores_are_rejected(self) -> None:
        with pytest.raises(ValueError, match="without errors"):
            scoring.over_workloads([np.array([])], scoring.mean)

    @given(positive)
    def test_best_choice_has_zero_regret(self, measured: scoring.Floats) -> None:
        everything = [np.arange(len(measured))]
        assert scoring.regret(measured, measured, everything) == pytest.approx(0)
        worst = scoring.regret(measured, -measured, everything)
        assert worst[0] == pytest.approx(100 * (measured.max() / measured.min() - 1))

    @given(positive, st.floats(1.01, 3))
    def test_interval_score_is_the_width_plus_a_penalty_for_misses(self, measured: scoring.Floats, half: float) -> None:
        score = scoring.interval_score(measured, measured / half, measured * half)
        assert score == pytest.approx(2 * np.log(half))
        assert scoring.coverage(measured, measured / half, measured * half) == 100
        off = scoring.interval_score(measured, measured * half, measured * half * half)
        assert (off > score / 2).all() and scoring.coverage(measured, measured * half, measured * half * half) == 0


class TestDecisions:
    KEYS = (Key((1, 1), 32), Key((2,), 32), Key((4,), 16), Key((4, 4), 64))

    def test_only_equal_global_batches_are_compared(self) -> None:
        assert [g.tolist() for g in candidates(self.KEYS).groups] == [[0, 1, 2]]

    def test_exact_predictions_meet_all_deadlines_without_excess(self) -> None:
        measured = np.array([0.5, 0.4, 0.3, 1.0])
        late, excess = missed(candidates(self.KEYS), measured, measured, measured)
        assert late.sum() == 0 and excess == pytest.approx(0)

    def test_optimistic_predictions_miss_deadlines(self) -> None:
        """The placement predicted to be the fastest is the slowest."""
        measured = np.array([0.8, 0.4, 0.3, 1.0])
        predicted = np.array([0.1, 0.4, 0.3, 1.0])
        late, _ = missed(candidates(self.KEYS), measured, predicted, predicted)
        assert late.tolist() == [1, 1, 1, 0]


class TestPolluxData:
    def test_permutations_share_a_key_with_their_median(self, cluster: Path) -> None:
        (_, noisy) = load(cluster, 4)
        rows = [m.step_s for k, m in noisy.rows if k == Key((2, 1), 8)]
        assert len(rows) == 2 and len(set(rows)) == 2
        assert noisy.multi[Key((2, 1), 8)].step_s == pytest.approx(np.median(rows))
        assert set(noisy.one) == set(BATCHES) and Key((1,), 8) not in noisy.multi

    @given(st.integers(1, 20), st.integers(0, 60))
    def test_devices_are_spread_evenly(self, nodes: int, more: int) -> None:
        counts = spread(nodes, nodes + more)
        assert sum(counts) == nodes + more and max(counts) - min(counts) <= 1 and list(counts) == sorted(counts)[::-1]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("11,32,nan,0", "positive finite time"),
            ("11,32,-1,0", "positive finite time"),
            ("1x,32,1,0", "not a measurement"),
            ("11,0,1,0", "not a measurement"),
            ("5,32,1,0", "5 devices on a node of 4"),
        ],
    )
    def test_invalid_row_is_rejected(self, cluster: Path, row: str, message: str) -> None:
        with (cluster / "exact" / "placements.csv").open("a") as file:
            file.write(row + "\n")
        with pytest.raises(ValueError, match=f"exact/placements.csv, line 66.*{message}"):
            load(cluster, 4)

    def test_folder_without_workloads_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="expected a folder for each workload"):
            load(tmp_path, 4)


class TestMethods:
    def test_models_only_see_their_probes(self, cluster: Path) -> None:
        """The calibrator requests only the measurements that it chose."""
        (exact, _) = load(cluster, 4)
        requested: list[Key] = []

        def measure(key: Key):  # type: ignore[no-untyped-def]
            requested.append(key)
            return exact.multi[key]

        probes = chosen_probes(Task(exact.one, tuple(exact.multi)), measure, 3)
        assert [key for key, _ in probes] == requested and len(set(requested)) == 3

    def test_better_baselines_have_smaller_errors(self, cluster: Path) -> None:
        (exact, _) = load(cluster, 4)
        task = Task(exact.one, tuple(exact.multi))
        everything = list(exact.multi.items())
        measured = np.array([m.step_s for m in exact.multi.values()])
        errors = [
            float(np.mean(scoring.ape(measured, method(task, everything))))
            for method in (simple, affine, no_communication)
        ]
        assert errors[0] < 5 and errors[0] < errors[1] < errors[2]


def test_command_reports_all_tables(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--format",
        "pollux",
        "--dir",
        str(cluster),
        "--gpus-per-node",
        "4",
        "--resamples",
        "20",
        "--seeds",
        "2",
    ]
    assert published.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tables = {table["title"]: table["rows"] for table in found["tables"]}
    (five,) = [rows for title, rows in tables.items() if title.startswith("5 probes: absolute error")]
    mean = {(row["model"], row["workload"]): row["mean"]["value"] for row in five}
    assert mean["dljob", "exact"] < 5
    assert mean["dljob", "mean of all"] < min(mean["affine", "mean of all"], mean["no communication", "mean of all"])
    assert {"dljob", "simple", "affine", "no communication"} <= {row["model"] for row in five}
    assert "numpy" in found["machine"]
    (by_planner,) = [rows for title, rows in tables.items() if title.startswith("5 probes: plans of the planner")]
    regrets = {row["planned by"]: row["mean"]["value"] for row in by_planner}
    errors = {row["planned by"]: row["mean step error"]["value"] for row in by_planner}
    assert regrets[plans.STEPS[1]] < 5 < errors[plans.SHEETS[0]]
    assert errors[plans.STEPS[1]] < 6


def test_batches_that_predict_themselves_are_no_error(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(workload: Measurements, keys: list[Key]) -> scoring.Floats:
        return np.array([workload.multi[key].step_s * (2 if key.batch in BATCHES[1:-1] else 1) for key in keys])

    monkeypatch.setattr(plans, "between_neighbours", doubled)
    rows = plans.table(load(cluster, 4)[:1], 1, Options(resamples=0)).rows
    (error,) = [row[-1] for row in rows if row[0] == plans.NEIGHBOURS]
    assert isinstance(error, scoring.Estimate) and error.value == pytest.approx(100)


def test_empty_directory_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main(["--format", "pollux", "--dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"perfmodel: {tmp_path}: no */placements.csv")
