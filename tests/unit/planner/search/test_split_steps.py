"""Tests of plans whose ranks each hold a part of the model, after runs of such plans were measured."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dljob.calibrate.learned import Learned, Place, Repeats, SplitPoint
from dljob.cluster import ClusterView
from dljob.cluster.domains import Crossing, Topology
from dljob.planner import Choice, Decision, FixedChoice, Request, plan
from dljob.planner.candidates import precision as precision_search
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.recomputation import with_estimates
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.candidates.strategies.measured_steps import Correction
from dljob.planner.explanation.recomputation import recomputation_reason
from dljob.planner.types.texts import duration
from support.planner_questions import view

FOUR = view({"count": 4, "cpu": 2, "memory": "16Gi"})
GPT = Request(job="j", global_batch=64, total_steps=10, model="gpt-mini", dataset="synthetic-tokens")
SCRIPT = Request(
    job="j", global_batch=64, total_steps=10, profile="script", parameters=10**7, flops_per_sample=6e8,
    activation_nbytes_per_sample=10**6, strategy="Sharded",
)  # fmt: skip
A100 = "NVIDIA-A100-SXM4-80GB"
AUTO = replace(
    SCRIPT, global_batch=256, total_steps=1000, parameters=3 * 10**8, flops_per_sample=6e11, precision=None,
    activation_nbytes_per_sample=10**8, checkpointed_nbytes_per_sample=2 * 10**7, recomputation="Auto",
)  # fmt: skip
ASKED: dict[str, dict[str, Any]] = {
    "Pipeline": {"strategy": "Pipeline", "stages": 2, "micro_batches": 8},
    "Tensor": {"strategy": "Tensor"},
}


def request(strategy: str, nodes: int = 2) -> Request:
    if strategy == "Sharded":
        return replace(SCRIPT, nodes_min=nodes, nodes_max=nodes)
    replicas = {"replicas": nodes // 2} if nodes > 2 else {}
    return replace(GPT, nodes_min=nodes, nodes_max=nodes, **ASKED[strategy], **replicas)


def chosen(asked: Request, steps: tuple[SplitPoint, ...] = (), cluster: ClusterView = FOUR) -> Choice:
    found = plan(asked, cluster, {(asked.key(), "cpu"): Learned(split_steps=steps)} if steps else {})
    assert isinstance(found, Decision), found
    return found.chosen


def ran(choice: Choice, asked: Request, factor: float) -> SplitPoint:
    """Return the measured step of a plan that took ``factor`` times as long as predicted."""
    (group,) = choice.groups
    p = choice.prediction
    place = Place(group.nodes, group.ranks_per_node, choice.collective, cores=max(1, int(group.cores)))
    assert choice.strategy in ("Pipeline", "Tensor", "Sharded")
    return SplitPoint(
        choice.strategy,
        place,
        asked.global_batch,
        factor * (p.step_s - p.data_s),
        choice.micro_batches,
        choice.replicas,
    )


@pytest.mark.parametrize("strategy", ["Pipeline", "Tensor", "Sharded"])
def test_an_equal_plan_has_the_measured_step_and_larger_ones_most_of_its_error(strategy: str) -> None:
    asked, more = request(strategy), request(strategy, 4)
    first, large = chosen(asked), chosen(more)
    known = (ran(first, asked, 2.0),)
    again, larger = chosen(asked, known), chosen(more, known)
    assert again.summary == first.summary
    assert 1.8 < again.prediction.step_s / first.prediction.step_s < 2.0
    assert again.prediction.efficiency == pytest.approx(first.prediction.efficiency, rel=0.02), "one rank is as slow"
    assert 1.4 < larger.prediction.step_s / large.prediction.step_s < 1.9
    assert "profile" in {again.prediction.basis, larger.prediction.basis}

    def spread(choice: Choice) -> float:
        return choice.prediction.step_p90_s / choice.prediction.step_s

    assert spread(again) < spread(larger) < spread(large)


@pytest.mark.parametrize("factor", [1 / 30, 30])
@pytest.mark.parametrize("strategy", ["Pipeline", "Tensor"])
def test_step_of_a_built_in_model_that_cannot_be_right_is_named_and_not_used(strategy: str, factor: float) -> None:
    """Regression: it was left out without a word."""
    asked = request(strategy)
    first = chosen(asked)
    wrong = ran(first, asked, factor)
    found = plan(asked, FOUR, {(asked.key(), "cpu"): Learned(split_steps=(wrong,))})
    assert isinstance(found, Decision)
    assert found.chosen.prediction.step_s == first.prediction.step_s
    assert found.warning is not None and "does not use these measurements" in found.warning
    assert f"profile of gpt-mini on cpu: found a step of {duration(wrong.step_s)} on 2 ranks" in found.warning


@pytest.mark.parametrize("factor", [1 / 1000, 1000])
def test_measured_step_of_a_script_counts_however_wrong_its_hints_are(factor: float) -> None:
    """Regression: with hints that were 30 times too small, plans expected a 30th of each measured step for ever."""
    asked = request("Sharded")
    first = chosen(asked)

    def after(factor: float) -> Decision:
        found = plan(asked, FOUR, {(asked.key(), "cpu"): Learned(split_steps=(ran(first, asked, factor),))})
        assert isinstance(found, Decision)
        return found

    again = after(factor)
    assert abs(log(again.chosen.prediction.step_s / first.prediction.step_s)) > 0.8 * log(1000)
    assert again.warning is not None and "Correct the hints" in again.warning
    assert after(1.5).warning is None


def test_prediction_is_no_surer_than_equal_runs_on_the_device_are_equal() -> None:
    """Regression: on devices with noisy neighbours, steps within the usual differences exceeded the p90 of plans."""
    asked, noisy = request("Sharded"), {("other", "cpu"): Learned(repeats=Repeats(20, 0.4))}
    known = {(asked.key(), "cpu"): Learned(split_steps=(ran(chosen(asked), asked, 1.0),))}
    calm, shaky = (plan(asked, FOUR, {**known, **others}) for others in ({}, noisy))
    assert isinstance(calm, Decision) and isinstance(shaky, Decision)
    p, q = calm.chosen.prediction, shaky.chosen.prediction
    assert 1.1 < p.step_p90_s / p.step_s < 1.2 and q.step_p90_s / q.step_s > 1.5


@pytest.mark.parametrize("cpu", [0.5, 1, 1.9])
def test_a_run_on_nodes_with_a_part_of_a_cpu_is_found(cpu: float) -> None:
    """Regression: ranks on half a CPU have one thread, and the measured run was taken for one of another layout."""
    nodes, asked = view({"count": 2, "cpu": cpu, "memory": "16Gi"}), request("Sharded")
    first = chosen(asked, cluster=nodes)
    point = ran(first, asked, 3.0)
    assert point.place.cores == 1
    assert chosen(asked, (point,), nodes).prediction.step_s > 2 * first.prediction.step_s


@pytest.mark.parametrize("machine", [{"machine": "m", "machineCpu": 4}, {}])
def test_a_run_on_nodes_of_one_machine_that_has_cores_for_all_is_found(machine: dict[str, Any]) -> None:
    """Regression: nodes with a part of a CPU, which fit into their machine together, were taken for another layout."""
    nodes, asked = view({"count": 2, "cpu": 0.5, "memory": "16Gi", **machine}), request("Sharded")
    first = chosen(asked, cluster=nodes)
    point = ran(first, asked, 3.0)
    point = replace(point, place=replace(point.place, machine_nodes=2))
    assert chosen(asked, (point,), nodes).prediction.step_s > 2 * first.prediction.step_s


def test_a_run_as_predicted_changes_no_prediction_across_zones() -> None:
    """Regression: a run within a zone counted as one across zones, so that the slow network between them had no cost."""
    zones = [{"cpu": 2, "memory": "16Gi", "zone": zone} for zone in "ab"]
    asked = replace(request("Sharded"), topology=Topology(zones=Crossing(2e7, 5e-3)))
    within, across = chosen(asked, cluster=view({**zones[0], "count": 2})), chosen(asked, cluster=view(*zones))
    again = chosen(asked, (ran(within, asked, 1.0),), view(*zones))
    assert across.prediction.step_s > 10 * within.prediction.step_s
    assert again.prediction.step_s == pytest.approx(across.prediction.step_s)


@pytest.mark.parametrize("there", [8, 1])
def test_a_run_as_predicted_changes_no_prediction_with_other_ranks_on_a_node(there: int) -> None:
    """Regression: its step was compared with the predicted speed of ranks with the candidate's neighbours."""
    box = view({"count": 2, "cpu": 8, "memory": "64Gi"})
    asked = replace(SCRIPT, threads_per_rank=1, flops_per_sample=6e7, nodes_max=2)

    def fixed(nodes: int, ranks: int, steps: tuple[SplitPoint, ...] = ()) -> float:
        return chosen(replace(asked, fixed=(FixedChoice("cpu", nodes, ranks),)), steps, box).prediction.step_s

    point = ran(chosen(replace(asked, fixed=(FixedChoice("cpu", 1, there),)), cluster=box), asked, 1.0)
    for nodes, ranks in ((1, 2), (2, 4), (2, 8), (2, 1)):
        assert fixed(nodes, ranks, (point,)) == pytest.approx(fixed(nodes, ranks), rel=1e-6), (nodes, ranks)


def test_a_slow_run_leads_to_no_plan_of_which_less_is_known() -> None:
    """Regression: farther plans, which a run corrects less, seemed faster: after 2 nodes, the next plan had 16."""
    gpus = view({"count": 16, "device": A100, "cpu": 16, "memory": "128Gi", "bandwidth": "3G"})
    asked = replace(AUTO, precision="BF16", recomputation="Never")
    first = plan(asked, gpus, {})
    assert isinstance(first, Decision), first
    p, (group,) = first.chosen.prediction, first.chosen.groups
    point = SplitPoint("Sharded", Place(group.nodes, 1, "Torch"), 256, 3 * (p.step_s - p.data_s))
    again = plan(asked, gpus, {(asked.key("BF16"), A100): Learned(split_steps=(point,))})
    assert isinstance(again, Decision), again
    assert again.chosen.summary == first.chosen.summary


def of_8_gpus(asked: Request, known: dict[tuple[str, str], Learned]) -> Choice:
    gpus = view({"device": A100, "devices": 8, "cpu": 64, "memory": "512Gi"})
    found = plan(replace(asked, fixed=(FixedChoice(A100, 1, 8),)), gpus, known)
    assert isinstance(found, Decision), found
    return found.chosen


def of_run(asked: Request, factor: float) -> dict[tuple[str, str], Learned]:
    """Return what is known after a run of the best plan that took ``factor`` times as long as predicted."""
    best = of_8_gpus(asked, {})
    step_s = factor * (best.prediction.step_s - best.prediction.data_s)
    point = SplitPoint("Sharded", Place(1, 8, "Torch"), asked.global_batch, step_s)
    return {(asked.key(best.precision, best.recomputes), A100): Learned(split_steps=(point,))}


def test_a_slow_run_does_not_lead_to_activation_checkpointing_or_another_precision() -> None:
    """Regression: their plans had the predicted time, and the plan that had run had the measured one."""
    first, again = of_8_gpus(AUTO, {}), of_8_gpus(AUTO, of_run(AUTO, 3.0))
    assert (first.precision, first.recomputes) == ("BF16", False)
    assert again.summary == first.summary
    assert again.prediction.step_s > 2.5 * first.prediction.step_s


@pytest.mark.parametrize(
    ("device", "precision", "others"),
    [("cpu", "BF16", {"s.bf16.checkpointed"}), (A100, "FP16", {"s.fp16.checkpointed"}),
     (A100, None, {"s", "s.checkpointed", "s.bf16.checkpointed", "s.fp16", "s.fp16.checkpointed"})],
)  # fmt: skip
def test_a_run_counts_for_the_workloads_that_a_job_compares(device: str, precision: Any, others: set[str]) -> None:
    asked = replace(AUTO, profile="s", precision=precision)
    ran_with = asked.key(precision or "BF16")
    known = {(ran_with, device): Learned(split_steps=(SplitPoint("Sharded", Place(2, 1), 64, 1.0),))}
    found = with_estimates(asked, workload_of(asked), known)
    assert found[ran_with, device] == known[ran_with, device]
    assert {key for key, _ in found} == {ran_with, *others}
    pools = eligible(asked, view({"device": device, "gpu": device == A100, "cpu": 8})).pools
    searched = [each for each, _ in precision_search.searched(asked, pools, found)]
    assert searched == ([precision] if precision else ["BF16", "FP32"]), "FP16 is as fast as BF16, and was not measured"


def test_a_reason_names_the_times_that_were_compared() -> None:
    """Regression: 'no better: 2s per step instead of 3s', where the p90 of the former was longer."""
    first = of_8_gpus(AUTO, {})
    p = first.prediction
    unsure = replace(p, step_s=p.step_s / 2, step_p90_s=2 * p.step_p90_s, total_p90_s=2 * p.total_p90_s)
    again = replace(first, recomputes=True, prediction=unsure)
    text = recomputation_reason(replace(AUTO, cautious=True), workload_of(AUTO), first, [first, again])
    assert f"{duration(2 * p.step_p90_s)} per step instead of {duration(p.step_p90_s)} (p90)" in (text or "")


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
@pytest.mark.parametrize("recomputation", ["Never", "Always"])
def test_a_run_as_predicted_changes_no_prediction_of_other_variants(precision: Any, recomputation: Any) -> None:
    known = with_estimates(AUTO, workload_of(AUTO), of_run(AUTO, 1.0))
    asked = replace(AUTO, precision=precision, recomputation=recomputation)
    found = of_8_gpus(asked, known).prediction
    assert found.step_s == pytest.approx(of_8_gpus(asked, {}).prediction.step_s)
    assert found.basis == "profile"


@pytest.mark.parametrize("there", [1, 2, 8])
@pytest.mark.parametrize("here", [1, 2, 8])
def test_a_run_with_other_cores_of_a_rank_counts_as_what_it_was(there: int, here: int) -> None:
    """Its ratio is that of its own layout, so that a run as predicted changes nothing."""
    box, asked = view({"count": 2, "cpu": 8, "memory": "64Gi"}), replace(SCRIPT, flops_per_sample=6e9)
    runs = {n: replace(asked, fixed=(FixedChoice("cpu", 2, n),)) for n in (there, here)}
    first, measured = chosen(runs[here], cluster=box), chosen(runs[there], cluster=box)
    as_predicted, slow = (chosen(runs[here], (ran(measured, asked, factor),), box) for factor in (1.0, 2.0))
    assert as_predicted.prediction.step_s == pytest.approx(first.prediction.step_s)
    assert slow.prediction.step_s > 1.08 * first.prediction.step_s


def test_a_slow_run_on_cpus_does_not_lead_to_another_division_of_the_cores() -> None:
    """Regression: layouts with other cores for each rank had the predicted time, until each of them had run."""
    box, asked = view({"count": 2, "cpu": 8, "memory": "64Gi"}), replace(SCRIPT, global_batch=256, total_steps=1000)
    asked = replace(asked, activation_nbytes_per_sample=10**8, chooses_micro_batches=True)
    first = chosen(asked, cluster=box)
    assert chosen(asked, (ran(first, asked, 2.0),), box).summary == first.summary


def test_step_without_cores_or_of_another_strategy_changes_nothing() -> None:
    asked = request("Sharded")
    first = chosen(asked)
    point = ran(first, asked, 2.0)
    others = (
        replace(point, place=replace(point.place, cores=None)),
        replace(point, strategy="Tensor"),
    )
    for other in others:
        assert chosen(asked, (other,)).prediction.step_s == first.prediction.step_s, other


def test_a_run_that_the_model_cannot_be_cut_for_any_more_changes_nothing() -> None:
    asked = request("Pipeline")
    first = chosen(asked)
    point = ran(first, asked, 2.0)
    for other in (replace(point, place=Place(500, 1, "MPI", cores=2)), replace(point, replicas=50)):
        assert chosen(asked, (other,)).prediction.step_s == first.prediction.step_s, other


def test_users_groups_and_gpus_have_the_measured_step_too() -> None:
    name = "NVIDIA-A100-SXM4-80GB"
    gpus = view({"count": 2, "device": name, "gpu": True, "devices": 8, "cpu": 64, "memory": "512Gi"})
    asked = replace(SCRIPT, fixed=(FixedChoice(name, 2, 8),), global_batch=64, precision="BF16")
    first = plan(asked, gpus, {})
    assert isinstance(first, Decision), first
    p = first.chosen.prediction
    point = SplitPoint("Sharded", Place(2, 8, "Torch"), 64, 3 * (p.step_s - p.data_s))
    again = plan(asked, gpus, {(asked.key("BF16"), name): Learned(split_steps=(point,))})
    assert isinstance(again, Decision)
    assert again.chosen.prediction.step_s == pytest.approx(3 * p.step_s, rel=0.15)
    assert again.chosen.prediction.basis == "profile"
    half = replace(asked, fixed=(FixedChoice(name, 2, 4),))
    before, after = (
        plan(half, gpus, known) for known in ({}, {(asked.key("BF16"), name): Learned(split_steps=(point,))})
    )
    assert isinstance(before, Decision) and isinstance(after, Decision)
    assert after.chosen.prediction.step_s > 1.7 * before.chosen.prediction.step_s, (
        "otherwise the next plan leaves GPUs idle"
    )


@given(st.floats(-3, 3), st.floats(0, 1), st.integers(1, 6), st.floats(0.15, 1))
@example(-2.220446049250313e-16, 1.0, 1, 1.0)  # rounded in the last place
def test_a_correction_never_overshoots_and_never_widens(log_ratio: float, near: float, n: int, spread: float) -> None:
    factor, left = Correction(log_ratio, near, n).applied(spread)
    assert 0 <= log(factor) * (1 if log_ratio >= 0 else -1) <= abs(log_ratio) + 1e-15
    assert left <= spread
