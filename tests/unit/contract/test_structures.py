"""Laws of the random networks that the hardware probe trains for the structure regression."""

import pytest

from dlcontract.hardware import (
    MAX_NBYTES,
    MAX_RANK_COUNTS,
    MAX_STRUCTURES,
    MAX_TIMED,
    HardwareMeasure,
    MeasuredStructures,
    StructuresOnRanks,
    TimedStep,
)
from dlcontract.structures import MAX_FLOPS, MAX_ON_RANKS, MAX_RANK_NBYTES, MIN_STRUCTURES, cost, on_ranks, structures
from dlcontract.structures import MAX_NBYTES as MAX_STEP_NBYTES
from dljob.calibrate.hardware import workload_of

ALL = structures(MAX_STRUCTURES)


def test_a_longer_sequence_begins_with_the_shorter_one() -> None:
    assert structures(MIN_STRUCTURES) == ALL[:MIN_STRUCTURES]
    structures.cache_clear()
    assert structures(MAX_STRUCTURES) == ALL


def test_the_sequence_does_not_change_without_a_new_number() -> None:
    """A document names networks by their positions. After a change, increase ``SEQUENCE`` and correct these lines."""
    assert ALL[0].shape == (3, 64, 64)
    assert ALL[0].layers[0] == ("conv", 4)
    assert ALL[-1].layers[0][0] == "embedding"


def test_networks_are_different_and_bounded() -> None:
    assert len(set(ALL)) == MAX_STRUCTURES
    for net in ALL:
        flops, nbytes = cost(net)
        assert 0 < flops <= MAX_FLOPS
        assert 0 < nbytes <= MAX_STEP_NBYTES
        assert len(net.batches) == 1


def test_every_dimension_varies() -> None:
    cnns = [net for net in ALL if net.layers[0][0] == "conv"]
    decoders = [net for net in ALL if net.layers[0][0] == "embedding"]
    assert len(cnns) + len(decoders) == MAX_STRUCTURES
    assert len(decoders) == MAX_STRUCTURES // 3

    def values(nets: list, kind: str) -> set[int]:  # type: ignore[type-arg]
        return {sum(layer[0] == kind for layer in net.layers) for net in nets}

    assert len(values(cnns, "conv")) >= 6
    assert values(cnns, "linear") == {2, 3, 4}
    assert len({net.layers[0] for net in cnns}) >= 5, "filters"
    assert len({next(layer[1] for layer in net.layers if layer[0] == "linear") for net in cnns}) >= 5, "dense nodes"
    assert len({net.shape for net in cnns}) >= 6
    assert len({net.batches for net in cnns}) >= 6
    assert len(values(decoders, "block")) >= 5
    assert len({net.layers[0] for net in decoders}) >= 10, "vocabulary and width"
    assert len({net.shape for net in decoders}) >= 4


@pytest.mark.parametrize("index", [0, 2, MAX_STRUCTURES - 1])
def test_rough_costs_are_near_those_of_the_layer_table(index: int) -> None:
    net = ALL[index]
    flops = cost(net)[0]
    assert flops / 1.6 < net.batches[0] * workload_of(net).flops_per_sample < 1.6 * flops


def test_the_fullest_document_keeps_all_networks_and_most_steps() -> None:
    step = TimedStep(net="small-dense", batch=4096, cores=128, s=1.2345e-05)
    on_ranks = StructuresOnRanks(ranks=128, s=(0.0001235,) * MAX_ON_RANKS, watts=(123.0,) * MAX_ON_RANKS)
    rows = MeasuredStructures(
        s=(0.0001235,) * MAX_STRUCTURES,
        grown_KiB=(1_234_567,) * MAX_STRUCTURES,
        watts=(12.3,) * MAX_STRUCTURES,
        several=(on_ranks,) * MAX_RANK_COUNTS,
    )
    full = HardwareMeasure(device="x" * 96, cores=127.5, node_cores=128, steps=(step,) * MAX_TIMED, structures=rows)
    text = full.to_json()
    assert len(text.encode()) <= MAX_NBYTES
    again = HardwareMeasure.parse(text)
    assert again.structures == rows
    assert len(again.steps) >= 12, "all steps on one core, which come first"


@pytest.mark.parametrize("count", [MIN_STRUCTURES, 48, MAX_STRUCTURES])
def test_networks_on_several_ranks_are_of_both_kinds(count: int) -> None:
    kinds = [ALL[i].layers[0][0] for i in on_ranks(count)]
    assert set(kinds) == {"conv", "embedding"}
    assert 4 <= len(kinds) <= MAX_ON_RANKS
    assert all(cost(ALL[i])[1] <= MAX_RANK_NBYTES for i in on_ranks(count))
