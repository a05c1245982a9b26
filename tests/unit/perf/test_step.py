"""Tests of the performance model: monotonicity, limits, and reproduced measurements."""

from dataclasses import replace
from itertools import pairwise
from math import log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import COLLECTIVES
from dljob.cluster import catalogue
from dljob.perf.fit.curve import Curve, nondecreasing
from dljob.perf.resources import energy, memory
from dljob.perf.step import communication, input_data, synchronization
from dljob.perf.step.communication import Collective, Link, allreduce_s
from dljob.perf.step.compute import at_least, calibrated, catalogue_curve, host_overhead_s, scatter
from dljob.perf.step.step import BACKWARD_PART, exposed_s, step
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.workload import Workload, builtin, hinted

links = st.builds(Link, st.floats(0, 1e-2), st.floats(1e6, 1e12), st.floats(1e8, 1e12))
sizes = st.floats(1.0, 1e11)
ranks = st.integers(2, 2000)
batches = st.integers(1, 100_000)
devices = st.sampled_from(
    [catalogue.gpu_or_assumed(n) for n in catalogue.gpu_names()] + [catalogue.cpu("cpu", c) for c in (0.2, 1.0, 32.0)]
)
workloads = st.one_of(
    st.sampled_from([builtin(m, None) for m in MODELS]),
    st.builds(hinted, st.integers(1, 10**10), st.floats(1.0, 1e14), st.floats(0.0, 1e9), st.floats(0, 1e7)),
)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    n = draw(st.integers(1, 6))
    xs = sorted(draw(st.sets(st.integers(0, 500), min_size=n, max_size=n)))
    ys = sorted(draw(st.lists(st.floats(1e-4, 10.0), min_size=n, max_size=n)))
    return Curve(tuple(map(float, xs)), tuple(ys), draw(st.floats(1e-6, 1.0)))


class TestCurve:
    @given(curves(), st.integers(0, 1000), st.integers(0, 1000))
    def test_curve_is_nondecreasing(self, curve: Curve, a: int, b: int) -> None:
        assert curve.seconds(min(a, b)) <= curve.seconds(max(a, b))

    @given(curves(), st.integers(0, 600))
    def test_whole_samples_inverts_seconds(self, curve: Curve, batch: int) -> None:
        found = curve.whole_samples(curve.seconds(batch))
        assert found >= batch
        assert curve.seconds(found) <= curve.seconds(batch)
        assert curve.seconds(found + 1) > curve.seconds(batch)

    @given(curves(), st.lists(st.floats(0, 1000), min_size=1, max_size=5))
    def test_arrays_and_scalars_give_equal_times(self, curve: Curve, at: list[float]) -> None:
        assert curve.seconds_array(np.array(at)) == pytest.approx([curve.seconds(x) for x in at])

    @given(curves(), st.floats(0.01, 100.0), st.integers(0, 600))
    def test_scaling_time_scales_every_point(self, curve: Curve, factor: float, batch: int) -> None:
        assert curve.scaled(factor).seconds(batch) == pytest.approx(factor * curve.seconds(batch))

    @given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
    def test_nondecreasing_is_a_projection(self, values: list[float]) -> None:
        once = nondecreasing(values, [1.0] * len(values))
        assert all(a <= b + 1e-12 for a, b in pairwise(once))
        assert nondecreasing(once, [1.0] * len(once)) == pytest.approx(once)
        assert sum(once) == pytest.approx(sum(values))


class TestCompute:
    @given(workloads, devices, batches, batches)
    def test_more_samples_are_never_faster(self, w: Workload, d: catalogue.Device, a: int, b: int) -> None:
        curve = catalogue_curve(w, d)
        assert curve.seconds(min(a, b)) <= curve.seconds(max(a, b)) * (1 + 1e-9)

    @given(workloads, devices, batches, st.floats(1.0, 50.0))
    def test_better_device_is_never_slower(self, w: Workload, d: catalogue.Device, b: int, k: float) -> None:
        better = replace(
            d, fp32_FLOPs=k * d.fp32_FLOPs, conv_FLOPs=k * d.conv_FLOPs, memory_bandwidth_Bps=k * d.memory_bandwidth_Bps
        )
        assert catalogue_curve(w, better).seconds(b) <= catalogue_curve(w, d).seconds(b) * (1 + 1e-9)

    @given(workloads, devices, st.integers(1, 10_000))
    def test_larger_batch_is_never_less_efficient(self, w: Workload, d: catalogue.Device, b: int) -> None:
        curve = catalogue_curve(w, d)
        assert curve.seconds(2 * b) <= 2 * curve.seconds(b) * (1 + 1e-9)

    def test_quota_slows_overhead_and_arithmetic_equally(self) -> None:
        w = builtin("digits-cnn", "digits")
        whole, fifth = (catalogue_curve(w, catalogue.cpu("cpu", c), c) for c in (1.0, 0.2))
        assert fifth.seconds(32) == pytest.approx(5 * whole.seconds(32))

    def test_more_cores_speed_up_arithmetic_but_not_overhead(self) -> None:
        w = builtin("digits-cnn", "digits")
        assert host_overhead_s(w, 8.0) == host_overhead_s(w, 1.0)
        assert catalogue_curve(w, catalogue.cpu("cpu", 8.0), 8.0).seconds(0) > host_overhead_s(w)

    def test_small_model_on_a_gpu_is_host_bound(self) -> None:
        w = builtin("mlp", "digits")
        curve = catalogue_curve(w, catalogue.gpu_or_assumed("h100"), 1.0)
        assert curve.seconds(1) == curve.seconds(64) == host_overhead_s(w, is_gpu=True) > 5 * host_overhead_s(w)

    def test_digits_on_a_cpu_match_measurements(self) -> None:
        """Measured on a virtual core of an AMD EPYC with PyTorch 2.13 by benchmarks/perfmodel/compute_constants.py."""
        curve = catalogue_curve(builtin("digits-cnn", "digits"), catalogue.cpu("cpu", 1.0), 1.0)
        for batch, measured_s in {8: 2.30e-3, 32: 5.64e-3, 96: 13.90e-3}.items():
            assert measured_s / 2 < curve.seconds(batch) < 2 * measured_s

    @given(curves(), st.floats(1e-3, 10))
    def test_curve_with_a_minimum_time(self, curve: Curve, floor_s: float) -> None:
        raised = at_least(curve, floor_s)
        for batch in (0, 1, 10, 300, 1000):
            assert raised.seconds(batch) == pytest.approx(max(floor_s, curve.seconds(batch)), rel=1e-6)


class TestCalibrated:
    base = catalogue_curve(builtin("digits-cnn", "digits"), catalogue.cpu("cpu", 1.0))

    @given(st.dictionaries(st.integers(1, 200), st.floats(1e-4, 1.0), min_size=1, max_size=6))
    def test_calibrated_curve_passes_through_nondecreasing_points(self, points: dict[int, float]) -> None:
        rising = dict(zip(sorted(points), sorted(points.values()), strict=True))
        curve = calibrated(self.base, list(rising.items()))
        for batch, seconds in rising.items():
            assert curve.seconds(batch) == pytest.approx(seconds)

    def test_one_point_scales_the_catalogue_curve(self) -> None:
        curve = calibrated(self.base, [(32, 3 * self.base.seconds(32))])
        for batch in (1, 8, 32, 100, 1000):
            assert curve.seconds(batch) == pytest.approx(3 * self.base.seconds(batch), rel=0.02)

    def test_two_points_are_extrapolated_linearly(self) -> None:
        truth = self.base.scaled(2.5)
        curve = calibrated(self.base, [(b, truth.seconds(b)) for b in (16, 64)])
        assert curve.seconds(500) == pytest.approx(truth.seconds(500), rel=0.05)

    def test_scatter_is_the_noise_around_a_line(self) -> None:
        line = [(b, 0.002 + 1e-4 * b) for b in range(5, 205)]
        noise = np.random.default_rng(1).normal(1.0, 0.1, len(line))
        assert scatter(line) == pytest.approx(0.0, abs=1e-9)
        assert scatter([(b, s * f) for (b, s), f in zip(line, noise, strict=True)]) == pytest.approx(0.1, rel=0.2)
        assert scatter([(1, 0.1), (2, 5.0), (3, 0.2)]) == 0.0

    def test_calibration_without_points_is_the_catalogue_curve(self) -> None:
        assert calibrated(self.base, []) is self.base


class TestCommunication:
    @given(st.sampled_from(COLLECTIVES), sizes, ranks, links, st.floats(1.0, 100.0))
    def test_more_bandwidth_is_never_slower(self, c: Collective, v: float, n: int, link: Link, k: float) -> None:
        faster = replace(link, bandwidth_Bps=k * link.bandwidth_Bps)
        assert allreduce_s(c, v, float(n), faster) <= allreduce_s(c, v, float(n), link)

    @given(st.sampled_from(COLLECTIVES), sizes, sizes, ranks, links)
    def test_more_bytes_are_never_faster(self, c: Collective, a: float, b: float, n: int, link: Link) -> None:
        assert allreduce_s(c, min(a, b), float(n), link) <= allreduce_s(c, max(a, b), float(n), link) * (1 + 1e-12)

    @given(st.sampled_from(COLLECTIVES), sizes, ranks, links, st.floats(0.01, 100.0))
    def test_time_scales_with_all_constants(self, c: Collective, v: float, n: int, link: Link, k: float) -> None:
        slower = Link(k * link.latency_s, link.bandwidth_Bps / k, link.reduce_Bps / k)
        assert allreduce_s(c, v, float(n), slower) == pytest.approx(k * allreduce_s(c, v, float(n), link))

    @given(st.sampled_from(COLLECTIVES), sizes, links)
    def test_one_rank_has_no_all_reduce(self, c: Collective, v: float, link: Link) -> None:
        assert allreduce_s(c, v, 1.0, link) == 0

    @given(sizes, ranks, st.floats(1e6, 1e12))
    def test_ring_sends_the_published_volume(self, v: float, n: int, bandwidth: float) -> None:
        link = Link(0.0, bandwidth, 1e30)
        assert communication.ring_s(v, n, link) * bandwidth == pytest.approx(2 * (n - 1) / n * v)

    @given(sizes, links, st.integers(2, 500))
    def test_parameter_server_slows_down_with_more_workers(self, v: float, link: Link, n: int) -> None:
        assert communication.parameter_server_s(v, n + 1, link) >= communication.parameter_server_s(v, n, link)

    @given(sizes, links, st.integers(4, 500))
    def test_more_parameter_servers_are_never_slower(self, v: float, link: Link, n: int) -> None:
        assert communication.parameter_server_s(v, n, link, 2) <= communication.parameter_server_s(v, n, link, 1)

    @given(sizes, ranks, links, st.integers(2, 500))
    def test_layered_server_of_several_tensors_is_never_faster_than_a_ring(
        self, v: float, n: int, link: Link, tensors: int
    ) -> None:
        layered = allreduce_s("LayeredServer", v, float(n), link, tensors=tensors)
        assert layered >= allreduce_s("Ring", v, float(n), link) * (1 - 1e-12)

    @given(sizes, st.integers(2, 500), links, st.integers(1, 500))
    def test_layered_server_slows_down_with_workers_and_tensors(
        self, v: float, n: int, link: Link, tensors: int
    ) -> None:
        alone = allreduce_s("LayeredServer", v, float(n), link, tensors=tensors)
        assert allreduce_s("LayeredServer", v, float(n + 1), link, tensors=tensors) >= alone
        assert allreduce_s("LayeredServer", v, float(n), link, tensors=tensors + 1) >= alone

    @given(sizes, links, st.integers(1, 500))
    def test_serial_and_tree_gathers_are_equal_with_one_worker(self, v: float, link: Link, tensors: int) -> None:
        serial, tree = (communication.layered_server_s(v, 2.0, link, tensors, gather) for gather in ("Serial", "Tree"))
        assert serial == tree

    @given(st.integers(1, 10), sizes, links)
    def test_butterfly_takes_log2_rounds(self, k: int, v: float, link: Link) -> None:
        round_s = link.latency_s + v / link.bandwidth_Bps + v / link.reduce_Bps
        assert communication.butterfly_s(v, 2**k, link) == pytest.approx(k * round_s)

    @pytest.mark.parametrize("n", [3, 5, 6, 7, 9, 100])
    def test_butterfly_takes_two_more_rounds_off_powers_of_two(self, n: int) -> None:
        link = Link(1.0, 1e30, 1e30)
        assert communication.butterfly_s(1.0, n, link) == pytest.approx(int(log2(n)) + 2)

    @given(sizes, ranks, links)
    def test_mpi_is_at_most_as_slow_as_its_algorithms(self, v: float, n: int, link: Link) -> None:
        assert allreduce_s("MPI", v, float(n), link) <= min(
            allreduce_s("Ring", v, float(n), link), allreduce_s("Butterfly", v, float(n), link)
        )

    @given(st.sampled_from(COLLECTIVES), sizes, links, st.lists(ranks, min_size=1, max_size=5))
    def test_arrays_and_scalars_give_equal_times(self, c: Collective, v: float, link: Link, ns: list[int]) -> None:
        many = allreduce_s(c, v, np.array(ns, dtype=float), link)
        assert many == pytest.approx([float(allreduce_s(c, v, float(n), link)) for n in ns])

    @pytest.mark.parametrize(
        ("collective", "megabytes_per_s"),
        [
            ("Ring", {2: 23.5, 4: 15.5, 8: 9.6}),
            ("Tree", {2: 12.0, 4: 5.4, 8: 3.5}),
            ("ParameterServer", {2: 12.0, 4: 4.0, 8: 1.7}),
        ],
    )
    def test_collectives_on_a_slow_link_match_measurements(
        self, collective: Collective, megabytes_per_s: dict[int, float]
    ) -> None:
        """Measured with 4 MiB over links of 25 MB/s between network namespaces of one machine, with n ranks or n-1 workers
        and a server. The difference to the formulas comes from two cores that eight ranks share."""
        v, link = 4 * 2**20, Link(1e-3, 25e6)
        for n, rate in megabytes_per_s.items():
            predicted = v / float(allreduce_s(collective, v, float(n), link)) / 1e6
            assert predicted == pytest.approx(rate, rel=0.15 if n < 8 else 0.45)

    def test_link_without_bandwidth_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="bandwidths above 0"):
            Link(1e-6, 0.0)


class TestStep:
    @given(st.floats(0, 10), st.floats(1e-6, 10), st.integers(1, 50), st.floats(0, 1))
    def test_overlap_hides_at_most_the_backward_pass(self, c: float, compute: float, parts: int, o: float) -> None:
        exposed = float(exposed_s(c, compute, parts, o))
        assert c / parts <= exposed * (1 + 1e-9)
        assert c - compute * BACKWARD_PART * o <= exposed * (1 + 1e-9) + 1e-12
        assert exposed <= c

    @given(
        st.floats(1e-5, 10),
        st.sampled_from(COLLECTIVES),
        st.integers(1, 10**9),
        st.integers(1, 500),
        links,
        st.floats(0.01, 1),
        st.floats(0.01, 1),
    )
    def test_parts_add_up_and_p90_is_above(
        self, c: float, how: Collective, v: int, n: int, link: Link, cs: float, ls: float
    ) -> None:
        s = step(c, 0.0, how, v, n, link, 0.5, cs, ls)
        assert s.step_s == pytest.approx(s.compute_s + s.communication_s + s.waiting_s)
        assert s.p90_s > s.step_s
        assert s.spread <= max(cs, ls) + 1e-9
        if n == 1:
            assert s.step_s == c

    @given(st.integers(1, 5000))
    def test_straggler_factor_is_at_least_1_and_grows(self, n: int) -> None:
        assert synchronization.straggler_factor(n) >= 1
        assert synchronization.straggler_factor(n + 1) >= synchronization.straggler_factor(n)

    def test_straggler_factor_matches_simulation(self) -> None:
        draws = np.random.default_rng(0).normal(1.0, 0.03, (4000, 64)).max(axis=1).mean()
        assert synchronization.straggler_factor(64) == pytest.approx(draws, abs=0.002)

    def test_time_to_prepare_data_on_cpu_and_gpu(self) -> None:
        """One thread, which a quota slows down, prepares batches. They are copied to a GPU over its link."""

        def total_s(*at: Any) -> float:
            return input_data.fetching(*at).total_s

        images, digits = builtin("resnet18", None), builtin("digits-cnn", None)
        one, fifth = catalogue.cpu("cpu", 1.0), catalogue.cpu("cpu", 0.2)
        assert total_s(images, one) == pytest.approx(50e-6 + 2 * 12288 / 10e9)
        assert total_s(images, fifth, 0.2) == pytest.approx(5 * total_s(images, one))
        assert total_s(digits, one) < 1e-6
        gpu = catalogue.gpu_or_assumed("t4")
        assert total_s(images, gpu) == pytest.approx(total_s(images, one) + 12288 / 16e9)

    def test_resources_decide_between_rank_thread_and_workers(self) -> None:
        """A thread competes for the only core of a CPU rank, but not with a GPU. A script without a spare core prepares
        batches between steps."""
        images, gpu = builtin("resnet18", None), catalogue.gpu_or_assumed("t4")
        single = input_data.fetching(images, catalogue.cpu("cpu", 1.0))
        assert single.exposed_input_s(10.0, 100) == pytest.approx(100 * single.total_s)
        assert input_data.fetching(images, gpu).exposed_input_s(10.0, 100) == 0
        four = input_data.fetching(images, catalogue.cpu("cpu", 4.0), 4.0)
        assert four.exposed_input_s(10.0, 100) == pytest.approx(100 * four.host_s / 4)
        assert [input_data.fetching(images, gpu, c, by_program=True).workers for c in (0.5, 1.0, 1.9, 2.0, 8.0)] == [
            0,
            0,
            0,
            1,
            7,
        ]

    def test_exposed_data_time_matches_manual_calculation(self) -> None:
        """Decoding takes 10 ms per sample, a step of 64 samples computes for 0.2 s, and there are 0, 1, 3 or 7 workers."""
        images, gpu = builtin("resnet18", None), catalogue.gpu_or_assumed("t4")
        computing = Curve((32, 64), (0.1, 0.2), 0.2 / 64)
        for cores, exposed_input_s in ((1.0, 0.64), (2.0, 0.64 - 0.2), (4.0, 0.64 / 3 - 0.2), (8.0, 0.0)):
            found = input_data.fetching(images, gpu, cores, by_program=True, measured_s=10e-3)
            assert found.exposed_input_s(0.2, 64) == pytest.approx(exposed_input_s, abs=1e-4)
            assert found.over(computing).seconds(64) == pytest.approx(0.2 + exposed_input_s, abs=1e-4)
            assert found.first_s(64) == (0.0 if cores == 1 else pytest.approx(0.64, abs=1e-4))

    @given(curves(), st.floats(0, 1), st.floats(0, 300))
    def test_parallel_stages_take_the_maximum(self, computing: Curve, per_sample_s: float, batch: float) -> None:
        both = computing.at_least(per_sample_s)
        assert both.seconds(batch) == pytest.approx(max(computing.seconds(batch), per_sample_s * batch), rel=1e-9)

    @given(curves(), st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 0.1), st.integers(1, 8), st.floats(1, 300))
    def test_prefetching_is_bounded_by_its_stages(
        self, computing: Curve, disk_s: float, making_s: float, device_s: float, workers: int, batch: float
    ) -> None:
        """It is never slower than preparing between steps, never faster than a stage, and never slower with more workers."""

        def step_s(workers: int) -> float:
            at = input_data.Fetching(disk_s, making_s, 0.0, device_s, workers)
            step_s = at.over(computing).seconds(batch)
            compute_s = computing.seconds(batch)
            assert step_s == pytest.approx(compute_s + at.exposed_input_s(compute_s, batch), rel=1e-9)
            return step_s

        stages_s = [batch * s for s in (disk_s, (disk_s + making_s) / workers, device_s)]
        slack = 1 + 1e-9
        assert max(computing.seconds(batch), *stages_s) <= slack * step_s(workers) <= slack**2 * step_s(0)
        assert step_s(workers + 1) <= slack * step_s(workers)

    @given(st.integers(1, 10**7), st.integers(1, 10**7), st.floats(0.1, 1000), st.floats(0, 1e14), st.floats(0, 1e14))
    def test_fraction_read_from_disk(self, count: int, nbytes: int, epochs: float, a: float, b: float) -> None:
        """Each sample is read at least once, all are read without a cache, and a larger cache never means more reads."""
        stored, (small, large) = input_data.Stored(count, nbytes, epochs), sorted((a, b))
        assert (
            0
            < input_data.cold_part(stored, large)
            <= input_data.cold_part(stored, small)
            <= input_data.cold_part(stored, 0)
            == 1
        )
        assert input_data.cold_part(stored, 2.0 * count * nbytes) == pytest.approx(min(1.0, 1 / epochs))

    def test_ranks_of_a_node_share_its_disk(self) -> None:
        gpu, stored = catalogue.gpu_or_assumed("t4"), input_data.Stored(10**6, 10**5, 10.0)
        workload = builtin("digits-cnn", None)
        one, four = (input_data.fetching(workload, gpu, 1.0, stored, 0.0, n) for n in (1, 4))
        assert (one.disk_s, four.disk_s) == pytest.approx((2e-4, 8e-4))
        assert input_data.fetching(workload, gpu, 1.0, stored, 1e12).disk_s == pytest.approx(2e-5)
        assert one.mostly == "reading from disk"
        assert input_data.fetching(builtin("resnet18", None), gpu).mostly == "preparing samples"
        assert one.total_s == pytest.approx(one.disk_s + one.making_s + one.memory_s + one.device_s)


class TestMemory:
    @given(workloads, st.booleans(), batches, batches)
    def test_memory_grows_with_the_batch(self, w: Workload, is_gpu: bool, a: int, b: int) -> None:
        assert memory.rank_nbytes(w, min(a, b), is_gpu) <= memory.rank_nbytes(w, max(a, b), is_gpu)

    @given(workloads, st.booleans(), st.floats(2**28, 2**40))
    def test_largest_batch_fits_and_a_larger_one_does_not(self, w: Workload, is_gpu: bool, room: float) -> None:
        batch = memory.largest_batch(w, room, is_gpu)
        if batch:
            assert memory.rank_nbytes(w, batch, is_gpu) <= room + 1
        if memory.sample_nbytes(w) > 1 and batch < memory.MAX_SAMPLES:
            assert memory.rank_nbytes(w, batch + 1, is_gpu) > room - 2 - memory.MARGIN * 2

    def test_memory_includes_optimizer_state(self) -> None:
        plain, momentum, adam = (
            memory.fixed_nbytes(builtin("resnet18", None, o, m)) for o, m in (("SGD", 0.0), ("SGD", 0.9), ("Adam", 0.0))
        )
        assert (momentum / plain, adam / plain) == (1.5, 2.0)


class TestEnergy:
    @given(devices, st.floats(0, 1), st.floats(0, 1))
    def test_power_grows_with_utilization_within_bounds(self, d: catalogue.Device, a: float, b: float) -> None:
        low, high = energy.rank_watts(d, min(a, b)), energy.rank_watts(d, max(a, b))
        assert energy.PUE * d.idle_power_W < low <= high
        assert high <= energy.PUE * (d.peak_power_W + energy.HOST_POWER_W)

    def test_cost_is_price_times_hours(self) -> None:
        d = catalogue.gpu_or_assumed("t4")
        assert energy.cost_usd(d, 7200, 3) == pytest.approx(6 * d.usd_per_h)
