"""Tests of benchmarks/papers/taihulight.py: a small case on real ranks, and its page."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.papers import taihulight
from benchmarks.papers.taihulight_ranks import RING, SERVER, WAYS
from benchmarks.perfmodel.gradient_layouts import LAYOUTS

from dljob.perf.step.communication import Link


@pytest.mark.mpi
def test_small_case_measures_all_ways_and_writes_a_page(tmp_path: Path) -> None:
    """The ranks check the sums themselves."""
    page, file = tmp_path / "page.html", tmp_path / "rows.json"
    arguments = ["--transport", "memory", "--ranks", "3", "--scale", "4096", "--rounds", "1"]
    assert taihulight.main([*arguments, "--html", str(page), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {(row["model"], row["way"]) for row in rows} == {(model, way) for model in LAYOUTS for way in WAYS}
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in rows)
    root = ElementTree.fromstring(page.read_text().removeprefix("<!DOCTYPE html>\n"))
    assert len(root.findall(".//figure")) == 6
    assert "published: 98" in page.read_text()


def test_scaled_layouts_keep_every_tensor() -> None:
    assert {name: len(sizes) for name, sizes in taihulight.scaled(10**9).items()} == {
        name: len(sizes) for name, sizes in LAYOUTS.items()
    }
    assert all(size == 1 for sizes in taihulight.scaled(10**9).values() for size in sizes)


@pytest.mark.parametrize("model", LAYOUTS)
def test_server_is_predicted_to_be_slower_than_the_ring_on_slow_links(model: str) -> None:
    link, sizes = Link(100e-6, 25e6), taihulight.scaled(16)[model]
    ratios = [
        taihulight.predicted(SERVER, sizes, n, link) / taihulight.predicted(RING, sizes, n, link) for n in (2, 4, 8)
    ]
    assert 1 < ratios[0] < ratios[1] < ratios[2]


@pytest.mark.parametrize(
    "wrong", [["--ranks", "1"], ["--ranks", "9"], ["--scale", "0"], ["--rate", "nan"], ["--rate", "0"]]
)
def test_invalid_arguments_are_rejected(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        taihulight.main(wrong)
    assert "expected" in capsys.readouterr().err
