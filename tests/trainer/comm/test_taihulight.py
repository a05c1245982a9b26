"""Tests of benchmarks/papers/taihulight.py: a small case on real ranks, and its page."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.papers import taihulight
from benchmarks.papers.taihulight_page import (
    COMPARISONS,
    bottleneck,
    published_table,
    ratios_table,
    remarks,
    times_table,
)
from benchmarks.papers.taihulight_ranks import FORCED, MEASURES, OPEN_MPI, RING, SERVER, WAYS
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
    assert len(root.findall(".//figure")) == len(LAYOUTS) + len(COMPARISONS) + 4, "four plots are by the model alone"
    assert "published: 98" in page.read_text()
    assert all(row["free_s"] is None and row["ranks_load"] >= 0 for row in rows)


LINK = Link(100e-6, 6.25e6)


def run_of(seconds: float) -> dict[str, Any]:
    """Return what eight ranks print if each exchange takes ``seconds`` in two rounds, and a quarter of a processor."""
    measures = dict(zip(MEASURES, ([seconds, seconds], [seconds / 4] * 2, [seconds / 2] * 2), strict=True))
    return {"found": {model: dict.fromkeys(WAYS, measures) for model in LAYOUTS}}


@pytest.mark.parametrize(("free_s", "expected"), [(0.4, "links"), (0.9, "processors"), (None, "-")])
def test_a_second_run_on_unlimited_links_tells_what_takes_the_time(
    free_s: float | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    free = None if free_s is None else run_of(free_s)
    rows = taihulight.rows_of(8, LINK, run_of(1.0), free, taihulight.scaled(16))
    assert len(rows) == len(LAYOUTS) * len(WAYS)
    assert {bottleneck(row) for row in rows} == {expected}
    assert rows[0]["ranks_load"] == pytest.approx(1 / 8) and rows[0]["machine_load"] == pytest.approx(1 / 4)
    head, cells = times_table(rows)
    assert {len(head)} == {len(line) for line in cells} and cells[0][-2:] == ["12 %, 25 %", expected]
    head, cells = ratios_table(rows)
    assert {len(head)} == {len(line) for line in cells}
    assert {line[-1] for line in cells} == {expected} and {line[3] for line in cells} == {"1.00"}
    latency, others, *limited = remarks(rows)
    assert "100 us" in latency and "12 %" in others and bool(limited) == (expected == "processors")


def test_all_links_together_have_the_same_rate_for_any_number_of_ranks() -> None:
    assert {n * taihulight.rate_of(n, None) for n in range(2, 9)} == {taihulight.ALL_LINKS_MBps}
    assert taihulight.rate_of(8, 25.0) == 25.0


def test_open_mpis_ring_is_predicted_as_a_ring_and_its_choice_as_no_slower() -> None:
    sizes = taihulight.scaled(16)["AlexNet"]
    ring, forced, chosen = (taihulight.predicted(way, sizes, 8, LINK) for way in (RING, FORCED, OPEN_MPI))
    assert chosen <= forced == ring


def test_published_figures_have_the_right_models() -> None:
    """Figures 7 to 11 of the paper, as docs/papers.md has them."""
    assert [line[:3] for line in published_table()[1]] == [
        ["9: AlexNet, server / ring", "256", "10"],
        ["10: GoogLeNet, server / ring", "32", "77"],
        ["11: ResNet-50, server / ring", "32", "98"],
        ["7, 8: MPI_Allreduce / ring, 60.97 MB", "512", "2.3 to 4.1"],
        ["7, 8: MPI_Allreduce / ring, 243.9 MB", "512", "2.3 to 4.1"],
    ]


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
