"""Tests of predictions from observed structures: they are those from the layer tables that the planner knows."""

from statistics import median
from typing import Any

import pytest

from dlcontract import Structure
from dlcontract.structures import structures
from dljob.calibrate.hardware import workload_of
from dljob.perf.workload import structure as terms
from dljob.perf.workload.observed import Structure as PlannerStructure
from dljob.perf.workload.observed import Work, observed
from dljob.perf.workload.workload import Workload
from dltrain.observation.observed_step import ObservedStep

torch = pytest.importorskip("torch")


def predicted_s(workload: Workload, batch: int) -> float:
    """Return the predicted step time on one core, as the planner's regression has it."""
    return terms.total(terms.time_terms(workload, batch), terms.TIME_S) + terms.total(
        terms.host_terms(workload), terms.HOST_S
    )


def shown_by(model: Any, inputs: Any, slots: int) -> Workload:
    """Return the workload that the planner makes of an observed step of ``model``."""
    step = ObservedStep()
    model.train()(inputs).sum().backward()
    step.end()
    assert step.problem() is None
    found = Structure.model_validate(step.structure())
    n = found.samples
    work = tuple(Work(w.kind, w.count, w.forward_flops / n, w.moved_nbytes / n) for w in found.work)
    return observed(
        PlannerStructure(
            found.parameters, found.flops / n, found.activation_nbytes / n, found.sample_nbytes, n, slots, work
        )
    )


def test_generated_networks_are_predicted_as_from_their_tables() -> None:
    from dltrain.hardware_probe.networks import module

    ratios, kept = [], []
    cnns = [net for net in structures(18) if net.layers[0][0] == "conv"]
    for net in cnns:
        table = workload_of(net)
        seen = shown_by(module(net), torch.randn(4, *net.shape), int(table.optimizer_slots))
        assert seen.parameters == table.parameters
        # The table knows that the first layer needs no gradient of its input.
        assert 0.9 < seen.flops_per_sample / table.flops_per_sample < 1.5
        ratios.append(predicted_s(seen, net.batches[0]) / predicted_s(table, net.batches[0]))
        kept.append(seen.activation_nbytes / table.activation_nbytes)
    assert 0.8 < median(ratios) < 1.25 and all(0.6 < ratio < 1.6 for ratio in ratios), ratios
    assert 0.7 < median(kept) < 1.5, kept
