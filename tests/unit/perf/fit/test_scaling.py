"""Tests of the model of steps on many devices, of its fit to few or bad measurements, and of the choice of probes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.calibrate import MAX_PROBES, Posterior, Prior, fit, next_probe
from dljob.calibrate.prior import PROBING
from dljob.perf.fit.scaling import Constants, Floats, Runs, steps

TRUE = Constants(
    log_inter=0.3,
    busiest_power=0.1,
    mean_power=0.2,
    log_latency=-5.0,
    log_gamma=-0.3,
    spread=0.02,
    sharing=0.05,
    crowding=0.03,
    log_intra=-1.5,
    intra_power=0.6,
    log_growth=-2.0,
)
REFERENCE_S = 0.4


def one_s(batch: int) -> float:
    return 0.05 + 0.02 * batch


def runs(*places: tuple[int, int, int, int]) -> Runs:
    """Return runs from (nodes, devices on the busiest node, devices, batch) tuples."""
    nodes, busiest, devices, batch = np.array(places, dtype=float).reshape(-1, 4).T
    return Runs(nodes, busiest, devices, batch, np.array([one_s(p[3]) for p in places]))


GRID = runs(
    *((n, k, n * k, b) for n in (1, 2, 3, 4, 8, 16) for k in (1, 2, 4) for b in (4, 8, 16, 32) if n * k > 1),
)


def true_s(where: Runs) -> Floats:
    return np.exp(steps(TRUE, where, REFERENCE_S).log_s)


def error(posterior: Posterior, where: Runs = GRID) -> float:
    """Return the mean absolute percentage error."""
    return float(100 * np.mean(np.abs(posterior.predict(where).median_s / true_s(where) - 1)))


def probed(count: int) -> tuple[Posterior, list[int]]:
    measured: list[int] = []
    posterior = fit(REFERENCE_S, GRID.take(np.array([], dtype=np.int64)), np.array([]))
    for _ in range(count):
        at = next_probe(posterior, GRID, measured)
        assert at is not None
        measured.append(at)
        where = GRID.take(np.array(measured))
        posterior = fit(REFERENCE_S, where, true_s(where))
    return posterior, measured


vectors = st.builds(
    lambda *x: Constants(*x),
    st.floats(-3, 3), st.floats(-0.3, 0.6), st.floats(-0.3, 0.6), st.floats(-8, -1), st.floats(-3, 2),
    st.floats(-0.2, 0.2), st.floats(-0.2, 0.2), st.floats(-0.1, 0.2), st.floats(-6, 1), st.floats(0, 1.5),
    st.floats(-6, 0),
)  # fmt: skip
places = st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(1, 512)).map(
    lambda p: (p[0], p[1], p[0] - 1 + p[1], p[2])
)


class TestSteps:
    @given(vectors, st.lists(places, min_size=1, max_size=5))
    def test_derivatives_match_finite_differences(
        self, constants: Constants, at: list[tuple[int, int, int, int]]
    ) -> None:
        where, vector = runs(*at), constants.vector()
        found = steps(constants, where, REFERENCE_S)
        for i in range(len(vector)):
            move = np.zeros(len(vector))
            move[i] = 1e-5
            high, low = (steps(Constants(*(vector + s * move)), where, REFERENCE_S).log_s for s in (1, -1))
            assert found.jacobian[:, i] == pytest.approx((high - low) / 2e-5, abs=1e-5)

    @given(vectors, places)
    def test_step_time_is_between_the_maximum_and_the_sum_of_its_parts(
        self, constants: Constants, at: tuple[int, int, int, int]
    ) -> None:
        where = runs(at)
        # Change the communication time alone: it also depends on the computing time.
        much, little = (replace(where, communication_ratio=np.array([ratio])) for ratio in (1e15, 1e-15))
        whole_s, communication_s, compute_s = (
            float(np.exp(steps(constants, r, REFERENCE_S).log_s[0])) for r in (where, much, little)
        )
        communication_s /= 1e15
        if at[2] == 1:
            communication_s = 0.0
        assert max(communication_s, compute_s) * (1 - 1e-6) <= whole_s <= (communication_s + compute_s) * (1 + 1e-6)

    @given(vectors, places, st.floats(1.0, 100.0))
    def test_more_computing_never_shortens_a_step(
        self, constants: Constants, at: tuple[int, int, int, int], factor: float
    ) -> None:
        where = runs(at)
        longer = replace(where, one_s=factor * where.one_s)
        before, after = (steps(constants, r, REFERENCE_S).log_s[0] for r in (where, longer))
        assert after >= before - 1e-9

    @given(vectors, st.integers(2, 8), st.integers(1, 512))
    def test_communication_within_a_node_does_not_grow_with_the_batch(
        self, constants: Constants, devices: int, batch: int
    ) -> None:
        where = runs((1, devices, devices, batch))
        grown = replace(constants, log_growth=0.0)
        assert steps(grown, where, REFERENCE_S).log_s == pytest.approx(steps(constants, where, REFERENCE_S).log_s)

    @given(vectors, st.integers(1, 512))
    def test_one_device_has_no_communication(self, constants: Constants, batch: int) -> None:
        single = steps(constants, runs((1, 1, 1, batch)), REFERENCE_S)
        assert np.exp(single.log_s[0]) == pytest.approx(one_s(batch))
        assert single.share[0] == 0
        assert np.isfinite(single.jacobian).all()

    @given(vectors, places, st.floats(1e-4, 1e4))
    def test_step_time_scales_with_the_unit_of_time(
        self, constants: Constants, at: tuple[int, int, int, int], factor: float
    ) -> None:
        where = runs(at)
        slower = Runs(where.nodes, where.busiest, where.devices, where.batch, factor * where.one_s)
        plain = steps(constants, where, REFERENCE_S).log_s
        assert steps(constants, slower, factor * REFERENCE_S).log_s == pytest.approx(plain + np.log(factor))

    @pytest.mark.parametrize("place", [(2, 1, 1, 4), (0, 1, 1, 4), (2, 2, 5, 4), (1, 1, 1, 0)])
    def test_impossible_runs_are_rejected(self, place: tuple[int, int, int, int]) -> None:
        with pytest.raises(ValueError, match="1 or more devices on every node"):
            runs(place)


class TestFit:
    def test_fit_without_measurements_is_the_prior(self) -> None:
        posterior, _ = probed(0)
        assert posterior.constants == Prior().mean
        assert np.exp(steps(Prior().mean, GRID, REFERENCE_S).log_s) == pytest.approx(posterior.predict(GRID).median_s)

    def test_error_falls_with_more_probes(self) -> None:
        blind, three, five = (error(probed(n)[0]) for n in (0, 3, 5))
        assert five < 6 and three < 8 < blind

    def test_intervals_shrink_and_still_contain_the_truth(self) -> None:
        (before, _), (after, _) = probed(0), probed(4)
        wide, narrow = before.predict(GRID), after.predict(GRID)
        assert np.mean(np.log(narrow.high_s / narrow.low_s)) < 0.5 * np.mean(np.log(wide.high_s / wide.low_s))
        inside = (narrow.low_s <= true_s(GRID)) & (true_s(GRID) <= narrow.high_s)
        assert inside.mean() >= 0.9
        assert (narrow.low_s < narrow.median_s).all() and (narrow.median_s < narrow.high_s).all()
        higher = after.predict(GRID, 0.99)
        assert (higher.high_s > narrow.high_s).all()

    def test_measured_runs_have_the_smallest_variance(self) -> None:
        posterior, measured = probed(3)
        covariance, noise = posterior.covariance(GRID)
        variance = np.diag(covariance)
        assert (variance[measured] <= noise[measured] * 1.001).all()
        assert variance[measured].max() < np.median(variance)

    @pytest.mark.parametrize("log_growth", [-6.0, -1.0])
    def test_growth_of_communication_is_learned_from_two_batches(self, log_growth: float) -> None:
        grows = replace(TRUE, log_inter=1.5, log_growth=log_growth)
        where = runs((4, 1, 4, 4), (4, 1, 4, 32), (8, 1, 8, 4), (2, 1, 2, 16))
        posterior = fit(REFERENCE_S, where, np.exp(steps(grows, where, REFERENCE_S).log_s))
        asked = runs((8, 1, 8, 32), (16, 1, 16, 32))
        true = np.exp(steps(grows, asked, REFERENCE_S).log_s)
        assert posterior.predict(asked).median_s == pytest.approx(true, rel=0.12)

    def test_slow_session_affects_only_runs_with_the_same_number_of_nodes(self) -> None:
        """A switch was slow while 2 nodes were measured. Predictions for 4 nodes hardly change."""
        some = np.arange(0, len(GRID), 2)
        where = GRID.take(some)
        slow = np.where(where.nodes == 2, 1.5, 1.0)
        posterior = fit(REFERENCE_S, where, true_s(where) * slow)
        rest = GRID.take(np.setdiff1d(np.arange(len(GRID)), some))
        ratio = posterior.predict(rest).median_s / true_s(rest)
        assert np.median(ratio[rest.nodes == 2]) > 1.3
        assert np.median(ratio[rest.nodes >= 4]) == pytest.approx(1.0, abs=0.05)

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-9])
    def test_invalid_measurement_is_ignored(self, bad: float) -> None:
        where = runs((2, 1, 2, 8), (4, 2, 8, 8), (8, 1, 8, 16))
        good = true_s(where)
        clean = fit(REFERENCE_S, where.take(np.array([0, 2])), good[[0, 2]])
        dirty = fit(REFERENCE_S, where, np.array([good[0], bad, good[2]]))
        assert dirty.constants == clean.constants
        assert dirty.predict(GRID).median_s == pytest.approx(clean.predict(GRID).median_s)

    @pytest.mark.parametrize("factor", [1000.0, 10.0, 0.1])
    def test_outlier_among_many_measurements_has_little_effect(self, factor: float) -> None:
        where = GRID.take(np.arange(0, len(GRID), 3))
        good = true_s(where)
        bad = good.copy()
        bad[len(bad) // 2] *= factor
        before, after = (fit(REFERENCE_S, where, t) for t in (good, bad))
        moved = np.abs(np.log(after.predict(GRID).median_s / before.predict(GRID).median_s))
        assert np.median(moved) < 0.02

    def test_number_of_stored_measurements_is_bounded(self) -> None:
        many = GRID.take(np.arange(3000) % len(GRID))
        posterior = fit(REFERENCE_S, many, true_s(many))
        assert len(posterior.given) <= 256
        assert error(posterior) < 2

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, len(GRID) - 1), st.floats(allow_nan=True)), max_size=12))
    def test_predictions_are_finite_and_positive_for_any_measurements(self, found: list[tuple[int, float]]) -> None:
        where = GRID.take(np.array([i for i, _ in found], dtype=np.int64))
        predicted = fit(REFERENCE_S, where, np.array([s for _, s in found])).predict(GRID)
        for end in (predicted.low_s, predicted.median_s, predicted.high_s):
            assert np.isfinite(end).all() and (end > 0).all()


class TestOtherPriors:
    @pytest.mark.parametrize("count", [0, 3, 6])
    def test_same_measurements_give_the_same_fit(self, count: int) -> None:
        posterior = probed(min(count, MAX_PROBES))[0]
        again = posterior.with_prior(posterior.prior)
        assert again.predict(GRID).median_s == pytest.approx(posterior.predict(GRID).median_s)

    def test_an_overlap_that_was_measured_is_learned_even_if_it_is_extreme(self) -> None:
        """Steps that add up (gamma 1.02), as on the clusters of Gavel, are predicted better than by the earlier prior."""
        added = replace(TRUE, log_gamma=-4.0)
        where = GRID.take(np.arange(0, len(GRID), 9))
        step_s, true = (np.exp(steps(added, each, REFERENCE_S).log_s) for each in (where, GRID))
        errors = [
            np.abs(fit(REFERENCE_S, where, step_s, prior).predict(GRID).median_s / true - 1).mean()
            for prior in (Prior(), PROBING)
        ]
        assert errors[0] < errors[1]


class TestProbes:
    def test_at_most_five_distinct_probes_are_suggested(self) -> None:
        posterior, measured = probed(MAX_PROBES)
        assert len(set(measured)) == MAX_PROBES == 5
        assert next_probe(posterior, GRID, measured) is None

    def test_no_probe_is_suggested_if_all_are_measured(self) -> None:
        posterior, _ = probed(0)
        only = runs((2, 1, 2, 8))
        assert next_probe(posterior, only) == 0
        assert next_probe(posterior, only, [0]) is None

    def test_next_probe_minimizes_the_remaining_variance(self) -> None:
        """By the model's formula and the prior of probes, no other run would leave less variance."""
        posterior, _ = probed(1)
        covariance, noise = posterior.with_prior(PROBING).covariance(GRID)
        left = [
            np.trace(covariance) - (covariance[:, j] ** 2).sum() / (covariance[j, j] + noise[j])
            for j in range(len(GRID))
        ]
        assert next_probe(posterior, GRID) == int(np.argmin(left))

    def test_chosen_probes_are_better_than_random_ones(self) -> None:
        posterior, _ = probed(3)
        rng = np.random.default_rng(0)
        others = []
        for _ in range(15):
            where = GRID.take(rng.choice(len(GRID), 3, replace=False))
            others.append(error(fit(REFERENCE_S, where, true_s(where))))
        assert error(posterior) < np.mean(others)
