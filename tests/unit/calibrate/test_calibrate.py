"""Tests of calibration: how runs update profiles, and robustness against bad measurements."""

from dataclasses import replace
from datetime import UTC, datetime
from math import inf, log, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import Mismatch, ProbePoint, RankMeasure, Report, RunPhase
from dljob.api import ComputePoint, DLProfileStatus
from dljob.calibrate import MAX_POINTS, Measured, Place, in_session, learn, without_outliers
from dljob.calibrate.learned import Repeats
from dljob.job.identity import profile_name
from dljob.job.profiles import devices, learned, updated_profile
from dljob.planner import Learned, LearnedPoint

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def line(batch: int) -> float:
    return 0.002 + 1e-4 * batch


def measured(*batches: int, factor: float = 1.0) -> list[Measured]:
    return [Measured(b, factor * line(b), 5) for b in batches]


def times(known: Learned) -> dict[int, float]:
    return {p.batch: p.compute_s for p in known.points}


class TestLearn:
    def test_measurements_are_stored(self) -> None:
        known = learn(Learned(), measured(8, 16, 32), link_latency_s=1e-4, link_bandwidth_Bps=1e9)
        assert times(known) == pytest.approx({b: line(b) for b in (8, 16, 32)})
        assert (known.link_latency_s, known.link_bandwidth_Bps) == (1e-4, 1e9)

    BAD = (0.0, -1.0, nan, inf, -inf, 1e-9, 1e9)

    @pytest.mark.parametrize("bad", BAD)
    def test_invalid_measurement_is_ignored(self, bad: float) -> None:
        before = learn(Learned(), measured(8, 16, 32), link_latency_s=1e-4, link_bandwidth_Bps=1e9)
        after = learn(before, [Measured(16, bad)], [Measured(8, bad)], bad, bad if bad != 1e9 else nan)
        assert after == before

    @given(
        st.lists(st.sampled_from([8, 12, 16, 24, 32, 64, 128]), min_size=3, max_size=9),
        st.data(),
        st.sampled_from([1e3, 1e-3, 1e4, 1e-4]),
    )
    def test_outlier_has_little_effect(self, batches: list[int], data: st.DataObject, factor: float) -> None:
        """One measurement that is off by a factor of 1000 among three or more good ones changes points by at most 5 %."""
        bad = data.draw(st.sampled_from(batches))
        known = learn(Learned(), [*measured(*batches), Measured(bad, line(bad) * factor, 5)])
        for batch, seconds in times(known).items():
            assert seconds == pytest.approx(line(batch), rel=0.05)

    def test_single_outlier_is_detected_by_the_catalogue(self) -> None:
        assert learn(Learned(), [Measured(8, 1000 * line(8))], expected_s=line).points == ()
        assert times(learn(Learned(), [Measured(8, 5 * line(8))], expected_s=line)) == {8: 5 * line(8)}

    @pytest.mark.parametrize("lie", [100.0, 0.01])
    def test_a_run_replaces_a_stored_time_that_is_far_from_the_expected_one(self, lie: float) -> None:
        stored = Learned((LearnedPoint(8, lie * line(8), 200),))
        assert times(learn(stored, [Measured(8, 2 * line(8))], expected_s=line)) == {8: 2 * line(8)}

    def test_profile_follows_a_slower_device_within_a_few_runs(self) -> None:
        known = Learned()
        for _ in range(20):
            known = learn(known, measured(16))
        for _ in range(60):
            known = learn(known, measured(16, factor=2.0))
        assert times(known)[16] == pytest.approx(2 * line(16), rel=0.1)

    @pytest.mark.parametrize("factor", [0.2, 0.5, 1.4, 3.0])
    @pytest.mark.parametrize("ranks", [1, 4])
    def test_one_disturbed_run_hardly_moves_a_strong_history(self, ranks: int, factor: float) -> None:
        """Fixed bug: a run of four ranks counted two thirds of the mean, against 20 earlier runs."""
        good, bad = ([Measured(16, each * line(16), 50)] * ranks for each in (1.0, factor))
        known = Learned(repeats=Repeats(19, 0.1))
        for _ in range(20):
            known = learn(known, good, fetch_s=0.01)
        known = learn(replace(known, repeats=Repeats(20, 0.1)), bad, fetch_s=0.01 * factor)
        assert times(known)[16] == pytest.approx(line(16), rel=0.06)
        assert known.fetch_s is not None
        assert abs(log(known.fetch_s / 0.01)) <= 0.26 * abs(log(factor))
        known = learn(known, good)
        assert times(known)[16] == pytest.approx(line(16), rel=0.03), "the next run corrects it"

    @pytest.mark.parametrize("factor", [0.2, 0.5, 1.4, 3.0])
    @pytest.mark.parametrize("ranks", [1, 4])
    def test_a_lasting_change_is_learned_within_four_runs(self, ranks: int, factor: float) -> None:
        known = Learned()
        for _ in range(20):
            known = learn(known, [Measured(16, line(16), 50)] * ranks)
        for _ in range(4):
            known = learn(known, [Measured(16, factor * line(16), 50)] * ranks)
        assert abs(log(times(known)[16] / line(16)) / log(factor) - 1) < 0.2

    def test_one_bad_run_has_little_effect_on_a_well_measured_point(self) -> None:
        known = Learned((LearnedPoint(16, line(16), 200),))
        after = learn(known, measured(16, factor=2.5))
        assert times(after)[16] == pytest.approx(line(16), rel=0.05)

    @given(st.lists(st.integers(1, 10**6), min_size=1, max_size=200, unique=True))
    def test_profile_is_bounded_and_keeps_the_extreme_batches(self, batches: list[int]) -> None:
        known = learn(Learned(), measured(*batches))
        assert len(known.points) <= MAX_POINTS
        stored = [p.batch for p in known.points]
        assert stored == sorted(stored)
        assert (stored[0], stored[-1]) == (min(batches), max(batches))

    @given(st.lists(st.tuples(st.integers(1, 500), st.floats(allow_nan=True)), max_size=20))
    def test_points_are_valid_after_any_measurements(self, raw: list[tuple[int, float]]) -> None:
        known = learn(Learned(), [Measured(b, s) for b, s in raw])
        assert all(0 < p.compute_s < 1e6 for p in known.points)

    @given(st.lists(st.integers(1, 500), min_size=1, max_size=10, unique=True), st.floats(0.1, 10.0))
    def test_profile_scales_with_the_unit_of_time(self, batches: list[int], factor: float) -> None:
        once, scaled = (times(learn(Learned(), measured(*batches, factor=f))) for f in (1.0, factor))
        assert {b: factor * s for b, s in once.items()} == pytest.approx(scaled)

    def test_probes_are_scaled_to_the_run_that_follows(self) -> None:
        both = in_session([Measured(32, 0.010)], [Measured(16, 0.003), Measured(32, 0.005), Measured(64, 0.009)])
        assert {m.batch: m.compute_s for m in both} == pytest.approx({32: 0.010, 16: 0.006, 64: 0.018})

    def test_measurements_of_ranks_with_small_differences_are_all_used(self) -> None:
        near = [Measured(b, line(b) * f) for b in (8, 16, 32) for f in (0.8, 1.0, 1.3)]
        assert without_outliers(near) == near


def report(**fields: Any) -> Report:
    base = Report(uid="u", plan_number=1, plan_digest="d", term=1, phase=RunPhase.SUCCEEDED, unix_s=1.0)
    return base.model_copy(update=fields)


def on_t4(ranks: int, compute_s: float, step_s: float | None) -> Report:
    measures = tuple(RankMeasure(rank=i, device="t4", share=32, compute_s=compute_s) for i in range(ranks))
    return report(ranks=measures, step_s=step_s)


class TestProfiles:
    RUN = report(
        ranks=(
            RankMeasure(rank=0, device="cpu", share=32, compute_s=0.012),
            RankMeasure(rank=1, device="cpu", share=32, compute_s=0.014),
            RankMeasure(rank=2, device="cpu-slow", share=8, compute_s=0.013),
        ),
        probes=(
            ProbePoint(device="cpu", batch=16, compute_s=0.006),
            ProbePoint(device="cpu", batch=32, compute_s=0.010),
            ProbePoint(device="cpu-slow", batch=8, compute_s=0.012),
        ),
        link_latency_s=2e-4,
        link_bandwidth_Bps=5e8,
    )

    def test_run_updates_the_profile_of_each_device(self) -> None:
        assert devices(self.RUN) == ("cpu", "cpu-slow")
        status = updated_profile(DLProfileStatus(), "digits-cnn", "cpu", self.RUN, NOW)
        assert [p.batch for p in status.compute] == [16, 32]
        assert status.compute[1].seconds == pytest.approx(0.013)
        assert status.compute[0].seconds == pytest.approx(0.006 * 1.3, rel=0.02)
        assert (status.link_latency_seconds, status.link_bandwidth_bytes_per_second) == (2e-4, 5e8)
        assert (status.observed_jobs, status.updated) == (1, NOW)
        slow = updated_profile(DLProfileStatus(), "digits-cnn", "cpu-slow", self.RUN, NOW)
        assert {p.batch: p.seconds for p in slow.compute} == pytest.approx({8: 0.013})

    def test_run_with_a_device_mismatch_is_ignored(self) -> None:
        wrong = self.RUN.model_copy(update={"mismatches": (Mismatch(rank=0, planned="t4", found="cpu"),)})
        assert devices(wrong) == ()
        before = DLProfileStatus(compute=(ComputePoint(batch=1, seconds=1.0),))
        assert updated_profile(before, "digits-cnn", "cpu", wrong, NOW) is before

    def test_profile_of_an_unused_device_is_unchanged(self) -> None:
        assert updated_profile(DLProfileStatus(), "digits-cnn", "t4", self.RUN, NOW) == DLProfileStatus()

    def test_implausible_measurements_of_a_known_model_are_ignored(self) -> None:
        odd = report(probes=(ProbePoint(device="cpu", batch=8, compute_s=5000.0),))
        assert updated_profile(DLProfileStatus(), "digits-cnn", "cpu", odd, NOW).compute == ()
        assert len(updated_profile(DLProfileStatus(), "program-1", "cpu", odd, NOW).compute) == 1

    def test_run_measures_the_time_to_prepare_a_sample(self) -> None:
        """The profile stores the median of the ranks and moves half-way to the next run. The plan uses it."""

        def after(before: DLProfileStatus, *fetch_s: float) -> DLProfileStatus:
            ranks = [
                RankMeasure(rank=i, device="t4", share=32, compute_s=0.1, fetch_s=f) for i, f in enumerate(fetch_s)
            ]
            return updated_profile(before, "program-1", "t4", report(ranks=tuple(ranks)), NOW)

        first = after(DLProfileStatus(), 0.32, 0.64, 3.2, 0.0)
        assert learned(first).fetch_s == first.fetch_seconds_per_sample == pytest.approx(0.02)
        assert after(first, 0.16).fetch_seconds_per_sample == pytest.approx(0.01)
        assert after(first, 1e9).fetch_seconds_per_sample == after(first, 0.0).fetch_seconds_per_sample == 0.02

    def test_run_on_several_devices_calibrates_scaling(self) -> None:
        """Two ranks per node take 1.5 times as long, so the profile contains contention and predictions are slower."""
        status = updated_profile(
            DLProfileStatus(), "mlp", "t4", on_t4(1, compute_s=0.010, step_s=0.010), NOW, Place(1, 1)
        )
        assert (status.scaling, status.constants) == ((), None)
        for nodes, per_node in ((1, 2), (2, 2), (1, 4)):
            run = on_t4(nodes * per_node, compute_s=0.010, step_s=0.017)
            status = updated_profile(status, "mlp", "t4", run, NOW, Place(nodes, per_node))
        assert [(p.nodes, p.devices) for p in status.scaling] == [(1, 2), (2, 4), (1, 4)]
        known = learned(DLProfileStatus.model_validate(status.manifest()))
        assert known.contention.slowdown(4) > 1.02
        assert known.compute_spread is not None and 0 < known.compute_spread < 0.3
        assert known.link_spread is not None and known.link_spread > known.compute_spread

    @pytest.mark.parametrize("step_s", [None, 0.0, 1e-6, 10.0])
    def test_invalid_step_time_does_not_change_the_constants(self, step_s: float | None) -> None:
        """The step time is missing, or differs from earlier ones by a factor of 1000."""
        before = updated_profile(
            DLProfileStatus(), "mlp", "t4", on_t4(4, compute_s=0.010, step_s=0.017), NOW, Place(2, 2)
        )
        assert len(before.scaling) == 1
        after = updated_profile(before, "mlp", "t4", on_t4(4, compute_s=0.010, step_s=step_s), NOW, Place(2, 2))
        assert after.scaling == before.scaling

    def test_equal_runs_are_averaged_and_later_ones_weigh_more(self) -> None:
        status = DLProfileStatus()
        for _ in range(60):
            status = updated_profile(status, "mlp", "t4", on_t4(4, compute_s=0.010, step_s=0.020), NOW, Place(2, 2))
        assert [(p.seconds, p.observations) for p in status.scaling] == [(pytest.approx(0.020), 20)]
        for _ in range(60):
            status = updated_profile(status, "mlp", "t4", on_t4(4, compute_s=0.010, step_s=0.030), NOW, Place(2, 2))
        assert status.scaling[0].seconds == pytest.approx(0.030, rel=0.05)

    def test_runs_with_lost_ranks_do_not_measure_a_placement(self) -> None:
        status = updated_profile(
            DLProfileStatus(), "mlp", "t4", on_t4(3, compute_s=0.010, step_s=0.017), NOW, Place(2, 2)
        )
        assert status.scaling == ()

    def test_number_of_placements_is_bounded(self) -> None:
        status = DLProfileStatus()
        for nodes in range(2, 80):
            run = on_t4(nodes, compute_s=0.010, step_s=0.017)
            status = updated_profile(status, "mlp", "t4", run, NOW, Place(nodes, 1))
        assert len(status.scaling) == 64 and status.scaling[-1].nodes == 79

    def test_profile_round_trip(self) -> None:
        status = updated_profile(DLProfileStatus(), "mlp", "cpu", self.RUN, NOW)
        known = learned(DLProfileStatus.model_validate(status.manifest()))
        assert times(known) == {p.batch: p.seconds for p in status.compute}

    def test_profile_names_are_valid_and_unique(self) -> None:
        names = [
            profile_name(m, d)
            for m, d in [("a", "b-c"), ("a-b", "c"), ("digits-cnn", "NVIDIA-A100-SXM4-40GB"), ("x" * 80, "y" * 63)]
        ]
        assert len(set(names)) == 4
        assert all(len(n) <= 63 and n.replace("-", "").isalnum() and n == n.lower() for n in names)
