"""Tests of the regression that predicts time and memory of CPU ranks, and of the CPU requests of pods."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import catalogue
from dljob.perf.resources import memory
from dljob.perf.step.compute import LOOP_S, catalogue_curve, update_s
from dljob.perf.step.core_scaling import CoreUse
from dljob.perf.workload import structure
from dljob.perf.workload.layers import NARROW
from dljob.perf.workload.workload import Workload, builtin
from support.planner_questions import DIGITS, RESNET, decided, view

workloads = st.sampled_from(
    [builtin(m, d) for m, d in (("mlp", "iris"), ("digits-cnn", "digits"), ("resnet50", None), ("gpt-mini", None))]
)


@given(workloads, st.integers(1, 500), st.integers(1, 8))
def test_catalogue_curve_is_the_sum_of_the_terms(w: Workload, batch: int, cores: int) -> None:
    host = structure.total(structure.host_terms(w), structure.HOST_S)
    work = structure.total(structure.time_terms(w, batch), structure.TIME_S)
    use = CoreUse(cores)
    curve = catalogue_curve(w, catalogue.cpu("cpu", cores), cores)
    least, most = host + work / use.traffic, host + work / use.arithmetic
    assert least * (1 - 1e-9) <= curve.seconds(batch) - use.fork_s * len(w.layers) <= most * (1 + 1e-9)
    if cores == 1:
        assert curve.seconds(batch) == pytest.approx(host + work)


def test_terms_match_manual_calculation() -> None:
    """digits-cnn has 8 x 8 inputs and two pools. The operations of its layers with weights are calculated by hand."""
    w = builtin("digits-cnn", "digits")
    terms = structure.time_terms(w, 1)
    first, second, third = (2.0 * 9 * c * f * side**2 for c, f, side in ((1, 32, 8), (32, 64, 8), (64, 64, 4)))
    assert terms["convolution_FLOP"] == 2 * first + 3 * second + 3 * third
    assert terms["weight_B"] == 9 * 4 * 58_314
    assert terms["large_weight_B"] == 0.0
    pools = 3 * 64 * (8 * 8 + 4 * 4) + 2 * 64 * (4 * 4 + 2 * 2)
    assert terms["pooling_B"] == 4 * pools
    grown = structure.growth_terms(w, 10)
    assert (grown["process"], grown["parameter_B"]) == (1.0, 3 * 4 * 58_314)


def test_short_rows_of_convolutions_cost_more() -> None:
    """The last stages of ResNet-18 have rows of two positions and one on images of 8 x 8, and of eight and four on 32."""

    def costs(dataset: str) -> tuple[float, float]:
        terms = structure.time_terms(builtin("resnet18", dataset), 1)
        return terms["narrow_FLOP"], terms["convolution_FLOP"]

    narrow, usual = costs("digits")
    last = 2.0 * 9 * 512 * 512  # operations of a convolution of the last stage, forward
    stage = 3 * (3 * last + last / 2) + 3 * last / 9  # four convolutions, the first with half the channels, and 1 x 1
    assert narrow == pytest.approx(stage * ((NARROW - 1) + (NARROW / 2 - 1)), rel=0.02)
    assert 0.5 * usual < narrow < usual
    assert costs("digits-32")[0] == 0.0


@pytest.mark.parametrize(("model", "functions", "filters"), [
    ("mlp", 0, 0),
    ("digits-cnn", 0, 9 * (32 + 32 * 64 + 64 * 64) + 32 + 64 + 64),
    ("gpt-mini", 4 * (128 * 512 + 4 * 128 * 128), 0),  # GELU and scores of each block
])  # fmt: skip
def test_elementary_functions_and_weights_of_convolutions_are_counted(model: str, functions: int, filters: int) -> None:
    terms = structure.time_terms(builtin(model, None), 3)
    assert terms["function_FLOP"] == 3 * functions
    assert terms["convolution_weight_B"] == 3 * 4 * filters


def test_the_update_converts_no_weights_of_convolutions() -> None:
    workload, core = builtin("resnet18", None), catalogue.cpu("cpu", 1.0)
    costly = replace(core, term_factors=(("convolution_weight_B", 5.0),))
    assert update_s(workload, costly) == update_s(workload, core)
    assert catalogue_curve(workload, costly).seconds(0) > catalogue_curve(workload, core).seconds(0)


@pytest.mark.parametrize("cpu", [1.0, 0.5])
def test_a_step_has_the_work_of_the_training_loop(cpu: float) -> None:
    """Regression: steps of the smallest models were predicted as in a bare loop, at half of what they took."""
    request = replace(DIGITS, model="mlp", dataset="iris", global_batch=4, nodes_max=1)
    found = decided(request, view({"cpu": cpu, "memory": "4Gi"})).chosen.prediction
    bare = catalogue_curve(builtin("mlp", "iris"), catalogue.cpu("cpu", cpu), use=CoreUse(cpu)).seconds(4)
    assert found.compute_s == pytest.approx(bare + LOOP_S / cpu, rel=1e-3)


def test_weights_larger_than_the_cache_cost_more() -> None:
    small, large = (
        structure.total(structure.time_terms(replace(w, layers=(layer,)), 0), structure.TIME_S) / layer.parameters
        for w in [builtin("mlp", "digits")]
        for layer in (replace(w.layers[0], parameters=10_000), replace(w.layers[0], parameters=10_000_000))
    )
    assert 2 * small < large


@given(workloads, st.integers(1, 200))
def test_memory_estimate_exceeds_the_tensors(w: Workload, batch: int) -> None:
    tensors = memory.fixed_nbytes(w) + batch * (w.activation_nbytes + w.sample_nbytes)
    assert memory.rank_nbytes(w, batch, is_gpu=False) > memory.PROCESS_NBYTES + memory.GROWTH_MARGIN * tensors


class TestCpuOfAPod:
    def test_single_rank_requests_a_full_cpu(self) -> None:
        (group,) = decided(DIGITS, view({"cpu": 2, "memory": "8Gi"})).chosen.groups
        assert group.cpu_per_pod == pytest.approx(1.0)

    def test_request_is_limited_by_the_node(self) -> None:
        (group,) = decided(DIGITS, view({"cpu": "200m", "memory": "8Gi"})).chosen.groups
        assert group.cpu_per_pod == pytest.approx(0.2)

    def test_request_is_lower_if_ranks_wait_for_the_network(self) -> None:
        """The network has 4 MB/s for 45 MB of gradients."""
        slow, fast = (
            decided(
                replace(RESNET, nodes_min=3, global_batch=192),
                view({"count": 3, "cpu": 2, "memory": "16Gi", "bandwidth": bandwidth}),
            ).chosen
            for bandwidth in ("4M", "10G")
        )
        assert slow.prediction.communication_s > 2 * slow.prediction.compute_s
        assert 0.25 <= slow.groups[0].cpu_per_pod < 0.7 < fast.groups[0].cpu_per_pod <= 1.0

    def test_gpu_ranks_request_one_cpu_each(self) -> None:
        (group,) = decided(RESNET, view({"device": "a100", "devices": 2, "cpu": 8, "memory": "64Gi"})).chosen.groups
        assert group.cpu_per_pod == group.ranks_per_node
