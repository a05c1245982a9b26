"""The structure regression, refitted to random networks: what it finds, when plans use it, and its bounds."""

from dataclasses import replace
from datetime import UTC, datetime
from math import exp
from typing import Any

import numpy as np
import pytest

from dlcontract.hardware import REFERENCE_NETS, HardwareMeasure, MeasuredStructures, StructuresOnRanks, TimedStep
from dlcontract.structures import on_ranks, structures
from dljob.calibrate.hardware import compared, workload, workload_of
from dljob.calibrate.structures import includes_ranks, refitted
from dljob.cli.hardware_tables import hardware_table
from dljob.cluster import catalogue
from dljob.cluster.catalogue import NOMINAL, Device, TermFactors
from dljob.cluster.hardware import KEY, Hardware
from dljob.job.probes.hardware import hardware_body, hardware_of, hardware_profile
from dljob.job.profiles import learned_by_model
from dljob.perf.resources import memory
from dljob.perf.step.communication import SHARED_MEMORY_LATENCY_S, Link
from dljob.perf.step.compute import PART_OF_TERM, catalogue_curve, update_s
from dljob.perf.step.core_scaling import CoreUse
from dljob.perf.step.step import OVERLAP_EFFICIENCY, step
from dljob.perf.workload import structure
from dljob.perf.workload.workload import builtin
from dljob.planner import Decision, Learned
from support.planner_questions import DIGITS, THREE, decided

CORE = catalogue.cpu("cpu", 1.0)
SLOW_POOLS: TermFactors = (("pooling_B", 8.0), ("padding_FLOP", 0.8), ("convolution_B", 1.6), ("layer", 1.5))
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
    assert dict(refit.time)["pooling_B"] == pytest.approx(8.0, rel=0.3)


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


MEASURED: TermFactors = (
    ("convolution_FLOP", 1.1), ("padding_FLOP", 0.93), ("function_FLOP", 0.44), ("product_FLOP", 1.22), ("convolution_B", 1.4),
    ("pooling_B", 1.0), ("simple_B", 1.0), ("other_B", 1.2), ("weight_B", 1.4), ("convolution_weight_B", 0.75),
)  # fmt: skip
"""Factors of a machine on which single layers were measured."""


@pytest.mark.parametrize(
    ("model", "batch"), [("gpt-mini", 4), ("lenet", 64), ("digits-cnn", 128), ("resnet18", 4), ("mlp", 32)]
)
def test_the_refit_predicts_built_in_models_of_a_measured_machine(model: str, batch: int) -> None:
    """Fixed bug: GELU, sums and norms had one rate, weights of all layers another, and pools counted twice.

    lenet was predicted at 1.5 times its step, and ResNet-18 with 4 images of 8 x 8 at 0.53 times."""
    device = known_of(measure(MEASURED))["hardware", "node"].hardware
    assert device is not None
    assert not device.doubts
    true_s, refit_s = (
        catalogue_curve(builtin(model, None), chip).seconds(batch)
        for chip in (replace(CORE, term_factors=MEASURED), device.device(CORE))
    )
    assert refit_s == pytest.approx(true_s, rel=0.05)


def test_factors_of_an_earlier_release_leave_pools_as_they_were() -> None:
    """Its term for pools had another unit, and another name."""
    old, new = (replace(CORE, term_factors=factors) for factors in ((("pool_B", 1.1),), ()))
    assert catalogue_curve(builtin("lenet", None), old).seconds(64) == catalogue_curve(
        builtin("lenet", None), new
    ).seconds(64)


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
    changed = profile.regression.model_copy(update={"time_factors": {"pooling_B": value, "layer": 1.0}})
    hardware = hardware_of(profile.model_copy(update={"regression": changed}), "node")
    assert dict(hardware.term_factors).get("pooling_B") == used
    assert any("pooling_B" in doubt for doubt in hardware.doubts)


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
    assert set(PART_OF_TERM) == set(structure.HOST_S) | set(structure.CALL_S) | set(structure.TIME_S)
    assert set(PART_OF_TERM.values()) <= set(vars(NOMINAL))


LINK = Link(SHARED_MEMORY_LATENCY_S, CORE.peer_bandwidth_Bps, CORE.memory_bandwidth_Bps / 3)


def with_ranks(found: HardwareMeasure, ranks: int, factors: TermFactors = (), watts: float = 0.0) -> HardwareMeasure:
    """Return the document with steps on ``ranks`` ranks of a node with 64 cores, whose memory keeps up with 32."""
    assert found.structures is not None
    seconds = []
    for i in on_ranks(len(found.structures.s)):
        net = structures(len(found.structures.s))[i]
        table, use = workload_of(net), CoreUse(1.0, ranks, 64.0)
        compute_s = catalogue_curve(table, replace(CORE, term_factors=factors), use=use).seconds(net.batches[0])
        overlap = OVERLAP_EFFICIENCY["cpu"]
        timing = step(compute_s, 0.0, "Ring", table.gradient_nbytes, ranks, LINK, overlap, 0.0, 0.0, nodes=1)
        seconds.append(timing.step_s)
    part = StructuresOnRanks(ranks=ranks, s=tuple(seconds), watts=(watts,) * len(seconds) if watts else ())
    rows = found.structures.model_copy(update={"several": (*found.structures.several, part)})
    return found.model_copy(update={"structures": rows, "node_cores": 64})


def test_communication_does_not_count_as_computing() -> None:
    plain = measure(SLOW_POOLS)
    found = with_ranks(with_ranks(plain, 2, SLOW_POOLS), 8, SLOW_POOLS)
    alone, several = (refitted(each, compared(each).factors) for each in (plain, found))
    assert alone is not None and several is not None
    assert [each.ranks for each in several.on_ranks] == [1, 2, 8]
    assert all(each.error is not None and each.error < 0.05 for each in several.on_ranks)
    for (name, factor), (_, expected) in zip(several.time, alone.time, strict=True):
        assert factor == pytest.approx(expected, rel=0.15), name


@pytest.mark.parametrize(("without", "with_ranks", "count"), [
    ((0.08, 0.20), (0.08, 0.10), True),
    ((0.08, 0.20), (0.07, 0.10), True),
    ((0.08, 0.20), (0.12, 0.10), False),
    ((0.08, 0.20), (0.07, 0.199), False),
])  # fmt: skip
def test_steps_on_several_ranks_count_if_they_are_then_predicted_better_and_others_no_worse(
    without: tuple[float, float], with_ranks: tuple[float, float], count: bool
) -> None:
    assert includes_ranks(without, with_ranks) is count


def test_steps_on_ranks_that_contradict_those_on_one_core_only_have_errors() -> None:
    """The machine is slow on several ranks for another reason than the memory bandwidth, such as its power limit."""
    plain = measure(SLOW_POOLS)
    slow = tuple((name, 2.0) for name in PART_OF_TERM)
    refit, alone = refitted(with_ranks(plain, 8, slow), NOMINAL), refitted(plain, NOMINAL)
    assert refit is not None and alone is not None
    assert not refit.fits_ranks and refit.time == alone.time
    assert refit.on_ranks[1].error is not None and refit.on_ranks[1].error > 0.1


def test_ranks_that_share_the_memory_of_a_node_have_the_same_factors() -> None:
    """On 64 ranks, the memory of the node gives each rank half of its bandwidth."""
    found = with_ranks(measure(SLOW_POOLS), 64, SLOW_POOLS)
    refit = refitted(found, compared(found).factors)
    assert refit is not None
    assert refit.on_ranks[1].error is not None and refit.on_ranks[1].error < 0.05


def test_power_is_stored_as_measured_or_not_at_all() -> None:
    unknown = hardware_profile(with_ranks(measure(), 2), "node")
    assert unknown.regression is not None
    assert [each.watts for each in unknown.regression.on_ranks] == [None, None]
    assert sum("not measured" in line for line in hardware_table("node", unknown, hardware_of(unknown, "node"))) == 2
    rows = measure().structures
    assert rows is not None
    known = measure(structures=rows.model_copy(update={"watts": (0.0, *(9.0,) * 47)}))
    profile = hardware_profile(with_ranks(known, 2, watts=17.0), "node")
    assert profile.regression is not None
    assert [each.watts for each in profile.regression.on_ranks] == [9.0, 17.0]
    assert any(line.endswith("17 W") for line in hardware_table("node", profile, hardware_of(profile, "node")))


def test_steps_that_are_mostly_communication_or_missing_are_left_out() -> None:
    found = with_ranks(measure(), 2)
    assert found.structures is not None
    (part,) = found.structures.several
    short = part.model_copy(update={"s": (0.0, 1e-6, *part.s[2:])})
    refit = refitted(
        found.model_copy(update={"structures": found.structures.model_copy(update={"several": (short,)})}), NOMINAL
    )
    assert refit is not None
    assert refit.on_ranks[1].networks == len(part.s) - 1
    assert refit.on_ranks[1].error is not None and refit.on_ranks[1].error < 0.1
