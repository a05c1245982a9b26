"""Tests of model parallelism: pipeline stages and schedules, and training on real ranks against one process."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import ModelRef
from dljob.perf.step import model_split
from dljob.perf.workload.workload import builtin
from dltrain.models import InputShape, build
from dltrain.models.layers import pairs_of
from dltrain.parallel.model_split.pipeline_stages import Cost, costs, cut, sizes, turns
from dltrain.protocol import rank_messages
from support.trainer.plans import make_plan, saving
from support.trainer.ranks import BODIES, run_ranks
from support.trainer.resume import stop_and_resume


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_parts_of_a_model_equal_one_process(ranks: int, tmp_path: Path) -> None:
    """Checkpoints agree too, and either side can resume from the other's."""
    ended = run_ranks(ranks, BODIES / "parallel/model_parallel.py", str(ranks), tmp_path, timeout_s=150)
    assert ended.output.count(": gradient off by") == {2: 10, 4: 2}[ranks], ended.output


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "replicas", "checks"),
    [(4, 2, 4), pytest.param(6, 3, 4, marks=pytest.mark.long), pytest.param(6, 2, 3, marks=pytest.mark.long)],
)
def test_replicas_of_a_split_model_equal_one_process(ranks: int, replicas: int, checks: int, tmp_path: Path) -> None:
    """Also with unequal parts of the batch, and with a batch of fewer samples than replicas."""
    body = BODIES / "parallel/model_parallel.py"
    ended = run_ranks(ranks, body, str(ranks), tmp_path, str(replicas), timeout_s=180)
    assert ended.output.count(f", {replicas} replicas: gradient off by") == checks, ended.output
    assert "differing replicas are found" in ended.output, ended.output


@pytest.mark.mpi
@pytest.mark.long
def test_replicas_of_a_split_model_resume_from_checkpoints(tmp_path: Path) -> None:
    """Bit-identical to a run without a stop, and equal up to rounding from and to data parallelism."""
    ended = run_ranks(4, BODIES / "parallel/model_parallel.py", "4", tmp_path, "2", "resumes", timeout_s=300)
    assert ended.output.count(" resumes from checkpoints") == 2, ended.output


@pytest.mark.mpi
@pytest.mark.parametrize(("kind", "model"), [("Pipeline", "digits-cnn"), ("Tensor", "mlp")])
def test_model_parallel_run_learns_digits_and_resumes_after_a_stop(kind: Any, model: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"parallelism": kind, "micro_batches": 4 if kind == "Pipeline" else 1, "min_ranks": 2}
    plan = make_plan(2, shares=[120, 120], model=ModelRef(name=model), epochs=12, checkpoint=saving(tmp_path), **fields)
    listener = stop_and_resume(plan, tmp_path, evaluations=2, steps=12 * 12)
    outcomes = [message.outcome for message in listener.of(rank_messages.Finished)]
    assert {outcome.steps for outcome in outcomes} == {12 * 12}
    assert len({outcome.accuracy for outcome in outcomes}) == 1, "every rank has the same accuracy"
    assert all(outcome.accuracy is not None and outcome.accuracy > 0.9 for outcome in outcomes)
    (analyzed,) = listener.of(rank_messages.Analyzed)
    assert analyzed.analysis.samples == 360, "each sample counts once, even if several ranks have its logits"
    assert analyzed.analysis.metric == ("accuracy", outcomes[0].accuracy)
    losses = {message.step: message.loss for message in listener.of(rank_messages.Step) if message.rank == 0}
    assert min(losses) < max(losses) and losses[min(losses)] > 2 * losses[max(losses)] > 0  # type: ignore[operator]


@given(st.integers(1, 6), st.integers(1, 12))
def test_pipeline_schedule_ends_and_bounds_stored_micro_batches(stages: int, micro_batches: int) -> None:
    """The simulation delivers messages at once. There is no deadlock, k micro-batches on p stages take
    2 (k + p - 1) turns, and stage s stores at most p - s micro-batches."""
    todo = [turns(stage, stages, micro_batches) for stage in range(stages)]
    assert all(len(set(row)) == 2 * micro_batches for row in todo)
    done: dict[tuple[int, str, int], int] = {}
    clock, position, stored = 0, [0] * stages, [0] * stages
    while any(position[stage] < len(todo[stage]) for stage in range(stages)):
        began = dict(done)
        for stage in range(stages):
            if position[stage] == len(todo[stage]):
                continue
            kind, number = todo[stage][position[stage]]
            source = stage - 1 if kind == "forward" else stage + 1
            if not 0 <= source < stages or (source, kind, number) in began:
                done[stage, kind, number] = clock
                position[stage] += 1
                stored[stage] += 1 if kind == "forward" else -1
                assert stored[stage] <= stages - stage
        assert len(done) > len(began), "deadlock: no stage advanced"
        clock += 1
    assert clock == 2 * (micro_batches + stages - 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=9), st.integers(1, 4))
def test_trainer_and_planner_cut_stages_equally(rows: list[tuple[int, int]], stages: int) -> None:
    """They may choose different cuts of equal cost."""
    layer_costs = [Cost(float(operations), parameters, ()) for operations, parameters in rows]
    trainable = [parameters > 0 for _, parameters in rows]
    if sum(trainable) < stages:
        with pytest.raises(
            ValueError, match=r"found \d layers with parameters; expected at least \d, one per pipeline stage"
        ):
            cut(layer_costs, stages)
        return

    def longest(begins: list[int]) -> float:
        return max(sum(c.operations for c in layer_costs[a:b]) for a, b in pairwise([*begins, len(rows)]))

    ours = cut(layer_costs, stages)
    assert longest(ours) == longest(model_split.cuts([c.operations for c in layer_costs], trainable, stages)[-1])
    assert all(any(trainable[a:b]) for a, b in pairwise([*ours, len(rows)]))


IMAGES, TOKENS = InputShape((3, 32, 32), 10), InputShape((128,), 256, tokens=True)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("mlp", InputShape((64,), 10)), ("digits-cnn", InputShape((1, 8, 8), 10)), ("lenet", IMAGES),
        ("resnet18", IMAGES), ("resnet50", IMAGES), ("gpt-mini", TOKENS),
    ],
)  # fmt: skip
def test_the_planner_predicts_the_trainers_parts(name: str, data: InputShape) -> None:
    """Compare the number of stages, the largest stage's fraction of the operations and the pairs of linear layers."""
    model, planned = build(name, data), model_split.cut_up(builtin(name, None))
    layer_costs = costs(model, torch.zeros(1, *data.shape, dtype=torch.long if data.tokens else torch.float))
    total = sum(cost.operations for cost in layer_costs)
    assert len(planned.stages) == sum(cost.parameters > 0 for cost in layer_costs), "the maximum number of stages"
    for predicted in planned.stages:
        stages = len(predicted.stages)
        begins = cut(layer_costs, stages)
        measured = (
            max(sum(c.operations for c in layer_costs[a:b]) for a, b in pairwise([*begins, len(layer_costs)])) / total
        )
        assert measured == pytest.approx(predicted.arithmetic, abs=0.05), f"{stages} stages of {name}"
        shapes = [torch.Size(layer_costs[begin - 1].output).numel() for begin in begins[1:]]
        assert max(shapes, default=0) <= 4 * predicted.boundary_elements
    pairs, found = pairs_of(model), planned.pairs
    assert bool(pairs) == (found is not None)
    if found is not None:
        assert min(pair.units for pair in pairs) == found.units


@given(st.integers(1, 50), st.integers(1, 60))
def test_micro_batch_sizes_add_up_to_the_batch(samples: int, micro_batches: int) -> None:
    found = sizes(samples, micro_batches)
    assert sum(found) == samples and min(found) >= 1 and max(found) - min(found) <= 1
    assert len(found) == min(samples, micro_batches)


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_a_script_under_model_parallelism_equals_one_process(ranks: int, replicas: int, tmp_path: Path) -> None:
    """Losses, weights and evaluation in float64, with clipping and tied weights, and after a resume."""
    body = BODIES / "scripts/split_model.py"
    ended = run_ranks(ranks, body, str(ranks), tmp_path, str(replicas), timeout_s=180)
    assert ended.output.count(": weights off by") == (4 if replicas == 1 else 2), ended.output
    assert ended.output.count(": resumes from and to strategy Data") == 2, ended.output
    assert ("misuse is rejected" in ended.output) == (replicas == 1), ended.output
