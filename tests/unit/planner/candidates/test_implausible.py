"""Tests of measurements that cannot be right: plans use the estimate by the data sheet instead, and say so."""

from dataclasses import replace

import pytest

from dljob.calibrate import Learned, LearnedPoint, Place, StepPoint
from dljob.calibrate.noise import NoiseOf
from dljob.cluster import ClusterView, catalogue
from dljob.cluster.catalogue import TimeFactors
from dljob.cluster.hardware import KEY, Hardware
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.step.core_scaling import CoreUse
from dljob.planner import Request
from dljob.planner.candidates.cost.implausible import without_implausible
from dljob.planner.candidates.request_workload import workload_of
from support.planner_questions import A100, DIGITS, RESNET, T4, decided, view

V100 = "Tesla-V100-SXM2-16GB"
GPUS = view(*({"count": 2, "device": name, "devices": 4, "cpu": 32, "memory": "64Gi"} for name in (A100, T4, V100)))
CPUS = view({"count": 3, "cpu": 4, "memory": "8Gi"})
HINTED = Request(
    job="j", global_batch=512, total_steps=1000, profile="mine", parameters=25_000_000, flops_per_sample=4e9,
    activation_nbytes_per_sample=10**7, sample_nbytes=0,
)  # fmt: skip
LIES = [100.0, 0.01]


def profile(request: Request, device: str, factor: float = 1.0) -> Learned:
    """Return a profile whose times are ``factor`` times the estimate, with steps on several devices and a link."""
    is_gpu = catalogue.gpu(device) is not None
    chip, cores = (catalogue.gpu_or_assumed(device), None) if is_gpu else (catalogue.cpu(device, 4.0), 4)
    curve = catalogue_curve(workload_of(request), chip, 4.0, None if is_gpu else CoreUse(4.0, 1, 4.0))
    points = tuple(LearnedPoint(b, factor * curve.seconds(b), 50, cores) for b in (8, 16, 32, 64))
    step = StepPoint(Place(2, 1, "Torch" if is_gpu else "Ring", cores=cores), 32, 1.2 * factor * curve.seconds(32))
    return Learned(points, steps=(step,), compute_spread=0.05, link_latency_s=1e-4, link_bandwidth_Bps=1e9)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    ("request_", "cluster", "device"), [(RESNET, GPUS, A100), (RESNET, GPUS, T4), (DIGITS, CPUS, "cpu")]
)
def test_a_profile_that_is_off_by_100_changes_no_plan_and_is_named(
    request_: Request, cluster: ClusterView, device: str, lie: float
) -> None:
    assert request_.model is not None
    plain = decided(request_, cluster)
    found = decided(request_, cluster, {(request_.model, device): profile(request_, device, lie)})
    assert found.chosen == plain.chosen
    assert found.warning is not None and found.warning.startswith(f"profile of {request_.model} on {device}: found")
    assert found.warning.count("expected") == 1


@pytest.mark.parametrize("honest", [0.25, 1.0, 10.0])
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("case", [(RESNET, GPUS, T4), (DIGITS, CPUS, "cpu")])
def test_honest_profiles_count_and_lies_about_them_do_not(
    honest: float, lie: float, case: tuple[Request, ClusterView, str]
) -> None:
    """The real device may be 4 times as fast as its data sheet says, or 10 times as slow."""
    request, cluster, device = case
    assert request.model is not None
    only = replace(request, devices=(device,))
    plain = decided(only, cluster).chosen.prediction
    told = decided(only, cluster, {(request.model, device): profile(request, device, honest)})
    assert told.chosen.prediction.basis == "profile" and told.warning is None
    lied = decided(only, cluster, {(request.model, device): profile(request, device, honest * lie)})
    assert lied.chosen.prediction == plain


def test_two_profiles_that_are_off_alike_say_that_the_estimate_is_wrong() -> None:
    learned = {("resnet50", name): profile(RESNET, name, 60.0) for name in (A100, T4)}
    found = decided(replace(RESNET, devices=(A100, T4)), GPUS, learned)
    assert found.warning is None and found.chosen.prediction.basis == "profile"


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("claim", [1.0, 1000.0, 0.001])
def test_measurements_on_other_devices_decide_if_the_user_states_the_cost(lie: float, claim: float) -> None:
    """The user mistakes the unit of flopsPerSample; three profiles agree about the true cost, and one of them lies."""
    factors = {A100: 1.0, T4: lie, V100: 1.3}
    learned = {("mine", name): profile(HINTED, name, factor) for name, factor in factors.items()}
    claimed = replace(HINTED, flops_per_sample=claim * 4e9)
    found = decided(claimed, GPUS, learned)
    honest = {key: each for key, each in learned.items() if key[1] != T4}
    assert found.chosen == decided(claimed, GPUS, honest).chosen
    assert found.warning is not None and "profile of mine on Tesla-T4" in found.warning


def test_a_single_profile_counts_more_than_a_cost_that_the_user_states() -> None:
    learned = {("mine", T4): profile(HINTED, T4, 100.0)}
    found = decided(replace(HINTED, devices=(T4,)), GPUS, learned)
    assert found.chosen.prediction.basis == "profile"


def test_devices_without_a_data_sheet_have_only_the_test_for_outliers() -> None:
    cluster = view({"count": 2, "device": "Neuron-9000", "gpu": True, "devices": 4, "cpu": 32, "memory": "64Gi"})
    points = [LearnedPoint(b, 500.0 + b, 50) for b in (8, 16, 32)]
    honest = decided(RESNET, cluster, {("resnet50", "Neuron-9000"): Learned(tuple(points))})
    assert honest.chosen.prediction.basis == "profile"
    odd = Learned((*points, LearnedPoint(64, 5.0, 50)))
    found = decided(RESNET, cluster, {("resnet50", "Neuron-9000"): odd})
    assert found.chosen == honest.chosen
    assert found.warning is not None and "batch sizes 64" in found.warning


def test_a_link_that_is_faster_than_the_stated_network_does_not_count() -> None:
    node = {"count": 2, "device": T4, "devices": 1, "cpu": 8, "memory": "64Gi", "bandwidth": "1.25G"}
    cluster = view(node)
    assert cluster.nodes[0].link_bandwidth_Bps is not None
    known = profile(RESNET, T4)
    fast = replace(known, link_latency_s=1e-9, link_bandwidth_Bps=100 * cluster.nodes[0].link_bandwidth_Bps)
    found = decided(RESNET, cluster, {("resnet50", T4): fast})
    unknown = replace(known, link_latency_s=None, link_bandwidth_Bps=None)
    assert found.chosen == decided(RESNET, cluster, {("resnet50", T4): unknown}).chosen
    assert found.warning is not None and "at most 20 Gbit/s" in found.warning
    assert "annotation is wrong" in found.warning and "dljob.dev/network-bandwidth" in found.warning
    honest = replace(known, link_bandwidth_Bps=1.9 * cluster.nodes[0].link_bandwidth_Bps)
    assert decided(RESNET, cluster, {("resnet50", T4): honest}).warning is None


@pytest.mark.parametrize("steps", [(), (StepPoint(Place(1, 2), 32, 1.0),)])
def test_a_link_that_may_be_shared_memory_is_left_out_and_named(steps: tuple[StepPoint, ...]) -> None:
    """Profiles of older releases have the bandwidth between the ranks of one node as that of the network.

    Fixed bug: the plan left the link out without a word, so that nobody could correct a wrong annotation.
    """
    cluster = view({"count": 2, "device": T4, "devices": 1, "cpu": 8, "memory": "64Gi", "bandwidth": "125M"})
    known = replace(profile(RESNET, T4), steps=steps, link_latency_s=None, link_bandwidth_Bps=None)
    shared = replace(known, link_latency_s=1e-6, link_bandwidth_Bps=5e9)
    found = without_implausible(RESNET, cluster, {("resnet50", T4): shared})
    (text,) = found["resnet50", T4].doubts
    assert "shared memory of one node" in text and "annotation is wrong" in text
    assert found == {("resnet50", T4): replace(known, doubts=(text,))}
    warning = decided(RESNET, cluster, {("resnet50", T4): shared}).warning
    assert warning is not None and text in warning


SMALL = Request(
    job="j", global_batch=512, total_steps=1000, profile="mine", parameters=1_000_000, flops_per_sample=3e8,
    activation_nbytes_per_sample=10**5, sample_nbytes=0,
)  # fmt: skip
MIXED = view(
    *({"count": 2, "device": name, "devices": 4, "cpu": 32, "memory": "64Gi"} for name in (A100, T4, V100)),
    {"count": 3, "cpu": 4, "memory": "8Gi"},
)


@pytest.mark.parametrize("slow", [100.0, 300.0])
@pytest.mark.parametrize("others", [(("cpu", 1.0),), ((T4, 1.0),), (("cpu", 1.0), (T4, 1.0)), (("cpu", 0.1),)])
def test_a_gpu_that_waits_for_a_script_keeps_its_profile(slow: float, others: tuple[tuple[str, float], ...]) -> None:
    """A script that launches many small kernels is far slower than the roofline of a GPU, but not on a CPU."""
    learned = {("mine", name): profile(SMALL, name, factor) for name, factor in ((A100, slow), *others)}
    assert without_implausible(SMALL, MIXED, learned) == learned


def test_slow_gpus_do_not_make_the_profile_of_a_cpu_look_too_fast() -> None:
    learned = {("mine", name): profile(SMALL, name, f) for name, f in ((A100, 100.0), (V100, 100.0), ("cpu", 1.0))}
    assert without_implausible(SMALL, MIXED, learned) == learned


def test_a_gpu_at_full_speed_beside_one_that_waits_is_no_lie_about_an_overstated_cost() -> None:
    learned = {("mine", A100): profile(SMALL, A100, 0.2), ("mine", T4): profile(SMALL, T4, 0.01)}
    assert without_implausible(SMALL, MIXED, learned) == learned


def test_variants_of_one_device_have_one_vote() -> None:
    """Three GPUs say that the estimate is wrong. A fourth one, in three precisions, does not outvote them."""
    p100 = "Tesla-P100-PCIE-16GB"
    learned = {("resnet50", name): profile(RESNET, name, 60.0) for name in (T4, V100, p100)}
    learned |= {(f"resnet50{suffix}", A100): profile(RESNET, A100) for suffix in ("", ".bf16", ".fp16")}
    assert without_implausible(RESNET, GPUS, learned) == learned


@pytest.mark.parametrize("factor", [0.1, 1.0, 9.0])
@pytest.mark.parametrize("honest", [0.25, 0.5, 1.0, 4.0])
def test_a_probe_on_a_busy_node_does_not_discard_honest_profiles(factor: float, honest: float) -> None:
    factors = TimeFactors(**dict.fromkeys(vars(TimeFactors()), factor))
    learned = {("digits-cnn", "cpu"): profile(DIGITS, "cpu", honest), (KEY, "cpu"): Learned(hardware=Hardware(factors))}
    assert without_implausible(DIGITS, CPUS, learned) == learned
    lie = learned | {("digits-cnn", "cpu"): profile(DIGITS, "cpu", 0.001)}
    assert without_implausible(DIGITS, CPUS, lie)["digits-cnn", "cpu"].doubts


def test_a_gpu_without_a_data_sheet_keeps_its_profile_beside_a_probe() -> None:
    cluster = view({"count": 2, "device": "Neuron-9000", "gpu": True, "devices": 4, "cpu": 32, "memory": "64Gi"})
    busy = Hardware(TimeFactors(**dict.fromkeys(vars(TimeFactors()), 90.0)))
    learned = {("resnet50", "Neuron-9000"): profile(RESNET, T4, 0.1), (KEY, "Neuron-9000"): Learned(hardware=busy)}
    assert without_implausible(RESNET, cluster, learned) == learned


@pytest.mark.parametrize("lies", [(0, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("lie", [25.0, 0.04])
def test_of_two_halves_that_disagree_the_one_near_the_estimate_counts(lie: float, lies: tuple[int, int]) -> None:
    known = profile(RESNET, T4)
    points = tuple(replace(p, compute_s=lie * p.compute_s) if i in lies else p for i, p in enumerate(known.points))
    key = "resnet50", T4
    found = without_implausible(RESNET, GPUS, {key: replace(known, points=points)})[key]
    assert found.points == tuple(p for i, p in enumerate(known.points) if i not in lies)
    assert len(found.doubts) == 1


def test_of_two_halves_that_disagree_none_counts_on_a_device_without_a_data_sheet() -> None:
    cluster = view({"count": 2, "device": "Neuron-9000", "gpu": True, "devices": 4, "cpu": 32, "memory": "64Gi"})
    known, noise = profile(RESNET, T4), NoiseOf("data", 100.0, 50)
    points = tuple(replace(p, compute_s=25.0 * p.compute_s) if i < 2 else p for i, p in enumerate(known.points))
    key = "resnet50", "Neuron-9000"
    found = without_implausible(RESNET, cluster, {key: replace(known, points=points, noise=noise)})[key]
    assert found == Learned(noise=noise, doubts=found.doubts) and found.doubts
