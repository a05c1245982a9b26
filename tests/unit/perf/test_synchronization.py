"""Tests of waiting in synchronous, stale-synchronous and asynchronous training."""

import pytest
from benchmarks.perfmodel import sync_simulation
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.step.asynchronous import round_of
from dljob.perf.step.communication import Link
from dljob.perf.step.step import Step
from dljob.perf.step.synchronization import asynchronous_updates_per_s, stale_factor, staleness, straggler_factor

ranks = st.integers(1, 500)
variations = st.floats(0.0, 0.5)


@given(ranks, st.integers(0, 50), variations)
def test_larger_bound_never_waits_longer(n: int, bound: int, v: float) -> None:
    assert 1 <= stale_factor(n, bound + 1, v) <= stale_factor(n, bound, v) <= straggler_factor(n, v)


@given(st.integers(1, 200), st.floats(0.0, 10.0), st.floats(1e-4, 1.0), variations)
def test_update_rate_is_limited_by_workers_and_server(n: int, think_s: float, service_s: float, v: float) -> None:
    rate = asynchronous_updates_per_s(n, think_s, service_s, v)
    assert 0 < rate <= min(n / (think_s + service_s), 1 / service_s) * (1 + 1e-12)


@given(st.integers(1, 100), st.floats(0.0, 10.0), st.floats(1e-4, 1.0), variations)
def test_more_workers_never_lower_the_update_rate(n: int, think_s: float, service_s: float, v: float) -> None:
    fewer, more = (asynchronous_updates_per_s(k, think_s, service_s, v) for k in (n, n + 1))
    assert more >= fewer * (1 - 1e-9)


@pytest.mark.parametrize(
    "n, bound, v", [(4, 0, 0.3), (32, 0, 0.03), (128, 0, 0.3), (8, 1, 0.1), (32, 4, 0.3), (2, 2, 0.3)]
)
def test_stale_synchronous_step_matches_simulation(n: int, bound: int, v: float) -> None:
    assert stale_factor(n, bound, v) == pytest.approx(sync_simulation.bounded_step(n, bound, v, 2000), rel=0.05)


@pytest.mark.parametrize("n, load, v", [(4, 0.3, 0.1), (8, 1.0, 0.03), (8, 1.0, 0.1), (16, 0.8, 0.3), (32, 2.0, 0.1)])
def test_update_rate_and_staleness_match_simulation(n: int, load: float, v: float) -> None:
    service_s = load / n
    rate, stale = sync_simulation.asynchronous(n, 1 - service_s, service_s, v, 10_000)
    assert asynchronous_updates_per_s(n, 1 - service_s, service_s, v) == pytest.approx(rate, rel=0.05)
    assert staleness(n) == pytest.approx(stale, rel=0.05)


@pytest.mark.parametrize(
    "n, think_s, service_s", [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, 1.0, 0.0), (1, float("nan"), 1.0)]
)
def test_invalid_input_is_rejected(n: int, think_s: float, service_s: float) -> None:
    with pytest.raises(ValueError, match="expected one worker or more"):
        asynchronous_updates_per_s(n, think_s, service_s)


@given(st.integers(1, 30), st.floats(1e-3, 10), st.floats(1e3, 1e9), st.integers(1, 9), st.floats(0, 10))
def test_asynchronous_round_is_at_least_as_long_as_its_parts(
    n: int, compute_s: float, nbytes: float, bound: int, update_s: float
) -> None:
    """The parts are the server's time for all workers and a worker's own time. A smaller bound adds more waiting."""
    link = Link(1e-4, 1e8)
    synchronous = Step(compute_s, 0.1, 0.2, 0.3, 0.1)
    free, narrow, wide = (
        round_of(synchronous, n, nbytes, link, b, server_update_s=update_s) for b in (None, bound, bound + 1)
    )
    service_s = 2e-4 + 2 * nbytes / 1e8 + update_s
    assert free.step_s >= max(n * service_s, compute_s + 0.2 + service_s) * (1 - 1e-9)
    assert free.step_s <= wide.step_s <= narrow.step_s


def test_workers_without_a_barrier_leave_the_update_to_the_server() -> None:
    """The update of a synchronous rank is a part of its computing. The server's is a part of the communication."""
    synchronous = Step(compute_s=0.5, communication_s=0.1, data_s=0.0, waiting_s=0.0, spread=0.1)
    found = round_of(synchronous, 1, 1e6, Link(0.0, 1e9), None, own_update_s=0.2, server_update_s=0.3)
    assert found.compute_s == pytest.approx(0.3)
    assert found.communication_s == pytest.approx(2e-3 + 0.3)
