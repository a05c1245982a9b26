"""Tests of benchmarks/perfmodel/literature.py: gradient layouts, and the layered parameter server against one ring."""

from itertools import pairwise

import pytest
from benchmarks.perfmodel import literature
from benchmarks.perfmodel.gradient_layouts import LAYOUTS
from benchmarks.perfmodel.literature import NODES, PUBLISHED, Constants, latency_only, misses, times, worst

STATED = Constants()


def test_layouts_have_the_published_sizes() -> None:
    assert {name: len(sizes) for name, sizes in LAYOUTS.items()} == {"AlexNet": 16, "GoogLeNet": 128, "ResNet-50": 161}
    assert {name: sum(sizes) for name, sizes in LAYOUTS.items()} == {
        "AlexNet": 60_965_224, "GoogLeNet": 13_378_280, "ResNet-50": 25_557_032,
    }  # fmt: skip


@pytest.mark.parametrize("model", LAYOUTS)
def test_ratio_rises_with_nodes_on_fast_links(model: str) -> None:
    for a, b in pairwise(times(LAYOUTS[model], n, STATED).ratio for n in NODES):
        assert a < b


def test_latency_only_is_the_limit_of_the_model() -> None:
    slow = Constants(alpha_s=1e3)  # bytes cost nothing beside it
    for model, sizes in LAYOUTS.items():
        nodes = PUBLISHED[model].nodes
        synchronizing = 1 + 2 * (nodes - 1).bit_length() / (nodes - 1)
        broadcast = 1 + (nodes - 1).bit_length() / (len(sizes) * (nodes - 1) * synchronizing)
        expected = latency_only(len(sizes), nodes) * synchronizing * broadcast
        assert times(sizes, nodes, slow).ratio == pytest.approx(expected, rel=1e-3)


def test_stated_links_and_no_latency_predict_half_of_the_nodes() -> None:
    """By volume alone, the server's link carries n - 1 gradients, where a ring's link carries 2 (n - 1) / n."""
    only_volume = Constants(alpha_s=1e-15, reduce_Bps=1e18, update_Bps=1e18)
    found = times(LAYOUTS["AlexNet"], 256, only_volume).gather_s / times(LAYOUTS["AlexNet"], 256, only_volume).ring_s
    assert found == pytest.approx(256 / 2, rel=1e-3)


@pytest.mark.parametrize("gather", ["Serial", "Tree"])
def test_search_is_better_than_the_stated_constants(gather: literature.Gather) -> None:
    best = literature.search(gather)
    assert worst(misses(best, gather)) < 1.7 < worst(misses(STATED, gather))


def test_no_set_of_constants_that_explains_the_points_explains_little_difference_on_few_nodes() -> None:
    """A finding that note 0007 and docs/papers.md report."""
    for gather in ("Serial", "Tree"):
        best = literature.search(gather)
        assert all(literature.leaves_similar(model, best, gather) == 2 for model in LAYOUTS)


def test_command_runs_and_rejects_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert literature.main([]) == 0
    assert "AlexNet on 256 nodes: published 10" in capsys.readouterr().out
    assert literature.main(["--json"]) == 0
    for wrong in (["--bandwidth-GBps", "0"], ["--reduce-GBps", "-1"], ["--alpha-us", "nan"]):
        with pytest.raises(SystemExit):
            literature.main(wrong)
