"""Tests of plans for scripts that nobody described, with the structure that an earlier run has shown."""

from dataclasses import replace

import pytest

from dljob.calibrate.learned import Learned, LearnedPoint
from dljob.cluster import catalogue
from dljob.cluster.catalogue import TimeFactors
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.workload import structure
from dljob.perf.workload.observed import MAX_LAYERS, Structure, Work, observed
from dljob.perf.workload.workload import builtin
from dljob.planner import Decision, FixedChoice, Request, compare, plan, scaling
from dljob.planner.observed import described, text_of
from support.planner_questions import T4, decided, view

MISSING = ("model", "dataset", "globalBatchSize", "epochs")
SCRIPT = Request(job="j", global_batch=0, total_steps=0, collective="Torch", reduced_by_script=True, profile="program-1",
                 nodes_min=2, nodes_max=2, uneven=False, missing=MISSING)  # fmt: skip
SEEN = Structure(
    parameters=200_000, flops=6e7, activation_nbytes=4e5, sample_nbytes=3072, batch=32, optimizer_slots=2,
    work=(Work("convolution", 6, 1.5e7, 6e5), Work("product", 2, 5e6, 2e4), Work("other", 10, 0, 8e5)),
    device="cpu", nodes=2, ranks_per_node=1, cores=1,
)  # fmt: skip
CORE = catalogue.cpu("cpu", 1.0)
CPUS = view({"device": "cpu", "count": 4, "cpu": 2, "memory": "8Gi", "bandwidth": "125M"})


def known(seen: Structure = SEEN, **more: object) -> dict[tuple[str, str], Learned]:
    structure = replace(seen, **more)  # type: ignore[arg-type]
    return {("program-1", structure.device): Learned(structure=structure)}


def shape_of(found: Decision) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(group.device, group.nodes, group.shares) for group in found.chosen.groups]


def test_step_is_predicted_for_the_nodes_that_the_spec_asks_for() -> None:
    found = decided(SCRIPT, CPUS, known())
    without = decided(SCRIPT, CPUS)
    p = found.chosen.prediction
    assert found.chosen.groups == without.chosen.groups and without.chosen.prediction.step_s == 0
    assert p.step_s > 0 and p.step_p90_s > p.step_s and p.communication_s > 0
    assert p.samples_per_s == pytest.approx(2 * 32 / p.step_s)
    assert (p.total_s, p.total_p90_s, p.energy_J, p.cost_usd) == (0, 0, None, None), "nobody knows the steps"
    assert p.host_memory_nbytes >= without.chosen.prediction.host_memory_nbytes
    assert (found.structure, found.missing) == (SEEN, ("dataset", "globalBatchSize", "epochs"))


def test_steps_of_a_complete_run_give_its_run_time() -> None:
    same = decided(SCRIPT, CPUS, known(steps=1000)).chosen.prediction
    assert same.total_s == pytest.approx(1000 * same.step_s, rel=0.2) and same.energy_J is not None
    four = decided(replace(SCRIPT, nodes_min=4, nodes_max=4), CPUS, known(steps=1000)).chosen.prediction
    assert four.samples_per_s * four.total_s == pytest.approx(1000 * 64, rel=0.2), "the same number of samples"
    stated = decided(replace(SCRIPT, total_steps=500, missing=MISSING[:3]), CPUS, known(steps=1000)).chosen.prediction
    assert stated.total_s == pytest.approx(same.total_s / 2, rel=0.2)
    late = decided(replace(SCRIPT, deadline_s=1.0), CPUS, known(steps=1000))
    assert "the predicted run time is" in (late.warning or "") and "spec.objective.deadline" in (late.warning or "")
    assert "deadline" not in (decided(replace(SCRIPT, deadline_s=1e6), CPUS, known(steps=1000)).warning or "")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 2.5])
def test_measured_step_is_predicted_at_its_place(ranks: int, factor: float) -> None:
    """After one run, the error of the step time is that of the fixed point, far below 10 %."""
    asked = replace(SCRIPT, nodes_min=ranks, nodes_max=ranks)
    first_s = decided(asked, CPUS, known()).chosen.prediction.step_s
    again = decided(asked, CPUS, known(nodes=ranks, step_s=factor * first_s)).chosen.prediction
    assert again.step_s == pytest.approx(factor * first_s, rel=0.05)
    assert again.basis == "profile" and again.step_p90_s / again.step_s < 2


@pytest.mark.parametrize("nodes", [1, 2])
def test_measured_step_counts_if_the_place_of_the_run_is_not_free(nodes: int) -> None:
    """Regression: on the only free device, a step of 0.4 s was predicted as 2 ms, from the script's operations alone."""
    asked = replace(SCRIPT, nodes_min=1, nodes_max=nodes)
    run = known(device=T4, nodes=nodes, ranks_per_node=2, cores=None, step_s=0.2, steps=100)
    whole = view({"device": T4, "count": 2, "devices": 2, "cpu": 8, "memory": "32Gi"})
    part = replace(whole, nodes=(replace(whole.nodes[0], free_devices=1),))
    found = decided(asked, part, run).chosen
    assert [len(group.shares) for group in found.groups] == [1], "one rank"
    assert found.prediction.step_s == pytest.approx(0.2, rel=0.2) and found.prediction.basis == "profile"
    assert found.prediction.total_s == pytest.approx(0.2 * 100 * 2 * nodes, rel=0.2), "the same number of samples"


def test_measured_step_counts_on_nodes_with_another_gpu_only() -> None:
    """Regression: in an assignment of all jobs, a job's part has one type of GPU. It was predicted from operations."""
    a100 = "NVIDIA-A100-SXM4-40GB"
    nodes = [{"device": device, "count": 2, "devices": 2, "cpu": 8, "memory": "32Gi"} for device in (T4, a100)]
    asked, run = replace(SCRIPT, devices=(T4,)), known(device=a100, nodes=1, ranks_per_node=2, cores=None, step_s=0.2)
    whole, part = (decided(asked, view(*given), run).chosen.prediction for given in (nodes, nodes[:1]))
    assert part.step_s == pytest.approx(whole.step_s, rel=1e-6) and 0.2 < part.step_s < 2


@pytest.mark.parametrize("step_s", [0.005, 0.05, 0.3])
def test_step_shorter_than_the_predicted_communication_is_predicted_at_its_place(step_s: float) -> None:
    """Regression: scripts that reduce less than all gradients in float32 were predicted up to 100 times too slow."""
    large = replace(SEEN, parameters=11_000_000)
    assert decided(SCRIPT, CPUS, known(large)).chosen.prediction.communication_s > step_s
    again = decided(SCRIPT, CPUS, known(large, step_s=step_s)).chosen.prediction
    assert again.step_s == pytest.approx(step_s, rel=0.1) and again.basis == "profile"
    four = decided(replace(SCRIPT, nodes_min=4, nodes_max=4), CPUS, known(large, step_s=step_s)).chosen.prediction
    assert step_s / 2 < four.step_s < 2 * step_s
    one = decided(replace(SCRIPT, nodes_min=1, nodes_max=1), CPUS, known(large, step_s=step_s)).chosen.prediction
    assert step_s / 4 < one.step_s < 1.1 * step_s


@pytest.mark.parametrize(("cpu", "free"), [(0.5, 0.5), (0.5, 0.4), (1, 0.9)])
def test_step_is_predicted_on_nodes_with_less_than_one_free_cpu(cpu: float, free: float) -> None:
    """Regression: there was no prediction beside daemons, and no use of a step that was measured on a part of a CPU."""
    small = view({"device": "cpu", "count": 4, "cpu": cpu, "memory": "8Gi", "bandwidth": "125M"})
    small = replace(small, nodes=tuple(replace(node, free_cpu=free) for node in small.nodes))
    first_s = decided(SCRIPT, small, known()).chosen.prediction.step_s
    assert first_s > 0
    again = decided(SCRIPT, small, known(step_s=2.5 * first_s)).chosen.prediction
    assert again.step_s == pytest.approx(2.5 * first_s, rel=0.05)


def test_measured_computing_times_take_precedence() -> None:
    learned = {
        ("program-1", "cpu"): Learned(points=(LearnedPoint(32, 0.5, 50, 1),), structure=replace(SEEN, step_s=9.0))
    }
    assert decided(SCRIPT, CPUS, learned).chosen.prediction.step_s == pytest.approx(0.5, rel=0.3)


def test_structure_in_place_of_the_model_gives_a_search() -> None:
    asked = replace(
        SCRIPT, global_batch=64, total_steps=1000, nodes_min=1, nodes_max=None, missing=("model", "dataset")
    )
    found = decided(asked, CPUS, known())
    assert found.missing == () and found.structure == SEEN and len(found.candidates) > 1
    assert found.chosen.prediction.total_s > 0 and sum(found.chosen.groups[0].shares) == 64
    fixed = decided(replace(asked, memory_per_pod_nbytes=2**31), CPUS, known())
    assert (fixed.structure, fixed.missing) == (SEEN, ()) and not fixed.warning
    request = described(asked, known())
    assert request.missing == () and len(scaling(request, CPUS, known())) == 4
    assert all(each.choice or each.reason for each in compare(request, CPUS, known(), False))


def test_structure_of_another_device_is_used() -> None:
    gpus = view({"device": T4, "count": 2, "cpu": 8, "memory": "32Gi"})
    found = decided(SCRIPT, gpus, known(step_s=0.1, steps=10))
    assert 0 < found.chosen.prediction.step_s < 0.05, "the time of the CPUs says nothing about GPUs"
    assert found.chosen.prediction.total_s > 0


def test_too_large_batch_leaves_the_job_without_a_prediction() -> None:
    found = decided(SCRIPT, CPUS, known(activation_nbytes=1e12))
    assert found.chosen.prediction.step_s == 0 and found.chosen.prediction.host_memory_nbytes > 0
    assert "no time is predicted from the script's observed structure" in (found.warning or "")
    asked = replace(
        SCRIPT, global_batch=64, total_steps=1000, nodes_min=1, nodes_max=None, missing=("model", "dataset")
    )
    searched = decided(asked, CPUS, known(activation_nbytes=1e12))
    assert shape_of(searched) == shape_of(decided(replace(asked, profile=None), CPUS)), "the job still starts"
    assert "no time is predicted" in (searched.warning or "")


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": 10**15, "flops": 1e18, "activation_nbytes": 1e18, "sample_nbytes": 1e15, "batch": 10**9},
        {"parameters": 1, "flops": 1e-9, "activation_nbytes": 0.0, "sample_nbytes": 0.0, "work": ()},
        {"work": (Work("nonsense", 10**6, 1e18, 1e18), Work("product", 10**6, 1e-9, 0))},
        {"work": (Work("other", 1, 0, 0),)},
        {"step_s": 1e12, "steps": 2**53},
        {"step_s": 1e-12, "steps": 2**53},
        {"nodes": 10**6, "ranks_per_node": 10**6, "step_s": 1.0},
    ],
)
def test_absurd_structures_never_prevent_a_plan(change: dict[str, object]) -> None:
    """The script writes them."""
    for asked in (SCRIPT, replace(SCRIPT, fixed=(FixedChoice("cpu", 1),))):
        assert isinstance(plan(asked, CPUS, known(**change)), Decision)


def test_jobs_with_a_model_ignore_a_structure() -> None:
    hints = replace(SCRIPT, parameters=1000, flops_per_sample=6000.0, missing=MISSING[1:])
    assert described(hints, known()) == hints
    assert described(replace(SCRIPT, profile="program-2"), known()) == replace(SCRIPT, profile="program-2")
    best = {
        ("program-1", "cpu"): Learned(structure=SEEN),
        ("program-1", "x"): Learned(structure=replace(SEEN, step_s=1.0)),
    }
    assert described(SCRIPT, best).structure == replace(SEEN, step_s=1.0)


def test_workload_has_the_costs_of_the_structure() -> None:
    found = observed(SEEN)
    assert found.parameters == 200_000 and len(found.layers) == 18 and found.optimizer_slots == 2
    assert found.flops_per_sample == pytest.approx(6e7)
    assert sum(layer.moved_elements for layer in found.layers) == pytest.approx(1.42e6 / 4)
    assert sum(layer.is_conv for layer in found.layers) == 6
    many = observed(replace(SEEN, work=(Work("product", 10**6, 2e7, 0),)))
    assert len(many.layers) == MAX_LAYERS and many.flops_per_sample == pytest.approx(6e7)
    assert builtin("mlp", None).optimizer_slots == 1 == observed(replace(SEEN, optimizer_slots=1)).optimizer_slots


def test_text_names_the_costs_and_the_measured_step() -> None:
    assert text_of(SEEN) == (
        "observed in an earlier run: 200,000 parameters, 6e+07 operations per sample, 32 samples per rank and step"
    )
    assert text_of(replace(SEEN, step_s=0.05)).endswith(", 50ms per step on 2 ranks on 2 x cpu")


@pytest.mark.parametrize(
    "absurd",
    [
        {"flops": 1.0, "step_s": 5e-324},
        {"flops": 1e9, "batch": 10**9, "step_s": 1e9, "work": (Work("product", 1, 1e18, 1e18), Work("x", 1, 1, 0))},
        {"flops": 1e18, "activation_nbytes": 1e18, "sample_nbytes": 10**15, "parameters": 10**15, "batch": 10**9},
    ],
)
@pytest.mark.parametrize("missing", [MISSING, MISSING[:2]])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_absurd_structure_does_not_keep_a_job_from_running(absurd: dict[str, object], missing: tuple[str, ...]) -> None:
    """The script reports its structure, and the profile keeps it: no later job with the script could be planned."""
    asked = SCRIPT if missing == MISSING else replace(SCRIPT, global_batch=64, total_steps=1000, missing=missing)
    found, without = decided(asked, CPUS, known(**absurd)), decided(asked, CPUS)
    assert shape_of(found)[0][:2] == shape_of(without)[0][:2]


def test_layers_have_all_parameters() -> None:
    works = tuple(Work(kind, 1, 1e6, 1e3) for kind in ("convolution", "product", "convolution", "other"))
    for parameters in (1, 2, 3, 1000, 10**15):
        layers = observed(replace(SEEN, parameters=parameters, work=works)).layers
        assert sum(layer.parameters for layer in layers) == parameters


def test_assumed_memory_is_free_on_the_nodes_of_each_group() -> None:
    """Each group's pods request what they need, and all pods what is assumed, if all nodes have it."""
    nodes = view(
        {"device": "large", "count": 1, "cpu": 16, "memory": "64Gi"},
        {"device": "small", "count": 1, "cpu": 4, "memory": "3Gi"},
    )
    places = (FixedChoice("large", 1, 8, 8), FixedChoice("small", 1, 1, 8))
    asked = replace(SCRIPT, nodes_min=1, fixed=places, global_batch=72, total_steps=100, missing=("model",))
    large, small = decided(asked, nodes, known(device="large")).chosen.prediction.pods_nbytes
    assert small <= 3 * 2**30 < large


def test_counted_calls_of_the_host_replace_its_assumed_overhead() -> None:
    """A step of a small script is Python and operators outside of forward passes, which the layers do not show."""
    calls = (("updates", 2.0), ("functions", 6000.0), ("different", 400.0), ("views", 90.0), ("operators", 110.0))
    assert dict(structure.host_terms(observed(replace(SEEN, host_calls=calls)))) == dict(calls)
    counted_s = {
        factor: plan_s(known(host_calls=tuple((kind, factor * count) for kind, count in calls))) for factor in (0, 1, 2)
    }
    added_s = sum(structure.CALL_S[kind] * count for kind, count in calls)
    assert counted_s[1] - counted_s[0] == pytest.approx(added_s)
    assert counted_s[2] - counted_s[0] == pytest.approx(2 * added_s)
    assert counted_s[0] < plan_s(known()), "neither layers nor the loop of the built-in trainer"
    slow = replace(catalogue.cpu("cpu", 1.0), factors=TimeFactors(host=2.0))
    both = [catalogue_curve(observed(replace(SEEN, host_calls=calls)), chip).seconds(0) for chip in (CORE, slow)]
    assert both[1] - both[0] == pytest.approx(added_s), "the probe measures the host of each type of device"


def plan_s(learned: dict[tuple[str, str], Learned]) -> float:
    return decided(SCRIPT, CPUS, learned).chosen.prediction.compute_s


def test_calls_count_for_scripts_whose_operations_have_no_kinds() -> None:
    assert observed(replace(SEEN, work=(), host_calls=(("updates", 1.0),))).host_calls == (("updates", 1.0),)
