"""Tests of benchmarks/perfmodel/literature.py: published model sizes, and parameter server compared with ring."""

from itertools import pairwise

import pytest
from benchmarks.perfmodel import literature

from dljob.perf.step.communication import Link

LINK = Link(50e-6, 1.25e9)


def test_models_have_their_published_sizes() -> None:
    sizes = {name: sum(layers) / 1e6 for name, layers in literature.MODELS.items()}
    assert sizes == pytest.approx({"AlexNet": 61.1, "GoogLeNet": 6.62, "ResNet-50": 25.56}, rel=0.001)
    assert [len(layers) for layers in literature.MODELS.values()] == [8, 58, 54], (
        "norms are merged with their convolutions"
    )


@pytest.mark.parametrize("model", literature.MODELS)
@pytest.mark.parametrize("servers", [1, 4, 8])
def test_ratio_rises_with_nodes_if_they_outnumber_servers(model: str, servers: int) -> None:
    rows = [literature.row(model, n, servers, LINK) for n in literature.NODES if n >= 4 * servers]
    for a, b in pairwise(rows):
        assert a.whole_ratio < b.whole_ratio
        assert a.layered_ratio < b.layered_ratio


def test_crossing_depends_on_latency() -> None:
    fast, slow = Link(1e-7, 1.25e9), Link(1e-3, 1.25e9)
    assert literature.crossing("GoogLeNet", 1, fast, layered=True) == 2
    found = literature.crossing("ResNet-50", 4, slow, layered=True)
    assert found is None or found > 8


def test_command_runs_and_rejects_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert literature.main(["--servers", "4", "8"]) == 0
    assert "2.3 to 4.1" in capsys.readouterr().out
    assert literature.main(["--json"]) == 0
    for wrong in (["--bandwidth-GBps", "0"], ["--servers", "0"], ["--alpha-us", "nan"]):
        with pytest.raises(SystemExit):
            literature.main(wrong)
