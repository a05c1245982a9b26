"""Tests of gradient accumulation: its time and memory, and when the planner chooses micro-batches."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import catalogue
from dljob.perf.fit.curve import Curve
from dljob.perf.resources import memory
from dljob.planner import Choice, Decision, FixedChoice, Request, plan
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES, beyond, repeated
from dljob.planner.candidates.request_workload import workload_of
from support.planner_questions import A100, DIGITS, RESNET, T4, THREE, decided, rejected, view

A80 = "NVIDIA-A100-SXM4-80GB"
XL = Request(
    job="j", global_batch=512, total_steps=100, profile="x", like="GPT-2-XL", optimizer="AdamW", may_accumulate=True
)
THIRTY_TWO = view({"count": 4, "device": A80, "devices": 8, "cpu": 96, "memory": "1000Gi", "bandwidth": "100G"})
T4S = view({"count": 8, "device": T4, "devices": 2, "cpu": 16, "memory": "256Gi", "bandwidth": "3G"})
MIXED = view(
    {"count": 2, "device": A100, "devices": 4, "cpu": 48, "memory": "256Gi", "bandwidth": "10G"},
    {"count": 4, "device": T4, "devices": 2, "cpu": 16, "memory": "128Gi", "bandwidth": "10G"},
)


@st.composite
def concave_curves(draw: Any) -> Curve:
    """A fixed time, and times per sample that fall with the batch, as if kernels filled a device better."""
    slopes = sorted(draw(st.lists(st.floats(1e-5, 1e-1), min_size=1, max_size=4)), reverse=True)
    batches, times = [0.0], [draw(st.floats(1e-4, 1.0))]
    for slope in slopes[:-1]:
        length = draw(st.integers(1, 40))
        batches.append(batches[-1] + length)
        times.append(times[-1] + slope * length)
    return Curve(tuple(batches), tuple(times), slopes[-1])


class TestTime:
    @given(concave_curves(), st.floats(0, 0.9), st.integers(1, 200), st.integers(1, 50))
    def test_more_micro_batches_never_take_less_time(self, curve: Curve, update: float, batch: int, k: int) -> None:
        update_s = update * curve.seconds(0)
        few, more = (repeated(curve, n, update_s).seconds(max(batch, n)) for n in (k, k + 1))
        assert repeated(curve, 1, update_s).seconds(batch) == pytest.approx(curve.seconds(batch))
        assert more >= few * (1 - 1e-9)

    @given(concave_curves(), st.floats(0, 0.9), st.integers(1, 20), st.integers(1, 30))
    def test_the_search_uses_the_exact_time_of_whole_micro_batches(
        self, curve: Curve, update: float, largest: int, k: int
    ) -> None:
        """Between multiples of the largest micro-batch, the search underestimates by less than one micro-batch."""
        update_s = update * curve.seconds(0)
        found = beyond(curve, largest, update_s)
        exact = repeated(curve, k, update_s).seconds(k * largest)
        assert found.seconds(k * largest) == pytest.approx(exact)
        for batch in range(1, 3 * largest):
            settled = repeated(curve, ceil(batch / largest), update_s).seconds(batch)
            assert settled >= found.seconds(batch) * (1 - 1e-9)
            assert settled <= found.seconds(batch) + curve.seconds(largest)

    def test_only_the_last_micro_batch_hides_communication(self) -> None:
        on = replace(RESNET, global_batch=64, nodes_min=8, collective="Torch")
        times = [decided(replace(on, micro_batches=k), T4S).chosen.prediction for k in (1, 2, 4)]
        assert times[0].communication_s < times[1].communication_s < times[2].communication_s
        assert times[0].compute_s < times[1].compute_s < times[2].compute_s


class TestMemory:
    @pytest.mark.parametrize("k", [1, 2, 3, 8])
    def test_a_rank_needs_the_memory_of_one_micro_batch(self, k: int) -> None:
        on = replace(RESNET, micro_batches=k, fixed=(FixedChoice(T4, 2, 2),))
        found = decided(on, T4S).chosen
        assert found.micro_batches == k
        shares = [share for group in found.groups for share in group.shares]
        needed = memory.rank_nbytes(workload_of(on), ceil(max(shares) / k), True)
        assert found.prediction.memory_nbytes == needed


def room_nbytes(device: str) -> float:
    found = catalogue.gpu(device)
    assert found is not None and found.memory_nbytes is not None
    return found.memory_nbytes


def settles(choice: Choice, request: Request, rank_nbytes: float) -> None:
    """Check that the micro-batches fit into memory, and that fewer of them would not."""
    assert 1 <= choice.micro_batches <= MAX_MICRO_BATCHES
    assert choice.prediction.memory_nbytes <= rank_nbytes
    shares = [share for group in choice.groups for share in group.shares]
    assert sum(shares) == request.global_batch
    if choice.micro_batches > 1:
        fewer = ceil(max(shares) / (choice.micro_batches - 1))
        assert memory.rank_nbytes(workload_of(request), fewer, True) > rank_nbytes


class TestPlans:
    def test_a_large_batch_gets_micro_batches_instead_of_no_plan(self) -> None:
        """Published runs of such models use gradient accumulation on as many GPUs."""
        without = rejected(XL, THIRTY_TWO)
        assert without.reason == "DoesNotFit" and "gradientAccumulation to Auto" in without.message
        request = replace(XL, chooses_micro_batches=True)
        found = decided(request, THIRTY_TWO)
        assert found.chosen.micro_batches == 2 and "2 micro-batches" in found.chosen.summary
        for choice in found.candidates:
            settles(choice, request, room_nbytes(A80))

    def test_a_message_names_the_field_only_where_it_would_help(self) -> None:
        assert "gradientAccumulation" not in rejected(replace(XL, may_accumulate=False), THIRTY_TWO).message

    @pytest.mark.parametrize("chooses", [False, True])
    def test_a_message_names_the_field_only_if_the_planner_does_not_choose_yet(self, chooses: bool) -> None:
        own = Request(
            job="j", global_batch=64, total_steps=10, profile="own", parameters=12 * 10**8, flops_per_sample=1e10,
            activation_nbytes_per_sample=10**6, optimizer="AdamW", strategy="Optimizer", may_accumulate=True,
        )  # fmt: skip
        found = rejected(replace(own, chooses_micro_batches=chooses), view({"device": T4, "cpu": 8, "memory": "64Gi"}))
        assert (found.reason, found.field) == ("DoesNotFit", "spec.globalBatchSize")
        assert ("gradientAccumulation" in found.message) is not chooses

    @pytest.mark.parametrize("cluster", [THREE, T4S, MIXED])
    @pytest.mark.parametrize("batch", [24, 96])
    def test_a_batch_that_fits_everywhere_is_planned_as_without_accumulation(self, cluster: Any, batch: int) -> None:
        for strategy in ("Data", "Auto"):
            request = replace(DIGITS, global_batch=batch, strategy=strategy)
            assert plan(replace(request, chooses_micro_batches=True), cluster, {}) == plan(request, cluster, {})

    @pytest.mark.parametrize("minimize", ["Time", "Energy", "Cost"])
    @pytest.mark.parametrize("batch", [512, 2048, 8192])
    def test_the_choice_is_never_worse_than_without_accumulation(self, minimize: Any, batch: int) -> None:
        request = replace(RESNET, global_batch=batch, minimize=minimize)
        before, after = plan(request, MIXED, {}), plan(replace(request, chooses_micro_batches=True), MIXED, {})
        assert isinstance(after, Decision)
        if isinstance(before, Decision):
            p, q = before.chosen.prediction, after.chosen.prediction
            score = {"Time": (p.step_s, q.step_s), "Energy": (p.energy_J, q.energy_J), "Cost": (p.cost_usd, q.cost_usd)}
            old, new = score[minimize]
            assert old is not None and new is not None and new <= 1.02 * old

    def test_ranks_with_little_memory_determine_the_number_of_micro_batches(self) -> None:
        request = replace(RESNET, global_batch=20_000, chooses_micro_batches=True, nodes_min=6)
        found = decided(request, MIXED).chosen
        assert found.micro_batches > 1 and len(found.groups) == 2
        for group in found.groups:
            micro = ceil(max(group.shares) / found.micro_batches)
            assert memory.rank_nbytes(workload_of(request), micro, True) <= room_nbytes(group.device)

    def test_a_fixed_number_holds_in_every_candidate(self) -> None:
        found = decided(replace(RESNET, micro_batches=3), T4S)
        assert {choice.micro_batches for choice in found.candidates} == {3}

    def test_a_chosen_batch_has_at_most_as_many_micro_batches_as_samples(self) -> None:
        found = decided(replace(DIGITS, global_batch=2, micro_batches=4, nodes_max=1), THREE)
        assert found.chosen.micro_batches == 2

    def test_a_model_that_does_not_fit_alone_gets_no_micro_batches(self) -> None:
        found = rejected(
            Request(
                job="j", global_batch=64, total_steps=10, profile="own", parameters=10**10, flops_per_sample=1e10,
                activation_nbytes_per_sample=10**6, optimizer="AdamW", chooses_micro_batches=True,
            ),
            T4S,
        )  # fmt: skip
        assert found.reason == "DoesNotFit" and "do not depend on the batch size" in found.message

    @pytest.mark.parametrize("limit", [None, 2 * 2**30])
    def test_micro_batches_leave_room_for_data_loading_processes(self, limit: int | None) -> None:
        """Regression: pods needed more memory than they could have, or the plan was rejected for it."""
        request = Request(
            job="j", global_batch=512, total_steps=10, profile="own", parameters=10**6, flops_per_sample=1e9,
            activation_nbytes_per_sample=10**6, sample_nbytes=10**6, cpu_per_pod=8.0, memory_per_pod_nbytes=limit,
            nodes_max=1, chooses_micro_batches=True,
        )  # fmt: skip
        found = decided(request, view({"count": 1, "cpu": 8, "memory": "2Gi"})).chosen
        [group] = found.groups
        assert group.cores > 1 and found.micro_batches > 1, "with processes that load data"
        assert found.prediction.host_memory_nbytes <= 2 * 2**30

    def test_shards_of_all_ranks_leave_room_for_larger_micro_batches(self) -> None:
        """Regression: the search counted the shards of 16 ranks, and took 16 to 26 micro-batches where 15 suffice."""
        request = Request(
            job="j", global_batch=8192, total_steps=10, profile="own", parameters=12 * 10**8, flops_per_sample=1e10,
            activation_nbytes_per_sample=5 * 10**8, optimizer="AdamW", strategy="Optimizer", nodes_min=8,
            chooses_micro_batches=True, collective="Torch",
        )  # fmt: skip
        cluster = view({"count": 8, "device": T4, "devices": 8, "cpu": 32, "memory": "512Gi", "bandwidth": "100G"})
        exact = decided(replace(request, fixed=(FixedChoice(T4, 8, 8),)), cluster).chosen
        found = decided(replace(request, candidates_kept=100), cluster).candidates
        assert {c.micro_batches for c in found if len(c.groups[0].shares) == 64} == {exact.micro_batches}
