"""Tests of plans for scripts whose collectives an earlier run has shown."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.calibrate.learned import Learned
from dljob.perf.step.backends import backend
from dljob.perf.workload.observed import Collectives, Structure, Work
from dljob.planner import Request
from dljob.planner.candidates.collectives import started_by_script
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.options import options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.observed import described
from dljob.planner.search.screen import Screen
from dljob.planner.types import Choice, Prediction
from support.planner_questions import T4, decided, view

SCRIPT = Request(job="j", global_batch=0, total_steps=0, collective="Torch", reduced_by_script=True, profile="program-1",
                 nodes_min=2, nodes_max=2, uneven=False, missing=("model", "dataset", "globalBatchSize", "epochs"))  # fmt: skip
GRADIENTS = Collectives("all_reduce", 1, 800_000)
SEEN = Structure(
    parameters=200_000, flops=6e7, activation_nbytes=4e5, sample_nbytes=3072, batch=32, optimizer_slots=2,
    work=(Work("product", 2, 2e7, 6e5),), device="cpu", nodes=2, ranks_per_node=1, cores=1, collectives=(GRADIENTS,),
)  # fmt: skip
CPUS = view({"device": "cpu", "count": 8, "cpu": 4, "memory": "8Gi", "bandwidth": "125M"})


def known(**more: Any) -> dict[tuple[str, str], Learned]:
    structure = replace(SEEN, **more)
    return {("program-1", structure.device): Learned(structure=structure)}


def predicted(ranks: int = 2, asked: Request = SCRIPT, **more: Any) -> Prediction:
    asked = replace(asked, nodes_min=ranks, nodes_max=ranks)
    return decided(asked, CPUS, known(**more)).chosen.prediction


def test_each_collective_of_a_step_takes_its_time() -> None:
    losses = tuple(Collectives("all_reduce", count, 4 * count) for count in (1, 10))
    found = [predicted(collectives=(GRADIENTS, *each)).communication_s for each in ((), losses[:1], losses[1:])]
    assert found[2] - found[0] == pytest.approx(10 * (found[1] - found[0]), rel=0.01) and found[1] > found[0] + 1e-4
    sharded = (Collectives("all_gather", 4, 1_600_000), Collectives("reduce_scatter", 2, 800_000))
    assert predicted(collectives=sharded).communication_s > 1.5 * found[0], "FSDP gathers the parameters twice"
    assert predicted(1).communication_s == predicted(1, collectives=sharded).communication_s == 0


def test_profiles_without_counted_collectives_plan_as_before() -> None:
    """The gradients are reduced once. So they are in a script that uses another library than torch.distributed."""
    before = predicted(collectives=None)
    assert predicted(collectives=()) == before != predicted()
    assert predicted(ranks=4, collectives=()) == predicted(ranks=4, collectives=None)


def test_script_that_ran_on_one_rank_is_assumed_to_reduce_its_gradients() -> None:
    one = predicted(collectives=(), nodes=1)
    assert one.communication_s == pytest.approx(predicted(nodes=1).communication_s)
    mpi = replace(SCRIPT, collective="MPI")
    assert predicted(asked=mpi, collectives=(), nodes=1) == predicted(asked=mpi, collectives=None, nodes=1)


def test_gpus_and_comparisons_of_frameworks_ignore_what_was_counted_on_cpus() -> None:
    request = described(SCRIPT, known())
    workload = workload_of(request)
    assert started_by_script(request, workload, is_gpu=False) == (GRADIENTS,)
    assert started_by_script(request, workload, is_gpu=True) is None
    assert started_by_script(described(SCRIPT, known(cores=None)), workload, is_gpu=False) is None, "seen on GPUs"
    assert started_by_script(replace(request, backend=backend("MPI")), workload, is_gpu=False) is None
    gpus = view({"device": T4, "count": 2, "cpu": 8, "memory": "32Gi"})
    both = [decided(SCRIPT, gpus, known(collectives=each)).chosen.prediction for each in (None, (GRADIENTS,))]
    assert both[0] == both[1]


def test_measured_step_is_predicted_at_its_place() -> None:
    first = predicted()
    again = predicted(step_s=2 * first.step_s)
    assert again.step_s == pytest.approx(2 * first.step_s, rel=0.05)
    assert again.communication_s == pytest.approx(first.communication_s), "the counted collectives stay"


@pytest.mark.parametrize(
    "collectives",
    [
        (Collectives("all_reduce", 10**6, 10**18),) * 16,
        (Collectives("nonsense", 10**6, 0), Collectives("", 1, 10**18)),
        (Collectives("barrier", 1, 10**18),),
    ],
)
def test_absurd_counts_never_prevent_a_plan(collectives: tuple[Collectives, ...]) -> None:
    assert predicted(collectives=collectives).step_s >= 0


@pytest.mark.parametrize(
    "collectives", [(GRADIENTS,), (Collectives("all_gather", 9, 10**7), Collectives("barrier", 2))]
)
@pytest.mark.parametrize("layout", [Layout(1, 1.0), Layout(2, 1.0), Layout(1, 2.0)])
def test_screening_counts_the_same_collectives(collectives: tuple[Collectives, ...], layout: Layout) -> None:
    """The search would otherwise leave out the best numbers of nodes."""
    asked = replace(
        SCRIPT, global_batch=128, total_steps=1000, nodes_min=1, nodes_max=None, missing=("model", "dataset")
    )
    learned = known(collectives=collectives)
    request = described(asked, learned)
    workload = workload_of(request)
    (pool,) = eligible(request, CPUS).pools
    (option,) = options(pool, layout, workload, request, learned)
    screen = Screen([option], request, workload)
    for nodes in (1, 2, 8):
        found = screen.screen(screen.types.rows([{0: nodes}]))
        exact = evaluate([Part(option, nodes)], "Torch", request, workload)
        assert isinstance(exact, Choice)
        assert found.step_s[0] == pytest.approx(exact.prediction.step_s, rel=0.03)
