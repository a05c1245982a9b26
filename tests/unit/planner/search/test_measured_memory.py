"""Tests of plans for scripts whose earlier runs have shown how much memory their pods need."""

from dataclasses import replace

import pytest

from dljob.calibrate.learned import Learned
from dljob.calibrate.memory import MemoryPoint, Split
from dljob.cli.tables import decision
from dljob.planner import Infeasible, Request, plan
from support.planner_questions import A100, decided, view

GIB = 2**30
MISSING = ("model", "dataset", "globalBatchSize", "epochs")
SCRIPT = Request(job="j", global_batch=0, total_steps=0, collective="Torch", reduced_by_script=True, profile="program-1",
                 nodes_min=2, nodes_max=2, uneven=False, missing=MISSING)  # fmt: skip
DESCRIBED = Request(job="j", global_batch=64, total_steps=100, parameters=1000, flops_per_sample=1000.0, nodes_max=2,
                    activation_nbytes_per_sample=1000, profile="program-1")  # fmt: skip
CPUS = view({"device": "cpu", "count": 4, "cpu": 2, "memory": "6Gi"})


def known(
    device: str = "cpu", *, key: str = "program-1", ranks: int = 1, batch: int | None = None, **amounts: int
) -> dict[tuple[str, str], Learned]:
    return {(key, device): Learned(memory=(MemoryPoint(ranks, batch, "Data", **amounts),))}


def host(request: Request, learned: dict[tuple[str, str], Learned], cluster: object = CPUS) -> int:
    return decided(request, cluster, learned).chosen.prediction.host_memory_nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("request_", [SCRIPT, DESCRIBED])
def test_pods_request_what_earlier_runs_needed(request_: Request) -> None:
    need = MemoryPoint(1, peak_nbytes=4 * GIB).needed_nbytes
    before, found = decided(request_, CPUS), decided(request_, CPUS, known(peak_nbytes=4 * GIB))
    assert before.memory_text is None and before.chosen.prediction.host_memory_nbytes < need
    assert found.chosen.prediction.host_memory_nbytes == need and found.chosen in found.candidates
    assert found.chosen.groups == before.chosen.groups
    assert found.memory_text == "measured in an earlier run: a pod needed 4 GiB"
    [line] = [text for text in decision(found) if text.startswith("Memory:")]
    assert line.endswith("4.66 GiB per pod (measured in an earlier run: a pod needed 4 GiB)")
    assert "assumption" not in (found.warning or "")


@pytest.mark.parametrize("request_", [SCRIPT, DESCRIBED])
def test_no_pod_requests_less_than_without_a_measurement(request_: Request) -> None:
    small = decided(request_, CPUS, known(peak_nbytes=2**20))
    assert small.chosen == decided(request_, CPUS).chosen and small.memory_text is None


def test_memory_of_the_spec_is_not_changed() -> None:
    own = replace(SCRIPT, memory_per_pod_nbytes=GIB)
    assert decided(own, CPUS, known(peak_nbytes=4 * GIB)) == decided(own, CPUS)
    admitted = replace(SCRIPT, memory_admitted=True)
    assert decided(admitted, CPUS, known(peak_nbytes=4 * GIB)) == decided(admitted, CPUS)


def test_measurements_of_other_scripts_and_of_gpus_do_not_count() -> None:
    assert host(SCRIPT, known(peak_nbytes=4 * GIB, key="program-2")) == host(SCRIPT, {})
    assert host(SCRIPT, known(A100, peak_nbytes=4 * GIB)) == host(SCRIPT, {})
    assert host(SCRIPT, known("other-cpu", peak_nbytes=4 * GIB)) > host(SCRIPT, {}), "another type of CPU"


def test_nodes_with_less_memory_are_left_out() -> None:
    cluster = view(
        {"device": "cpu", "count": 3, "cpu": 2, "memory": "3Gi"},
        {"device": "large", "count": 2, "cpu": 2, "memory": "6Gi"},
    )
    assert [group.device for group in decided(SCRIPT, cluster).chosen.groups] == ["large"]
    found = decided(replace(SCRIPT, nodes_min=2), cluster, known(peak_nbytes=4 * GIB))
    assert [(group.device, group.nodes) for group in found.chosen.groups] == [("large", 2)]
    assert ("3 x cpu", "it has 3 GiB of memory, but an earlier run measured that a pod needs 4.66 GiB") in [
        (each.summary, each.reason) for each in found.refusals
    ]
    none = plan(replace(SCRIPT, nodes_min=3, nodes_max=3), cluster, known(peak_nbytes=4 * GIB))
    assert isinstance(none, Infeasible) and none.transient
    assert any("an earlier run measured" in each.reason for each in none.refusals)


TIGHT = MemoryPoint(1, None, "Data", peak_nbytes=4 * GIB, sufficient_nbytes=int(4.1 * GIB))
"""A script whose pods need 4.66 GiB with the margin, and of which a run with 4.1 GiB was complete."""


@pytest.mark.parametrize("request_", [SCRIPT, DESCRIBED])
def test_margin_stays_if_the_nodes_have_room_for_it(request_: Request) -> None:
    """Regression: pods requested what had just been enough, on nodes with any amount of free memory."""
    learned = {("program-1", "cpu"): Learned(memory=(TIGHT,))}
    assert host(request_, learned) == TIGHT.needed_nbytes > TIGHT.without_margin.needed_nbytes
    some = view(
        {"device": "cpu", "count": 1, "cpu": 2, "memory": "4.3Gi"},
        {"device": "cpu", "count": 3, "cpu": 2, "memory": "6Gi"},
    )
    assert host(request_, learned, some) == TIGHT.needed_nbytes, "other nodes of the same type have room"


@pytest.mark.parametrize("request_", [SCRIPT, DESCRIBED])
@pytest.mark.parametrize("slow", [0, 2])
def test_margin_does_not_leave_out_nodes_on_which_the_script_has_run(request_: Request, slow: int) -> None:
    """Neither if nothing else is left, nor if other nodes have room for the margin."""
    small: dict[str, object] = {"device": "cpu", "count": 2, "cpu": 4, "memory": "4.3Gi"}
    cluster = view(small, *[{"device": "slow", "count": slow, "cpu": 1, "memory": "4.7Gi"}] * bool(slow))
    learned = {("program-1", device): Learned(memory=(TIGHT,)) for device in ("cpu", "slow")}
    found, before = decided(request_, cluster, learned).chosen, decided(request_, cluster).chosen
    assert [group.device for group in before.groups] == ["cpu"] and found.groups == before.groups
    assert found.prediction.host_memory_nbytes == TIGHT.without_margin.needed_nbytes


def test_margin_stays_if_the_nodes_lack_room_also_without_it() -> None:
    """The plan moves to other nodes in any case. These get the margin."""
    cluster = view(
        {"device": "cpu", "count": 2, "cpu": 4, "memory": "4Gi"},
        {"device": "slow", "count": 2, "cpu": 1, "memory": "6Gi"},
    )
    learned = {("program-1", device): Learned(memory=(TIGHT,)) for device in ("cpu", "slow")}
    found = decided(DESCRIBED, cluster, learned).chosen
    assert {group.device for group in decided(DESCRIBED, cluster).chosen.groups} == {"cpu"}
    assert {group.device for group in found.groups} == {"slow"}
    assert found.prediction.host_memory_nbytes == TIGHT.needed_nbytes


def test_too_little_memory_is_raised_by_as_much_as_the_nodes_have() -> None:
    tight = known(peak_nbytes=GIB, insufficient_nbytes=2 * GIB)
    assert host(SCRIPT, tight) == 4 * GIB
    assert decided(SCRIPT, CPUS, tight).memory_text == "measured in an earlier run: 2 GiB was too little"
    for free, given in (("3.5Gi", 3 * GIB), ("2.6Gi", 5 * GIB // 2)):
        assert host(SCRIPT, tight, view({"device": "cpu", "count": 4, "cpu": 2, "memory": free})) == given
    less = plan(SCRIPT, view({"device": "cpu", "count": 4, "cpu": 2, "memory": "2.2Gi"}), tight)
    assert isinstance(less, Infeasible)


def test_larger_batch_gets_more_if_a_node_has_it() -> None:
    measured = known(batch=16, peak_nbytes=2 * GIB)
    need = MemoryPoint(1, peak_nbytes=2 * GIB).needed_nbytes
    wide = replace(DESCRIBED, nodes_max=1)
    assert host(replace(wide, global_batch=16), measured) == need
    assert host(replace(wide, global_batch=32), measured) > 1.5 * need
    assert host(replace(wide, global_batch=10_000), measured) == need, "no node has as much"


def test_ranks_of_a_node_with_gpus_each_need_their_part() -> None:
    cluster = view({"device": A100, "count": 1, "cpu": 64, "memory": "512Gi", "devices": 4})
    asked = replace(SCRIPT, nodes_min=1, nodes_max=1)
    [group] = decided(asked, cluster).chosen.groups
    assert group.ranks_per_node == 4
    need = MemoryPoint(2, peak_nbytes=60 * GIB).needed_nbytes
    assert host(asked, known(A100, ranks=2, peak_nbytes=60 * GIB), cluster) == 2 * need
    half = MemoryPoint(2, peak_nbytes=300 * GIB).needed_nbytes
    assert host(asked, known(A100, ranks=2, peak_nbytes=300 * GIB), cluster) == half, "the ranks may share their data"
    short = plan(asked, cluster, known(A100, ranks=2, peak_nbytes=500 * GIB))
    assert isinstance(short, Infeasible) and "an earlier run measured" in short.refusals[0].reason


@pytest.mark.parametrize("peak_nbytes", [GIB, 30 * GIB])
def test_pods_of_another_plan_request_what_that_plan_needed(peak_nbytes: int) -> None:
    """Fixed bug: the node with eight GPUs has too little memory. A pod on the other one requested as much as there."""
    small: dict[str, object] = {"device": A100, "cpu": 8, "memory": "128Gi"}
    cluster = view({"device": A100, "cpu": 64, "memory": "40Gi", "devices": 8}, small)
    asked, alone = replace(SCRIPT, nodes_min=1, nodes_max=1), MemoryPoint(1, None, "Data", peak_nbytes=peak_nbytes)
    assert [group.ranks_per_node for group in decided(asked, cluster).chosen.groups] == [8]
    learned = {("program-1", A100): Learned(memory=(MemoryPoint(8, None, "Data", peak_nbytes=48 * GIB), alone))}
    found = decided(asked, cluster, learned).chosen
    assert [group.ranks_per_node for group in found.groups] == [1]
    assert found.prediction.host_memory_nbytes == max(alone.needed_nbytes, host(asked, {}, view(small)))


@pytest.mark.parametrize(
    "other",
    [
        MemoryPoint(1, 4096, "Data", peak_nbytes=60 * GIB),
        MemoryPoint(1, 4096, "Data", insufficient_nbytes=50 * GIB),
        MemoryPoint(1, 1, "Sharded", peak_nbytes=3 * GIB),
    ],
)
def test_text_names_a_run_like_the_plan(other: MemoryPoint) -> None:
    """Regression: it named the largest amount of all runs of the script, whatever their batch and strategy."""
    own = MemoryPoint(1, 32, "Data", peak_nbytes=2 * GIB)
    asked = replace(DESCRIBED, global_batch=32, nodes_max=1)
    found = decided(asked, CPUS, {("program-1", "cpu"): Learned(memory=(own, other))})
    assert found.chosen.prediction.host_memory_nbytes == own.needed_nbytes
    assert found.memory_text == "measured in an earlier run: a pod needed 2 GiB"


def test_a_smaller_batch_does_not_wait_for_the_memory_of_a_larger_one() -> None:
    """Regression: it waited for ever."""
    large = known(batch=4096, peak_nbytes=40 * GIB)
    asked = replace(DESCRIBED, global_batch=256, nodes_max=1)
    found = decided(asked, CPUS, large)
    assert GIB < found.chosen.prediction.host_memory_nbytes <= 6 * GIB
    assert found.memory_text == "estimated from an earlier run: a larger pod needed 40 GiB"
    roomy = view({"device": "cpu", "count": 4, "cpu": 2, "memory": "64Gi"})
    assert host(asked, large, roomy) == MemoryPoint(1, peak_nbytes=40 * GIB).needed_nbytes, "it may need as much"


SPLIT = replace(DESCRIBED, parameters=10**8, flops_per_sample=6e8, strategy="Tensor", nodes_min=2, nodes_max=2)
TWO = Split(2)


def of_split(**amounts: int) -> dict[tuple[str, str], Learned]:
    return {("program-1", "cpu"): Learned(memory=(MemoryPoint(1, 64, "Tensor", split=TWO, **amounts),))}


def test_plan_with_the_split_of_an_earlier_run_has_its_measured_memory() -> None:
    """The plan of a script assumes which layers ranks split. A complete run shows what each of its ranks needs."""
    before = decided(SPLIT, CPUS).chosen.prediction
    measured = of_split(peak_nbytes=GIB, sufficient_nbytes=before.host_memory_nbytes)
    need = MemoryPoint(1, peak_nbytes=GIB).needed_nbytes
    found = decided(SPLIT, CPUS, measured)
    assert found.chosen.prediction.host_memory_nbytes == need < before.host_memory_nbytes
    assert GIB <= found.chosen.prediction.memory_nbytes < before.memory_nbytes
    assert found.memory_text == "measured in an earlier run: a pod needed 1 GiB"
    short = view({"device": "cpu", "count": 2, "cpu": 2, "memory": "1.3Gi"})
    assert (
        isinstance(plan(SPLIT, short, {}), Infeasible) and decided(SPLIT, short, measured).chosen.groups[0].nodes == 2
    )
    larger = of_split(peak_nbytes=3 * GIB, sufficient_nbytes=6 * GIB)
    assert host(SPLIT, larger) == MemoryPoint(1, peak_nbytes=3 * GIB).needed_nbytes > before.host_memory_nbytes


@pytest.mark.parametrize(
    ("change", "point"),
    [
        ({}, MemoryPoint(1, 64, "Tensor", GIB, split=TWO)),
        ({}, MemoryPoint(1, 32, "Tensor", GIB, 2 * GIB, split=TWO)),
        ({}, MemoryPoint(1, 64, "Pipeline", GIB, 2 * GIB, split=TWO)),
        ({"checkpoints": False}, MemoryPoint(1, 64, "Tensor", GIB, 2 * GIB, split=TWO)),
        ({"nodes_min": 4, "nodes_max": 4}, MemoryPoint(1, 64, "Tensor", GIB, 2 * GIB, split=TWO)),
        ({"nodes_min": 4, "nodes_max": 4, "replicas": 2}, MemoryPoint(1, 64, "Tensor", GIB, 2 * GIB, split=TWO)),
    ],
    ids=["not complete", "another batch", "another strategy", "without checkpoints", "more parts", "replicas"],
)
def test_plan_with_another_split_needs_no_less_than_predicted(change: dict[str, object], point: MemoryPoint) -> None:
    asked = replace(SPLIT, **change)  # type: ignore[arg-type]
    before = decided(asked, CPUS).chosen
    found = decided(asked, CPUS, {("program-1", "cpu"): Learned(memory=(point,))}).chosen
    assert found.prediction.memory_nbytes == before.prediction.memory_nbytes
    assert found.prediction.host_memory_nbytes >= before.prediction.host_memory_nbytes


def test_admitted_memory_of_a_split_script_does_not_change() -> None:
    measured = of_split(peak_nbytes=GIB, sufficient_nbytes=2 * GIB)
    admitted = replace(SPLIT, memory_admitted=True)
    assert decided(admitted, CPUS, measured).chosen == decided(admitted, CPUS).chosen
