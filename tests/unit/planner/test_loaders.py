"""Tests of the CPUs of ranks on GPUs: as many as loading data needs, within the GPU's part of the node."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.planner import Decision, FixedChoice, Learned, LearnedPoint, Request, plan
from support.planner_questions import A100, RESNET, decided, view

SCRIPT = Request(
    job="j", global_batch=512, total_steps=10**4, profile="program-1", parameters=25_600_000, flops_per_sample=24.6e9,
    activation_nbytes_per_sample=60_000_000, sample_nbytes=110_000, dataset_samples=1_281_167,
)  # fmt: skip
"""ResNet-50 on ImageNet, in a script."""


def dgx(cpu: int = 96, free_cpu: float | None = None, devices: int = 8) -> ClusterView:
    """Return a node of A100 and CPUs. ``free_cpu``: CPUs that no pod requests; None: all."""
    (node,) = view({"device": A100, "devices": devices, "cpu": cpu, "memory": "1024Gi"}).nodes
    return ClusterView((replace(node, free_cpu=float(cpu) if free_cpu is None else free_cpu),))


SLOW = {("program-1", A100): Learned((LearnedPoint(64, 0.1),), fetch_s=0.01)}
"""It takes 10 ms to decode an image, and 100 ms to train on 64 of them."""
ONE, FAST = ({("program-1", A100): Learned((LearnedPoint(64, 0.1),), fetch_s=each)} for each in (1e-3, 1e-5))
CASES: dict[str, tuple[Request, ClusterView, dict[tuple[str, str], Learned], float]] = {
    "nobody knows how long decoding takes": (SCRIPT, dgx(), {}, 4),
    "nobody knows, and the node has few CPUs": (SCRIPT, dgx(30), {}, 3),
    "decoding is fast": (SCRIPT, dgx(), FAST, 1),
    "one worker keeps up": (SCRIPT, dgx(), ONE, 2),
    "seven workers decode": (SCRIPT, dgx(), SLOW, 8),
    "decoding takes the GPU's part of the node": (SCRIPT, dgx(60), SLOW, 6),
    "the node has few CPUs": (SCRIPT, dgx(40), SLOW, 4),
    "other pods use the CPUs": (SCRIPT, dgx(free_cpu=18.0), SLOW, 2),
    "the CPU limit of a pod": (replace(SCRIPT, cpu_limit_per_pod=24.0), dgx(), SLOW, 3),
    "the spec sets the CPUs of a pod": (replace(SCRIPT, cpu_per_pod=16.0), dgx(), SLOW, 2),
    "a quota of the namespace": (replace(SCRIPT, cpus_max=64.0), dgx(), SLOW, 1),
    "a built-in model loads in a thread": (replace(RESNET, global_batch=512), dgx(), {}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_get_the_cpus_that_pay(name: str) -> None:
    request, node, learned, expected = CASES[name]
    chosen = decided(replace(request, fixed=(FixedChoice(A100, 1, 8),)), node, learned).chosen
    (group,) = chosen.groups
    assert (group.cores, group.cpu_per_pod) == (expected, 8 * expected), chosen.summary
    assert (f"{expected} cores per rank" in chosen.summary) == (expected > 1)


def test_loading_ahead_hides_the_input() -> None:
    fast, slow = (
        decided(replace(SCRIPT, nodes_max=1, cpu_per_pod=cpus), dgx()).chosen.prediction for cpus in (None, 8.0)
    )
    assert slow.data_s > 0.1 * slow.step_s and fast.data_s < 0.05 * slow.data_s
    assert fast.step_s == pytest.approx(slow.step_s - slow.data_s + fast.data_s, rel=0.05)


def test_gpus_that_would_wait_for_input_are_left_to_others() -> None:
    """Two GPUs whose ranks have eight CPUs each train as fast as eight GPUs whose ranks have two."""
    (group,) = decided(replace(SCRIPT, nodes_max=1), dgx(free_cpu=18.0), SLOW).chosen.groups
    assert (group.ranks_per_node, group.cores) == (2, 8)


def test_a_plan_never_asks_for_more_cpus_than_are_free() -> None:
    """Eight GPUs are free, but five CPUs: at most five ranks can start."""
    (group,) = decided(replace(SCRIPT, nodes_max=1), dgx(free_cpu=5.0), FAST).chosen.groups
    assert group.ranks_per_node == 4 and group.cpu_per_pod <= 5


@settings(max_examples=40)
@given(
    cpu=st.integers(8, 256), free=st.floats(0.3, 1), devices=st.integers(1, 8), fetch_s=st.floats(1e-5, 0.05),
    batch=st.integers(8, 500),
)  # fmt: skip
def test_more_cpus_never_cost_time_or_the_part_of_another_gpu(
    cpu: int, free: float, devices: int, fetch_s: float, batch: int
) -> None:
    node, request = dgx(cpu, max(1.0, free * cpu), devices), replace(SCRIPT, global_batch=batch, nodes_max=1)
    learned = {("program-1", A100): Learned((LearnedPoint(64, 0.1),), fetch_s=fetch_s)}
    chosen = decided(request, node, learned).chosen
    alone = decided(replace(request, cpus_max=1e9), node, learned).chosen
    assert chosen.prediction.step_s <= alone.prediction.step_s * 1.001
    for group in chosen.groups:
        assert group.cpu_per_pod <= node.nodes[0].free_cpu
        assert group.cores <= max(1.0, cpu / devices)


@pytest.mark.parametrize("gibibytes", [4, 5, 8])
def test_pods_with_loaders_fit_on_cpu_nodes(gibibytes: int) -> None:
    """Regression: pods request memory for data-loading processes, which nobody compared with what nodes have."""
    node = Node("c", "cpu", cpu=16, free_cpu=16, free_memory_nbytes=gibibytes * 2**30)
    nodes = tuple(replace(node, name=f"c{i}") for i in range(2))
    found = plan(replace(SCRIPT, global_batch=32, sample_nbytes=600_000), ClusterView(nodes), {})
    candidates = found.candidates if isinstance(found, Decision) else ()
    assert all(each.prediction.host_memory_nbytes <= gibibytes * 2**30 for each in candidates)
    assert candidates or "with their data-loading processes, but 4 GiB are free on cpu" in str(found)
