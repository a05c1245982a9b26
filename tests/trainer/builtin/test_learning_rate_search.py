"""Tests of benchmarks/papers/learning_rate_search.py: paired differences, and a small case on two ranks."""

from typing import Any

import pytest
from benchmarks.papers import learning_rate_search as search


def row(seed: int, shares: str, accuracy: float, way: str = "Loss") -> dict[str, Any]:
    return {"seed": seed, "factor": 1, "way": way, "shares": shares, "accuracy": accuracy, "rate": 0.1, "found": True}


def test_differences_are_paired_by_seed() -> None:
    rows = [row(0, "even", 0.9), row(1, "even", 0.8), row(0, "uneven", 0.91), row(1, "uneven", 0.83)]
    points, error = search.difference(rows, {"shares": "uneven"}, {"shares": "even"})
    assert points == pytest.approx(2.0) and error == pytest.approx(1.0)
    assert search.difference(rows[::2], {"shares": "uneven"}, {"shares": "even"})[1] is None
    assert search.text((1.0, None)) == "+1.00" and search.text((-1.0, 0.5)) == "-1.00 ± 0.50"


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--rate", "0"], ["--factors", "0"], ["--dataset", "iris"]])
def test_invalid_arguments_are_rejected(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        search.main(wrong)
    assert "error" in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.long
def test_arms_train_one_after_another_and_uneven_batches_end_alike(tmp_path: Any) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--dataset", "wine", "--seeds", "1", "--epochs", "2", "--factors", "1", "--json", str(file)]
    assert search.main(arguments) == 0
    rows = search.json.loads(file.read_text())["wine"]
    assert len(rows) == len(search.WAYS) * len(search.WEIGHTS)
    for way in search.WAYS:
        even, uneven = (next(r for r in rows if r["way"] == way and r["shares"] == s) for s in search.WEIGHTS)
        assert even["steps"] == uneven["steps"] > 0
        assert even["rate"] == pytest.approx(uneven["rate"], rel=0.05)
        assert even["accuracy"] == pytest.approx(uneven["accuracy"], abs=0.06)
