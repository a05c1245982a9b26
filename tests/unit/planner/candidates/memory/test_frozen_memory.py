"""Tests of the memory of frozen parameters, such as the pretrained base of LoRA, in plans (``hints.frozenBytes``)."""

from typing import Any, Literal

import pytest

from dlcontract import Structure
from dljob.job.observed_structure import planner_structure
from dljob.job.plan.structure import stored_structure
from dljob.perf.resources import memory
from dljob.perf.step import model_split, zero
from dljob.perf.workload.observed import observed
from dljob.perf.workload.workload import StatedPairs, hinted, in_precision
from dljob.planner import Request
from support.planner_questions import decided, view

MIB = 2**20
GB = 10**9
LORA: dict[str, Any] = {
    "parameters": 245_760, "flops_per_sample": 9.259e9, "activation_nbytes_per_sample": 7_878_144, "sample_nbytes": 512,
    "dense_output_nbytes": 8192, "largest_activation_nbytes": 524_288, "largest_parameter_nbytes": 131_072,
    "frozen_nbytes": 302_833_920, "pairs": StatedPairs(6, 8, 0, 3.03e9, 2_626_560, 1_441_792, 100_737_024),
}  # fmt: skip
"""What ``python -m dltrain.profile`` prints of lora-75 of ``benchmarks/training/model_split/script_memory.py``."""
Strategy = Literal["Data", "Pipeline", "Tensor"]
MEASURED: list[tuple[Strategy, int, int, float]] = [
    ("Data", 1, 2, 579),
    ("Data", 1, 32, 649),
    ("Data", 1, 64, 962),
    ("Pipeline", 2, 64, 460),
    ("Tensor", 2, 64, 800),
]
"""Strategy, ranks, batch, and the largest peak in MiB of a rank in two runs or more, beside its process."""


@pytest.mark.parametrize(("strategy", "ranks", "batch", "measured"), MEASURED)
def test_plans_are_above_measured_peaks_and_close_to_them(
    strategy: Strategy, ranks: int, batch: int, measured: float
) -> None:
    split: dict[str, Any] = {"stages": 2, "micro_batches": 4} if strategy == "Pipeline" else {}
    request = Request(
        job="j", global_batch=batch, total_steps=10, strategy=strategy, replicas=1, checkpoints=False, nodes_min=ranks,
        nodes_max=ranks, reuses_blocks=True, optimizer="AdamW", **split, **LORA,
    )  # fmt: skip
    chosen = decided(request, view({"count": ranks, "cpu": 1, "memory": "64Gi"})).chosen
    ratio = (chosen.prediction.memory_nbytes - memory.PROCESS_NBYTES) / MIB / measured
    assert 1 <= ratio <= 1.26


BASE = 14 * GB
"""Seven billion parameters in bfloat16."""


def lora(frozen_nbytes: int = BASE) -> Any:
    return hinted(20_000_000, 1e13, 1e9, optimizer="AdamW", frozen_nbytes=frozen_nbytes)


def test_frozen_parameters_count_once_on_a_gpu_and_twice_in_main_memory() -> None:
    whole, without = lora(), lora(0)
    more = memory.rank_nbytes(whole, 1, is_gpu=True) - memory.rank_nbytes(without, 1, is_gpu=True)
    assert more == pytest.approx(memory.MARGIN * BASE)
    assert memory.rank_nbytes(whole, 1, is_gpu=False) >= 2 * BASE
    assert memory.pod_nbytes(whole, 1, 2, is_gpu=True) >= 2 * 2 * BASE
    assert whole.gradient_nbytes == without.gradient_nbytes, "frozen parameters are not exchanged in steps"


def test_frozen_parameters_need_16_bit_copies_with_autocast() -> None:
    """Whether the base has 16 bits already is not known."""
    whole, half = lora(), in_precision(lora(), "BF16")
    assert whole.frozen_copies_nbytes == 0
    assert half.frozen_copies_nbytes == BASE / 2


@pytest.mark.parametrize("is_gpu", [False, True])
def test_named_parts_add_up_to_the_memory_of_a_rank(is_gpu: bool) -> None:
    parts = memory.parts_nbytes(lora(), 1, is_gpu)
    assert sum(parts.values()) == pytest.approx(memory.rank_nbytes(lora(), 1, is_gpu), rel=1e-6)
    assert next(iter(parts)) == "frozen parameters"


@pytest.mark.parametrize("is_gpu", [False, True])
def test_no_batch_fits_if_the_frozen_parameters_do_not(is_gpu: bool) -> None:
    needed = memory.rank_nbytes(lora(), 1, is_gpu)
    assert memory.largest_batch(lora(), 0.9 * needed, is_gpu) in (0, 1)
    assert memory.largest_batch(lora(), BASE, is_gpu) == 0
    assert memory.largest_batch(lora(), 1.2 * needed, is_gpu) >= 1


def test_ranks_share_frozen_parameters_only_with_zero_3() -> None:
    assert zero.frozen_nbytes(lora(), 1, 8) == zero.frozen_nbytes(lora(), 2, 8) == BASE
    assert zero.frozen_nbytes(lora(), 3, 8) == BASE * (1 / 8 + 0.5)


def test_pipeline_stages_have_a_part_of_the_frozen_parameters() -> None:
    cut = model_split.cut_up(lora()).cut_into(4)
    held = model_split.stages_held(lora(), cut, 4, 8)
    assert sum(stage.frozen for stage in held) == pytest.approx(BASE)
    assert max(stage.frozen for stage in held) < 0.3 * BASE


@pytest.mark.parametrize(("within", "expected"), [(0, BASE), (BASE // 2, 0.75 * BASE)])
def test_tensor_parallel_ranks_divide_the_frozen_parameters_in_pairs(within: int, expected: float) -> None:
    pairs = StatedPairs(4, 8, 0, 1e12, 1e8, 1e6, within)
    workload = hinted(20_000_000, 1e13, 1e9, frozen_nbytes=BASE, pairs=pairs)
    found = model_split.cut_up(workload).pairs
    assert found is not None
    assert model_split.tensor_held(workload, found, 2, 1).frozen == expected


def test_backward_pass_needs_no_gradients_of_frozen_weights() -> None:
    def parts(frozen_nbytes: int) -> float:
        layers = lora(frozen_nbytes).layers
        return sum(each.backward_FLOPs for each in layers) / sum(each.forward_FLOPs for each in layers)

    assert parts(0) == pytest.approx(2)
    assert parts(BASE) == pytest.approx(1, abs=0.01)
    assert lora().flops_per_sample == pytest.approx(lora(0).flops_per_sample)


def test_frozen_parameters_of_observed_scripts_count() -> None:
    seen = Structure(parameters=20_000_000, frozen_nbytes=BASE, samples=8, flops=8e13, optimizer_slots=2)
    stored = stored_structure(seen, nodes=1, ranks_per_node=1, cores=1, step_s=None, steps=0)
    structure = planner_structure(stored, "cpu")
    assert structure is not None
    assert memory.rank_nbytes(observed(structure), 1, is_gpu=False) >= 2 * BASE
