"""The structure regression, refitted to random networks: what it finds, when plans use it, and its bounds."""

from dataclasses import replace
from datetime import UTC, datetime
from math import exp
from typing import Any

import numpy as np
import pytest

from dlcontract.hardware import REFERENCE_NETS, HardwareMeasure, MeasuredStructures, TimedStep
from dlcontract.structures import structures
from dljob.calibrate.hardware import compared, workload, workload_of
from dljob.calibrate.structures import refitted
from dljob.cluster import catalogue
from dljob.cluster.catalogue import NOMINAL, Device, TermFactors
from dljob.cluster.hardware import KEY, Hardware
from dljob.job.probes.hardware import hardware_body, hardware_of, hardware_profile
from dljob.job.profiles import learned_by_model
from dljob.perf.resources import memory
from dljob.perf.step.compute import PART_OF_TERM, catalogue_curve, update_s
from dljob.perf.workload import structure
from dljob.perf.workload.workload import builtin
from dljob.planner import Decision, Learned
from support.planner_questions import DIGITS, THREE, decided

CORE = catalogue.cpu("cpu", 1.0)
SLOW_POOLS: TermFactors = (("pool_B", 4.0), ("padding_FLOP", 0.8), ("convolution_B", 1.6), ("layer", 1.5))
"""Factors that the probe's five parts cannot express: pools belong to the same part as all other activations, and
padded channels to none."""
WASTE: TermFactors = (("process", 1.2), ("convolution", 0.8), ("kept_B", 1.3))


def measure(
    factors: TermFactors = (), growth: TermFactors = (), count: int = 48, noise: float = 0.0, **fields: Any
) -> HardwareMeasure:
    """Return the document of a probe on a machine whose times and memory are these factors times the prediction."""
    rng, chip = np.random.default_rng(0), replace(CORE, term_factors=factors)
    seconds, grown = [], []
    for net in structures(count):
        table, batch = workload_of(net), net.batches[0]
        seconds.append(catalogue_curve(table, chip).seconds(batch) * exp(noise * rng.standard_normal()))
        units = dict(structure.GROWTH) | {name: value * structure.GROWTH_UNIT[name] for name, value in growth}
        grown.append(int(structure.total(structure.growth_terms(table, batch), units) / 1024))
    steps = [
        TimedStep(net=name, batch=batch, s=catalogue_curve(workload(name), chip).seconds(batch))
        for name, net in REFERENCE_NETS.items()
        for batch in net.batches
    ]
    rows = MeasuredStructures(s=tuple(seconds), grown_KiB=tuple(grown))
    return HardwareMeasure(device="P", cores=1, node_cores=1, steps=tuple(steps), **{"structures": rows} | fields)


def known_of(found: HardwareMeasure) -> dict[tuple[str, str], Learned]:
    return learned_by_model([hardware_body(hardware_profile(found, "node"), "node", datetime.now(UTC))], "anywhere")


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_terms_that_the_reference_networks_cannot_separate_are_found(noise: float) -> None:
    found = measure(SLOW_POOLS, WASTE, noise=noise)
    refit = refitted(found, compared(found).factors)
    assert refit is not None
    assert refit.networks == 48
    assert refit.time_errors.improves
    assert refit.time_errors.refit < 0.02 + noise
    assert refit.time_errors.refit < 0.7 * refit.time_errors.probe
    assert refit.growth_errors.refit < 0.01 < refit.growth_errors.sheet
    assert dict(refit.growth)["kept_B"] == pytest.approx(1.3, rel=0.05)
    assert dict(refit.time)["pool_B"] == pytest.approx(4.0, rel=0.3)


def test_the_refit_predicts_built_in_models_and_plans_use_it() -> None:
    found = measure(SLOW_POOLS, WASTE)
    hardware = known_of(found)["hardware", "node"].hardware
    assert hardware is not None
    assert not hardware.doubts
    true = replace(CORE, term_factors=SLOW_POOLS)
    device: Device = hardware.device(CORE)
    coarse = replace(device, term_factors=())
    for name, batch in (("lenet", 32), ("digits-cnn", 32)):
        true_s, refit_s, coarse_s = (
            catalogue_curve(builtin(name, None), chip).seconds(batch) for chip in (true, device, coarse)
        )
        assert refit_s == pytest.approx(true_s, rel=0.05)
        assert abs(refit_s - true_s) < abs(coarse_s - true_s)
    assert update_s(builtin("mlp", None), device) > 0


def test_a_plan_with_the_refit_has_another_time_and_other_memory() -> None:
    known = [hardware_of(hardware_profile(measure(*each), "cpu"), "cpu") for each in ((), (SLOW_POOLS, WASTE))]
    found = [decided(DIGITS, THREE, {(KEY, "cpu"): Learned(hardware=hardware)}) for hardware in known]
    plain, refit = (each.chosen.prediction for each in found if isinstance(each, Decision))
    assert refit.compute_s > plain.compute_s
    assert refit.memory_nbytes > plain.memory_nbytes
    assert refit.host_memory_nbytes > plain.host_memory_nbytes


def test_memory_factors_change_the_memory_and_the_largest_batch_of_cpu_ranks_only() -> None:
    table = builtin("lenet", None)
    assert memory.rank_nbytes(table, 32, False, WASTE) > memory.rank_nbytes(table, 32, False)
    assert memory.largest_batch(table, 2**30, False, WASTE) < memory.largest_batch(table, 2**30, False)
    assert memory.rank_nbytes(table, 32, True, WASTE) == memory.rank_nbytes(table, 32, True)
    scratch, dense = (("convolution", 1.0),), builtin("mlp", None)
    assert memory.rank_nbytes(table, 32, False, scratch) > memory.rank_nbytes(table, 32, False)
    assert memory.rank_nbytes(dense, 32, False, scratch) == memory.rank_nbytes(dense, 32, False)


def test_factors_that_do_not_improve_the_prediction_of_unseen_networks_are_not_stored() -> None:
    """The constants are exact here, but for noise."""
    profile = hardware_profile(measure(noise=0.05), "node")
    assert profile.regression is not None
    assert profile.regression.time_error_before is not None
    assert profile.regression.time_error_before < 0.06
    assert not profile.regression.time_factors


@pytest.mark.parametrize(
    "fields", [{"kind": "gpu"}, {"structures": None}, {"structures": MeasuredStructures(s=(0.1,), grown_KiB=(1,))},
               {"structures": MeasuredStructures(sequence=99, s=(0.1,) * 48, grown_KiB=(1,) * 48)},
               {"structures": MeasuredStructures(s=(0.0,) * 48, grown_KiB=(0,) * 48)}]
)  # fmt: skip
def test_documents_without_enough_networks_have_no_refit(fields: dict[str, Any]) -> None:
    assert refitted(measure().model_copy(update=fields), NOMINAL) is None


def test_memory_factors_are_increased_until_the_margin_covers_nearly_all_networks() -> None:
    """Regression: pods of networks that need more than most would be killed."""
    found = measure(growth=WASTE)
    assert found.structures is not None
    rows = found.structures.grown_KiB
    greedy = found.structures.model_copy(update={"grown_KiB": tuple(2 * KiB for KiB in rows[:6]) + rows[6:]})
    refit = refitted(found.model_copy(update={"structures": greedy}), NOMINAL)
    assert refit is not None
    covered = 0
    for net, KiB in zip(structures(48), greedy.grown_KiB, strict=True):
        units = {name: dict(refit.growth)[name] * value for name, value in structure.GROWTH_UNIT.items()}
        predicted = structure.total(structure.growth_terms(workload_of(net), net.batches[0]), units)
        covered += 1024 * KiB <= 1.02 * memory.GROWTH_MARGIN * predicted
    assert covered >= 47


def test_missing_networks_are_left_out() -> None:
    found = measure(SLOW_POOLS)
    assert found.structures is not None
    rows = found.structures.model_copy(update={"s": (0.0,) * 4 + found.structures.s[4:]})
    refit = refitted(found.model_copy(update={"structures": rows}), NOMINAL)
    assert refit is not None
    assert refit.networks == 44
    assert refit.time_errors.refit < 0.05


@pytest.mark.parametrize(("value", "used"), [(15.0, 10.0), (100.0, None), (1e-3, None)])
def test_unbelievable_factors_of_terms_are_bounded_or_not_used(value: float, used: float | None) -> None:
    profile = hardware_profile(measure(SLOW_POOLS), "node")
    assert profile.regression is not None
    changed = profile.regression.model_copy(update={"time_factors": {"pool_B": value, "layer": 1.0}})
    hardware = hardware_of(profile.model_copy(update={"regression": changed}), "node")
    assert dict(hardware.term_factors).get("pool_B") == used
    assert any("pool_B" in doubt for doubt in hardware.doubts)


def test_padded_channels_take_no_time_without_a_refit_and_may_take_none_with_it() -> None:
    lenet = builtin("lenet", None)  # 6 and 16 channels
    terms = structure.time_terms(lenet, 8)
    assert terms["padding_FLOP"] > 0
    assert structure.time_terms(builtin("resnet18", None), 8)["padding_FLOP"] == 0
    free = replace(CORE, term_factors=(("padding_FLOP", 1e-3),))
    assert catalogue_curve(lenet, free).seconds(8) == pytest.approx(catalogue_curve(lenet, CORE).seconds(8), rel=1e-2)
    costly = replace(CORE, term_factors=(("padding_FLOP", 1.0),))
    added_s = catalogue_curve(lenet, costly).seconds(8) - catalogue_curve(lenet, CORE).seconds(8)
    assert added_s == pytest.approx(structure.TIME_S["convolution_FLOP"] * terms["padding_FLOP"])
    assert not Hardware(term_factors=(("padding_FLOP", 1e-3),)).believed().doubts


def test_every_term_belongs_to_a_part_that_the_reference_networks_measure() -> None:
    assert set(PART_OF_TERM) == set(structure.HOST_S) | set(structure.TIME_S)
    assert set(PART_OF_TERM.values()) <= set(vars(NOMINAL))
