"""Tests of benchmarks/papers/framework_constants.py and synchronization.py: fits of known constants, small cases."""

from math import log
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.papers import framework_constants, synchronization
from benchmarks.papers.framework_constants import Point, fitted, link_of, spread
from benchmarks.papers.synchronization_ranks import pauses_s
from benchmarks.training.ranks.allreduce import BUTTERFLY, GLOO, RING


def points(latency: float, bandwidth: float, errors: dict[int, float]) -> list[Point]:
    """Return points of links of 100 us and 10 MB/s with these ratios; ``errors``: factor by number of ranks."""
    found = []
    for ranks in (2, 3, 4):
        for nbytes in (2**8, 2**16, 2**21):
            one = Point(RING, ranks, nbytes, 1.0, 1e-4, 1e7)
            found.append(Point(RING, ranks, nbytes, one.predicted_s(latency, bandwidth) * errors[ranks], 1e-4, 1e7))
    return found


def test_fit_finds_the_ratios_and_the_spread_of_the_rest() -> None:
    exact = points(3.0, 0.8, {2: 1.0, 3: 1.0, 4: 1.0})
    assert fitted(exact) == pytest.approx((3.0, 0.8), rel=1e-3)
    assert spread(exact) == pytest.approx(0, abs=1e-3)
    assert 0.1 < spread(points(3.0, 0.8, {2: 1.0, 3: 1.2, 4: 1.0})) < 0.3


def test_ratios_within_a_machine_are_those_to_mpi() -> None:
    own = {"latency": 4.0, "bandwidth": 2.0, "spread": 0.5, "points": 7}
    found = framework_constants.relative({"MPI": own, "Gloo": own | {"latency": 8.0, "bandwidth": 1.0}})
    assert found["MPI"] == own | {"latency": 1.0, "bandwidth": 1.0}
    assert (found["Gloo"]["latency"], found["Gloo"]["bandwidth"], found["Gloo"]["spread"]) == (2.0, 0.5, 0.5)


def test_exchanges_give_the_link() -> None:
    latency_s, bandwidth_Bps = link_of([(n, 1e-4 + n / 1e7) for n in (2**3, 2**16, 2**20)])
    assert latency_s == pytest.approx(1e-4, rel=0.02) and bandwidth_Bps == pytest.approx(1e7, rel=0.01)


def test_a_points_prediction_follows_its_candidate() -> None:
    ring, butterfly, gloo = (Point(name, 4, 2**20, 1.0, 1e-4, 1e7).predicted_s() for name in (RING, BUTTERFLY, GLOO))
    assert ring == gloo < butterfly and log(ring) < 0


@pytest.mark.parametrize(
    "wrong", [["--ranks", "2"], ["--ranks", "2", "9"], ["--rates", "0"], ["--rounds", "0"], ["--transport", "x"]]
)
def test_invalid_arguments_of_constants_are_rejected(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        framework_constants.main(wrong)
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--workers", "1"], ["--steps", "5"], ["--pause", "0"], ["--slow", "1"]])
def test_invalid_arguments_of_synchronization_are_rejected(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        synchronization.main(wrong)
    assert "expected" in capsys.readouterr().err


def test_pace_of_workers_counts_steps_while_all_train() -> None:
    """Worker 0 is half as fast. Its steps decide when the job ends, and all steps count for the throughput."""
    began = [[2.0 * i for i in range(25)], [1.0 * i for i in range(25)]]
    measure = {"compute_s": 0.5, "comm_s": 0.25, "wait_s": 0.125, "data_s": 0.0}
    found = synchronization.timed(began, {0: measure, 1: measure | {"compute_s": 1.5}})
    assert found.step_s == pytest.approx(2.0)
    assert found.updates_per_s == pytest.approx(1.5, rel=0.1)
    assert found.phases_s["compute_s"] == 1.0 and found.sum_s == pytest.approx(1.375)


def test_a_bound_makes_workers_wait_for_a_slowed_one_and_no_bound_does_not() -> None:
    """Without an all-reduce and a server's time, BSP and SSP go at the pace of the slowed worker."""
    options: Any = SimpleNamespace(variation=0.3, pause=0.1, bound=2)
    measured = synchronization.Measured(0.2, 10.0, dict.fromkeys(synchronization.PHASES, 0.05), (0.2, 0.1, 0.1))
    found = {
        kind: synchronization.predicted(kind, 2.0, measured, 1e-9, 1e-9, options) for kind in synchronization.KINDS
    }
    assert [row.predicted_step_s for row in found.values()] == pytest.approx([0.2, 0.2, 0.2])
    rates = [row.predicted_updates_per_s for row in found.values()]
    assert rates == pytest.approx([15, 15, 25]), "without a bound, 1 / 0.2 + 2 / 0.1 updates in a second"
    even = synchronization.Measured(0.1, 30.0, measured.phases_s, (0.1, 0.1, 0.1))
    bsp, ssp, asp = (
        synchronization.predicted(kind, 1.0, even, 1e-9, 1e-9, options).predicted_step_s
        for kind in synchronization.KINDS
    )
    assert bsp > ssp > asp > 0.0999


def test_pauses_are_equal_for_all_kinds_and_have_their_mean() -> None:
    drawn = pauses_s(1, 0.1, 0.3, 4000)
    assert drawn == pauses_s(1, 0.1, 0.3, 4000) != pauses_s(2, 0.1, 0.3, 4000)
    assert sum(drawn) / 4000 == pytest.approx(0.1, rel=0.05) and pauses_s(1, 0.1, 0.0, 2) == [0.1, 0.1]


@pytest.mark.mpi
@pytest.mark.long
def test_small_case_measures_every_kind() -> None:
    """Real ranks run each kind. Workers of SSP and asynchronous training make all of their steps."""
    options: Any = SimpleNamespace(steps=20, pause=0.01, width=64, bound=2, deadline=120.0)
    for kind in synchronization.KINDS:
        found = synchronization.run(kind, 2, 2.0, 0.3, options)
        assert found.step_s > 0.01 and found.updates_per_s > 0 and len(found.compute_s) == 2
