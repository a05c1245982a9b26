"""Parts of a model on several ranks: cuts and turns by their laws, training on real ranks against one process."""

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
from dltrain.parallel.pipeline_stages import Cost, costs, cut, sizes, turns
from dltrain.protocol import rank_messages
from support.trainer.plans import make_plan, saving
from support.trainer.ranks import BODIES, run_ranks
from support.trainer.resume import stopped_and_resumed


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_a_model_equal_one_process(ranks: int, tmp_path: Path) -> None:
    """And so do their checkpoints, from which either goes on."""
    ended = run_ranks(ranks, BODIES / "model_parallel.py", str(ranks), tmp_path, timeout_s=150)
    assert ended.output.count(": gradient off by") == {2: 10, 4: 2}[ranks], ended.output


@pytest.mark.mpi
@pytest.mark.parametrize(("kind", "model"), [("Pipeline", "digits-cnn"), ("Tensor", "mlp")])
def test_a_split_model_learns_digits_and_resumes_after_a_stop(kind: Any, model: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"parallelism": kind, "micro_batches": 4 if kind == "Pipeline" else 1, "min_ranks": 2}
    plan = make_plan(2, shares=[120, 120], model=ModelRef(name=model), epochs=12, checkpoint=saving(tmp_path), **fields)
    listener = stopped_and_resumed(plan, tmp_path, evaluations=2, steps=12 * 12)
    outcomes = [news.outcome for news in listener.of(rank_messages.Finished)]
    assert {outcome.steps for outcome in outcomes} == {12 * 12}
    assert len({outcome.accuracy for outcome in outcomes}) == 1, "every rank is told"
    assert all(outcome.accuracy is not None and outcome.accuracy > 0.9 for outcome in outcomes)
    losses = {news.step: news.loss for news in listener.of(rank_messages.Step) if news.rank == 0}
    assert min(losses) < max(losses) and losses[min(losses)] > 2 * losses[max(losses)] > 0  # type: ignore[operator]


@given(st.integers(1, 6), st.integers(1, 12))
def test_turns_end_and_few_micro_batches_wait(stages: int, micro_batches: int) -> None:
    """Played with messages that arrive at once: nobody waits for ever, all is done in k + p - 1 double turns, and stage
    s never holds more than p - s micro-batches."""
    todo = [turns(stage, stages, micro_batches) for stage in range(stages)]
    assert all(len(set(row)) == 2 * micro_batches for row in todo)
    done: dict[tuple[int, str, int], int] = {}
    clock, position, held = 0, [0] * stages, [0] * stages
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
                held[stage] += 1 if kind == "forward" else -1
                assert held[stage] <= stages - stage
        assert len(done) > len(began), "somebody moves"
        clock += 1
    assert clock == 2 * (micro_batches + stages - 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=9), st.integers(1, 4))
def test_trainer_and_planner_cut_alike(rows: list[tuple[int, int]], stages: int) -> None:
    """Up to which of several best cuts is taken."""
    known = [Cost(float(operations), parameters, ()) for operations, parameters in rows]
    able = [parameters > 0 for _, parameters in rows]
    if sum(able) < stages:
        with pytest.raises(ValueError, match=r"found \d layers with parameters; expected at least one per stage"):
            cut(known, stages)
        return

    def longest(begins: list[int]) -> float:
        return max(sum(c.operations for c in known[a:b]) for a, b in pairwise([*begins, len(rows)]))

    ours = cut(known, stages)
    assert longest(ours) == longest(model_split.cuts([c.operations for c in known], able, stages)[-1])
    assert all(any(able[a:b]) for a, b in pairwise([*ours, len(rows)]))


IMAGES, TOKENS = InputShape((3, 32, 32), 10), InputShape((128,), 256, tokens=True)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("mlp", InputShape((64,), 10)), ("digits-cnn", InputShape((1, 8, 8), 10)), ("lenet", IMAGES),
        ("resnet18", IMAGES), ("resnet50", IMAGES), ("gpt-mini", TOKENS),
    ],
)  # fmt: skip
def test_the_planner_predicts_the_trainers_parts(name: str, data: InputShape) -> None:
    """As many stages, the busiest one's part of the operations, and pairs of linear layers."""
    model, planned = build(name, data), model_split.cut_up(builtin(name, None))
    known = costs(model, torch.zeros(1, *data.shape, dtype=torch.long if data.tokens else torch.float))
    total = sum(cost.operations for cost in known)
    assert len(planned.stages) == sum(cost.parameters > 0 for cost in known), "as many stages at most"
    for predicted in planned.stages:
        stages = len(predicted.outputs)
        begins = cut(known, stages)
        ours = max(sum(c.operations for c in known[a:b]) for a, b in pairwise([*begins, len(known)])) / total
        assert ours == pytest.approx(predicted.arithmetic, abs=0.05), f"{stages} stages of {name}"
        shapes = [torch.Size(known[begin - 1].output).numel() for begin in begins[1:]]
        assert max(shapes, default=0) <= 4 * predicted.boundary_elements
    pairs, found = pairs_of(model), planned.pairs
    assert bool(pairs) == (found is not None)
    if found is not None:
        assert min(pair.units for pair in pairs) == found.units


@given(st.integers(1, 50), st.integers(1, 60))
def test_micro_batches_make_up_the_batch(samples: int, micro_batches: int) -> None:
    found = sizes(samples, micro_batches)
    assert sum(found) == samples and min(found) >= 1 and max(found) - min(found) <= 1
    assert len(found) == min(samples, micro_batches)
