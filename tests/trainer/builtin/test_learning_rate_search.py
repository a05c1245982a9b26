"""Tests of benchmarks/papers/learning_rate_search.py: paired differences, and a small case on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers import learning_rate_search as search


def row(seed: int, shares: str, accuracy: float, way: str = "Loss", factor: int = 1) -> dict[str, Any]:
    return {
        "seed": seed, "factor": factor, "way": way, "shares": shares, "accuracy": accuracy, "rate": 0.1, "found": True,
        "diverged": False,
    }  # fmt: skip


def test_differences_are_paired_by_seed() -> None:
    rows = [row(0, "even", 0.9), row(1, "even", 0.8), row(0, "uneven", 0.91), row(1, "uneven", 0.83)]
    points, error = search.difference(rows, {"shares": "uneven"}, {"shares": "even"})
    assert points == pytest.approx(2.0) and error == pytest.approx(1.0)
    assert search.difference(rows[::2], {"shares": "uneven"}, {"shares": "even"})[1] is None
    assert search.text((1.0, None)) == "+1.00" and search.text((-1.0, 0.5)) == "-1.00 ± 0.50"


def every_arm(seed: int, base: float, split: float = 0.0) -> list[dict[str, Any]]:
    """Return rows in which 8 times the batch loses 20, 4 and 2 points, and uneven local batches win ``split``."""
    loss = {"given": 0.2, "Loss": 0.04, "Accuracy": 0.02}
    return [
        row(seed, shares, base - (loss[way] if factor == 8 else 0) + (split if shares == "uneven" else 0), way, factor)
        for factor in (1, 8)
        for way in search.WAYS
        for shares in search.WEIGHTS
    ]


def test_summary_has_what_the_largest_batch_loses_and_what_uneven_batches_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = every_arm(0, 0.9) + every_arm(1, 0.8, split=0.02)
    assert search.lost(rows, "given") == (pytest.approx(20), pytest.approx(0, abs=1e-9))
    assert search.split_effect(rows) == (pytest.approx(1.0), pytest.approx(1.0)), "a seed counts once, not per arm"
    search.summarize({"digits": rows, "breast-cancer": every_arm(0, 0.9)})
    lines = capsys.readouterr().out.splitlines()
    assert "| digits | +20.00 ± 0.00 | +4.00 ± 0.00 | +2.00 ± 0.00 | +1.00 ± 1.00 | 0 of 24 |" in lines
    assert "| breast-cancer | +20.00 | +4.00 | +2.00 | +0.00 | 0 of 12 |" in lines


def test_seeds_are_stored_one_by_one_and_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run of many seeds that is interrupted goes on with the next seed."""
    file, ran = tmp_path / "rows.json", list[tuple[str, list[int]]]()

    def run(dataset: str, seeds: list[int], _options: Any) -> search.Rows:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append((dataset, seeds))
        return every_arm(seeds[0], 0.9)

    monkeypatch.setattr(search, "run", run)
    arguments = ["--factors", "1", "8", "--seeds", "2", "--json", str(file)]
    with pytest.raises(KeyboardInterrupt):
        search.main(arguments)
    stored = json.loads(file.read_text())
    assert {name: len(rows) for name, rows in stored.items()} == {"digits": 24, "breast-cancer": 12}
    assert ran.pop() == ("breast-cancer", [0])
    assert search.main(arguments) == 0
    assert ran[2:] == [("breast-cancer", [1])]


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--rate", "0"], ["--factors", "0"], ["--dataset", "iris"]])
def test_invalid_arguments_are_rejected(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        search.main(wrong)
    assert "error" in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.long
def test_arms_train_one_after_another_and_uneven_batches_end_alike(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--dataset", "wine", "--seeds", "1", "--epochs", "2", "--factors", "1", "--json", str(file)]
    assert search.main(arguments) == 0
    rows = json.loads(file.read_text())["wine"]
    assert len(rows) == len(search.WAYS) * len(search.WEIGHTS)
    for way in search.WAYS:
        even, uneven = (next(r for r in rows if r["way"] == way and r["shares"] == s) for s in search.WEIGHTS)
        assert even["steps"] == uneven["steps"] > 0
        assert even["rate"] == pytest.approx(uneven["rate"], rel=0.05)
        assert even["accuracy"] == pytest.approx(uneven["accuracy"], abs=0.06)
