"""Tests of the memory that plans predict for ranks with a part of a model, against measured peaks."""

from dataclasses import replace
from statistics import median
from typing import Any, Literal

import pytest

from dljob.perf.resources import memory
from dljob.perf.step import model_split as split
from dljob.perf.workload.workload import StatedPairs, builtin, hinted
from dljob.planner import Request
from dljob.planner.candidates.request_workload import workload_of
from support.planner_questions import decided, view

MIB = 2**20
MEASURED: list[tuple[str, int, Literal["Pipeline", "Tensor"], int, int, float]] = [
    ("digits-cnn", 64, "Pipeline", 2, 1, 11),
    ("digits-cnn", 64, "Pipeline", 4, 1, 11),
    ("gpt-mini", 32, "Pipeline", 2, 1, 77),
    ("gpt-mini", 32, "Pipeline", 4, 1, 63),
    ("gpt-mini", 32, "Pipeline", 4, 2, 49),
    ("gpt-mini", 32, "Tensor", 2, 1, 164),
    ("gpt-mini", 32, "Tensor", 4, 1, 153),
    ("gpt-mini", 32, "Tensor", 4, 2, 101),
    ("gpt-mini", 128, "Pipeline", 2, 1, 248),
    ("gpt-mini", 128, "Tensor", 2, 1, 670),
    ("lenet", 64, "Pipeline", 2, 1, 14),
    ("lenet", 64, "Tensor", 2, 1, 20),
    ("mlp", 512, "Pipeline", 2, 1, 11),
    ("mlp", 512, "Tensor", 2, 1, 14),
    ("resnet18", 16, "Pipeline", 2, 1, 163),
    ("resnet18", 16, "Pipeline", 4, 1, 132),
    ("resnet18", 16, "Pipeline", 4, 2, 239),
    ("resnet18", 64, "Pipeline", 2, 1, 230),
    ("resnet50", 8, "Pipeline", 2, 1, 304),
    ("resnet50", 8, "Pipeline", 4, 1, 236),
]
"""Model, global batch size, strategy, ranks, replicas, and the peak in MiB of the rank with the most, beside its process.

From ``benchmarks/training/model_split/memory.py``, in float32 with SGD and momentum, without checkpoints, four
micro-batches in pipelines."""


REUSING: list[tuple[str, int, Literal["Pipeline", "Tensor"], int, int, float]] = [
    ("gpt-mini", 32, "Pipeline", 2, 1, 60),
    ("gpt-mini", 32, "Pipeline", 4, 1, 56),
    ("gpt-mini", 32, "Pipeline", 4, 2, 41),
    ("gpt-mini", 32, "Tensor", 2, 1, 125),
    ("gpt-mini", 32, "Tensor", 4, 1, 96),
    ("gpt-mini", 32, "Tensor", 4, 2, 74),
    ("gpt-mini", 128, "Pipeline", 2, 1, 185),
    ("gpt-mini", 128, "Tensor", 2, 1, 450),
]
"""As ``MEASURED``, of ranks in whose heap later tensors fit into the blocks of freed ones, in one round."""


def predicted_nbytes(
    model: str, batch: int, strategy: Literal["Pipeline", "Tensor"], ranks: int, replicas: int, reuses: bool = False
) -> int:
    """Return what the plan adds to the memory of a process."""
    stages: dict[str, Any] = {"stages": ranks // replicas, "micro_batches": 4} if strategy == "Pipeline" else {}
    request = Request(
        job="j", global_batch=batch, total_steps=10, model=model, strategy=strategy, replicas=replicas,
        checkpoints=False, nodes_min=ranks, nodes_max=ranks, reuses_blocks=reuses, **stages,
    )  # fmt: skip
    chosen = decided(request, view({"count": ranks, "cpu": 1, "memory": "8Gi"})).chosen
    return chosen.prediction.memory_nbytes - memory.PROCESS_NBYTES


def test_plans_are_above_measured_peaks_and_close_to_them() -> None:
    ratios = {row[:-1]: predicted_nbytes(*row[:-1]) / MIB / row[-1] for row in MEASURED}
    assert min(ratios.values()) >= 1, ratios
    assert median(ratios.values()) <= 1.3, ratios


def _hints(
    parameters: int, flops: float, kept: int, sample: int = 512, width: int = 0, *split: float
) -> dict[str, Any]:
    """Return the figures of a script.

    ``split``: those of pairs with 12 pairs of 8 units; a script without is unknown. ``width``: that of its blocks,
    whose largest layer is four times as wide. Samples have 32 positions.
    """
    found = {"parameters": parameters, "flops_per_sample": flops, "activation_nbytes_per_sample": kept}
    pairs = StatedPairs(12, 8, int(split[0]), *split[1:]) if split else None
    largest = {"largest_parameter_nbytes": 16 * width**2, "largest_activation_nbytes": 512 * width}
    dense = {"dense_output_nbytes": 8192} | largest if split else {}
    return found | dense | {"sample_nbytes": sample, "pairs": pairs}


SCRIPTS = {
    "decoder-10": _hints(10_696_000, 2.076e9, 4_777_216, 512, 384, 10_632_960, 2.071e9, 3_545_088, 1_179_648),
    "decoder-25": _hints(24_006_592, 4.643e9, 7_161_088, 512, 576, 23_912_064, 4.636e9, 5_314_560, 1_769_472),
    "decoder-50": _hints(50_011_584, 9.651e9, 10_339_584, 512, 832, 49_875_072, 9.641e9, 7_673_856, 2_555_904),
    "mixer-25": _hints(25_274_432, 4.838e9, 4_787_456, 512, 512, 25_190_400, 4.832e9, 3_145_728, 1_572_864),
    "recurrent-11": _hints(10_709_056, 2.035e9, 2_433_280),
    "convolutional-11": _hints(10_640_448, 1.634e10, 9_703_552, 5120),
}
"""Network of ``benchmarks/training/model_split/script_memory.py`` → what ``python -m dltrain.profile`` prints of it."""
MEASURED_SCRIPTS: list[tuple[str, Literal["Data", "Pipeline", "Tensor"], int, int, float]] = [
    ("decoder-10", "Data", 1, 1, 361),
    ("decoder-10", "Tensor", 2, 1, 229),
    ("decoder-10", "Tensor", 4, 2, 176),
    ("decoder-10", "Pipeline", 2, 1, 154),
    ("decoder-10", "Pipeline", 3, 1, 121),
    ("decoder-10", "Pipeline", 4, 2, 158),
    ("decoder-25", "Data", 1, 1, 658),
    ("decoder-25", "Tensor", 2, 1, 407),
    ("decoder-25", "Tensor", 4, 2, 321),
    ("decoder-25", "Pipeline", 2, 1, 294),
    ("decoder-25", "Pipeline", 3, 1, 226),
    ("decoder-25", "Pipeline", 4, 2, 311),
    ("decoder-50", "Data", 1, 1, 1190),
    ("decoder-50", "Tensor", 2, 1, 692),
    ("decoder-50", "Tensor", 4, 2, 589),
    ("decoder-50", "Pipeline", 2, 1, 558),
    ("decoder-50", "Pipeline", 3, 1, 408),
    ("decoder-50", "Pipeline", 4, 2, 602),
    ("mixer-25", "Data", 1, 1, 616),
    ("mixer-25", "Tensor", 2, 1, 414),
    ("recurrent-11", "Data", 1, 1, 297),
    ("recurrent-11", "Pipeline", 2, 1, 165),
    ("convolutional-11", "Data", 1, 1, 646),
    ("convolutional-11", "Pipeline", 2, 1, 266),
]
"""Network, strategy, ranks, replicas, and the largest peak in MiB of a rank in several runs, beside its process.

Replicas exchanged messages over TCP, as those of several pods, or through shared memory, whichever had the larger peak.
"""


def script_nbytes(
    net: str, strategy: Literal["Data", "Pipeline", "Tensor"], ranks: int, replicas: int, reuses_blocks: bool = False
) -> int:
    """Return what the plan of a script adds to the memory of a process."""
    stages: dict[str, Any] = {"stages": ranks // replicas, "micro_batches": 4} if strategy == "Pipeline" else {}
    request = Request(
        job="j", global_batch=32, total_steps=10, strategy=strategy, replicas=replicas, optimizer="AdamW",
        checkpoints=False, nodes_min=ranks, nodes_max=ranks, reuses_blocks=reuses_blocks, **stages, **SCRIPTS[net],
    )  # fmt: skip
    chosen = decided(request, view({"count": ranks, "cpu": 1, "memory": "8Gi"})).chosen
    return chosen.prediction.memory_nbytes - memory.PROCESS_NBYTES


def test_plans_of_scripts_are_above_measured_peaks_and_close_to_them() -> None:
    """Regression: the plan of a script with convolutions in two stages was below its peak, those of Tensor at 1.9 times."""
    ratios = {row[:-1]: script_nbytes(*row[:-1]) / MIB / row[-1] for row in MEASURED_SCRIPTS}
    assert min(ratios.values()) >= 1.05, ratios
    assert median(ratios.values()) <= 1.3, ratios
    # Regression: messages between replicas counted twice the parameters of a part.
    assert max(ratio for (net, *_, replicas), ratio in ratios.items() if replicas > 1) <= 1.35, ratios
    assert (
        max(ratio for case, ratio in ratios.items() if case[0].startswith(("decoder", "mixer")) and case[-1] == 1)
        <= 1.32
    ), ratios


REUSING_SCRIPTS: list[tuple[str, Literal["Data", "Pipeline", "Tensor"], int, int, float]] = [
    ("decoder-10", "Tensor", 2, 1, 201),
    ("decoder-10", "Tensor", 4, 2, 158),
    ("decoder-10", "Pipeline", 3, 1, 112),
    ("decoder-10", "Pipeline", 4, 2, 138),
    ("decoder-25", "Data", 1, 1, 626),
    ("decoder-25", "Tensor", 4, 2, 296),
    ("decoder-25", "Pipeline", 3, 1, 215),
    ("decoder-50", "Data", 1, 1, 1148),
    ("decoder-50", "Tensor", 2, 1, 637),
    ("decoder-50", "Tensor", 4, 2, 548),
    ("decoder-50", "Pipeline", 2, 1, 498),
    ("decoder-50", "Pipeline", 3, 1, 375),
    ("decoder-50", "Pipeline", 4, 2, 536),
    ("mixer-25", "Tensor", 2, 1, 344),
]
"""As ``MEASURED_SCRIPTS``, of ranks in whose heap later tensors fit into the blocks of freed ones, in one to three runs.

Messages of replicas went over TCP, whose peaks are larger. The largest peak of any rank counts."""


def test_plans_of_ranks_that_reuse_blocks_are_above_measured_peaks_and_closer_to_them() -> None:
    ratios, whole = dict[tuple[Any, ...], float](), list[float]()
    for *case, peak in REUSING_SCRIPTS:
        planned = script_nbytes(*case, reuses_blocks=True) / MIB
        ratios[tuple(case)] = planned / peak
        whole.append((planned + memory.PROCESS_NBYTES / MIB) / (peak + 374))
    assert min(ratios.values()) >= 1.05, ratios
    assert median(ratios.values()) <= 1.15, ratios
    assert median(whole) <= 1.1, "with the process of the rank"


def test_plans_of_built_in_models_that_reuse_blocks_are_above_measured_peaks() -> None:
    ratios = {row[:-1]: predicted_nbytes(*row[:-1], reuses=True) / MIB / row[-1] for row in REUSING}
    assert min(ratios.values()) >= 1.02, ratios
    assert median(ratios.values()) <= 1.4, ratios


def test_networks_with_convolutions_are_planned_as_before() -> None:
    for net, strategy, ranks in (("convolutional-11", "Pipeline", 2), ("recurrent-11", "Data", 1)):
        assert script_nbytes(net, strategy, ranks, 1, reuses_blocks=True) == script_nbytes(net, strategy, ranks, 1)


@pytest.mark.parametrize("unknown", ["largest_parameter_nbytes", "largest_activation_nbytes"])
def test_scripts_whose_largest_tensors_are_unknown_are_planned_as_before(unknown: str) -> None:
    """An embedding may be most of a model, and a layer may keep most of the activations."""
    figures = {**SCRIPTS["decoder-10"], unknown: None}
    request = Request(job="j", global_batch=8, total_steps=10, optimizer="AdamW", **figures)
    reusing = replace(request, reuses_blocks=True)
    before, after = (memory.rank_nbytes(workload_of(each), 8, False) for each in (request, reusing))
    assert before == after


def test_temporaries_have_the_size_of_the_largest_tensors() -> None:
    """Adam has two of a parameter while it updates it, and the backward pass an activation and its gradient."""
    figures = SCRIPTS["decoder-10"] | {"largest_parameter_nbytes": MIB, "largest_activation_nbytes": MIB}
    request = Request(job="j", global_batch=8, total_steps=10, optimizer="AdamW", reuses_blocks=True, **figures)

    def needed(change: dict[str, int]) -> int:
        return memory.rank_nbytes(workload_of(replace(request, **change)), 8, False)  # type: ignore[arg-type]

    more = needed({"largest_parameter_nbytes": 3 * MIB}) - needed({})
    assert more == pytest.approx(memory.PART_MARGIN * 2 * 2 * MIB, abs=2)
    more = needed({"largest_activation_nbytes": 3 * MIB}) - needed({})
    assert more == pytest.approx(memory.PART_MARGIN * 8 * 2 * 2 * MIB, abs=2)


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("net", ["decoder-10", "convolutional-11"])
def test_parts_of_memory_have_its_sum(net: str, reuses: bool) -> None:
    request = Request(job="j", global_batch=8, total_steps=10, optimizer="AdamW", reuses_blocks=reuses, **SCRIPTS[net])
    parts = memory.parts_nbytes(workload_of(request), 8, False)
    assert sum(parts.values()) == pytest.approx(memory.rank_nbytes(workload_of(request), 8, False), rel=1e-6)
    assert ("update of the largest parameter" in parts) == (reuses and net == "decoder-10")


def test_only_measured_factors_above_1_count_for_a_part() -> None:
    """They were measured with whole networks, so a lower factor does not show that a part needs less."""
    plain = memory.part_nbytes(1e8, 1e8, 1e7, False)
    assert memory.part_nbytes(1e8, 1e8, 1e7, False, (("kept_B", 0.5), ("process", 0.5))) == plain
    more = memory.part_nbytes(1e8, 1e8, 1e7, False, (("kept_B", 1.5), ("parameter_B", 0.5)))
    assert more - plain == pytest.approx(memory.PART_MARGIN * 0.5 * memory.PART["kept_B"] * 1e8)
    gpu = memory.part_nbytes(1e8, 1e8, 1e7, True, (("kept_B", 1.5),))
    assert gpu == memory.GPU_CONTEXT_NBYTES + memory.GPU_WORKSPACE_NBYTES + memory.MARGIN * 2.1e8


@pytest.mark.parametrize(("pairs", "stages", "most"), [(9, 2, 5 / 9), (6, 4, 2 / 6), (50, 2, 1 / 2), (400, 5, 1 / 5)])
def test_stages_do_not_divide_the_pairs_of_a_script(pairs: int, stages: int, most: float) -> None:
    """Regression: nine residual blocks in two stages counted as halves, so that the larger stage needed more memory."""
    stated = StatedPairs(pairs, 8, 18_000_000, 1e9, 1e6, 1e6)
    workload = hinted(18_900_000, 1.1e9, 1e7, optimizer="AdamW", dense_output_nbytes=8192, pairs=stated)
    assert split.cut_up(workload).cut_into(stages).parameters / workload.parameters == pytest.approx(most, abs=0.011)
    assert split.cut_up(workload).cut_into(stages).arithmetic == pytest.approx(most, abs=0.011)


@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_tensors_of_stages(micro_batches: int) -> None:
    """Stage s keeps the activations of at most p - s micro-batches, and every stage loads all samples."""
    workload = builtin("resnet18", None)
    stages = split.cut_up(workload).cut_into(4)
    held = split.stages_held(workload, stages, micro_batches, 16 * micro_batches)
    assert sum(each.state for each in held) == pytest.approx(12 * workload.parameters), "three values per parameter"
    for i, (stage, each) in enumerate(zip(stages.stages, held, strict=True)):
        samples = 16 * min(micro_batches, 4 - i)
        loaded = memory.PREFETCHED_BATCHES * 16 * micro_batches * workload.sample_nbytes
        kept = stage.outputs * workload.activation_nbytes + 4 * stage.input_elements
        assert each.kept == pytest.approx(samples * kept + loaded)
        assert 0 < each.largest <= 16 * workload.transient_nbytes


def test_the_stage_with_the_most_memory_counts() -> None:
    """The first stage of resnet18 has most activations, and the last one most parameters."""
    few, many = (predicted_nbytes("resnet18", batch, "Pipeline", 2, 1) for batch in (4, 128))
    workload = builtin("resnet18", None)
    stages = split.cut_up(workload).cut_into(2).stages
    assert few > memory.PART["parameter_B"] * 12 * stages[1].parameters
    kept = 2 * 32 * stages[0].outputs * workload.activation_nbytes
    assert many > memory.PART["kept_B"] * kept > memory.PART["parameter_B"] * 12 * stages[1].parameters
