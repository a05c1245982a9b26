"""Laws of sharded training state (ZeRO): what each stage saves in memory and costs in communication."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.step.communication import Link, allreduce_s
from dljob.perf.step.zero import Stage, element_nbytes, exposed_communication_s, state_nbytes, unit_parameters, units
from dljob.perf.workload.workload import Workload, builtin, hinted, in_precision, reference

FLOAT32 = {
    "ResNet-50": builtin("resnet50", "synthetic-images"),
    "gpt-mini": builtin("gpt-mini", "synthetic-tokens"),
    "GPT-2-XL": reference("GPT-2-XL", "AdamW"),
}
MODELS = FLOAT32 | {f"{name} in BF16": in_precision(each, "BF16") for name, each in FLOAT32.items()}
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
names = st.sampled_from(list(MODELS))
links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12), st.floats(1e8, 1e12))


@given(names, st.integers(2, 1000))
def test_memory_falls_from_stage_to_stage(name: str, ranks: int) -> None:
    workload = MODELS[name]
    needed = [state_nbytes(workload, stage, ranks) for stage in STAGES]
    assert needed == sorted(needed, reverse=True)


@given(names, st.sampled_from(STAGES), st.integers(1, 500))
def test_more_ranks_never_need_more_memory(name: str, stage: Stage, ranks: int) -> None:
    workload = MODELS[name]
    assert state_nbytes(workload, stage, ranks + 1) <= state_nbytes(workload, stage, ranks) * (1 + 1e-12)


@given(st.sampled_from(list(FLOAT32)), st.sampled_from(STAGES))
def test_one_rank_shards_nothing(name: str, stage: Stage) -> None:
    assert state_nbytes(MODELS[name], stage, 1) == state_nbytes(MODELS[name], 0, 1)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("Llama-2-70B", 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192),  # a transformer layer
        ("Llama-3-8B", 2 * 128_256 * 4096 + 4096),  # embedding, norm and output layer
        ("GPT-2-XL", (50_257 + 1024) * 1600 + 2 * 1600),  # the output layer has the weights of the embedding
        ("VGG-16", 25_088 * 4096 + 4096),  # no blocks: a layer
    ],
)
def test_unit_is_a_block_or_all_outside_of_blocks(name: str, unit: int) -> None:
    """Regression: it was the largest layer, a third of a block of Llama 2 70B, so that ranks needed more memory."""
    assert unit_parameters(reference(name)) == unit


@pytest.mark.parametrize(("name", "nbytes"), [("ResNet-50", 4), ("ViT-B-16", 2), ("VGG-16", 2), ("Llama-3-8B", 2)])
def test_models_without_batch_norm_are_gathered_in_16_bits(name: str, nbytes: int) -> None:
    """Regression: the first layer of a vision transformer, which is a convolution, made all gathers twice as large."""
    assert element_nbytes(in_precision(reference(name), "BF16")) == nbytes
    assert element_nbytes(reference(name)) == 4


def test_memory_without_units_is_that_of_the_paper() -> None:
    """Rajbhandari et al. 2020, figure 1, in float32 with Adam: 16, 8 + 8/n, 4 + 12/n and 16/n bytes per parameter."""
    many = hinted(50_000_000_000, 1e12, 0.0, optimizer="Adam")
    unit = unit_parameters(many)
    n, p = 64, many.parameters
    found = [state_nbytes(many, stage, n) / p for stage in STAGES]
    whole = 4 * unit / p
    assert found == pytest.approx([16, 8 + 8 / n, 4 + 12 / n + whole, 16 / n + 3 * whole])


def exposed(
    workload: Workload, stage: Literal[2, 3], ranks: int, link: Link, k: int = 1, overlap: float = 0.0
) -> float:
    return exposed_communication_s(workload, stage, ranks, link, ranks, 1.0, k, overlap)


@given(st.sampled_from(list(FLOAT32)), st.integers(2, 500), st.floats(1e6, 1e12))
def test_stage_3_sends_one_and_a_half_times_the_bytes_of_data_parallelism(
    name: str, ranks: int, bandwidth_Bps: float
) -> None:
    workload = MODELS[name]
    link = Link(0.0, bandwidth_Bps, 1e300)
    once = float(allreduce_s("Ring", float(workload.gradient_nbytes), float(ranks), link))
    assert exposed(workload, 3, ranks, link) == pytest.approx(1.5 * once)
    assert exposed(workload, 2, ranks, link) == pytest.approx(once)
    assert exposed(workload, 3, ranks, link, k=4) == pytest.approx(6 * once)
    assert exposed(workload, 2, ranks, link, k=4) == pytest.approx(2.5 * once)


@given(names, st.integers(2, 500), links, st.floats(0, 1), st.integers(1, 8))
def test_communication_never_grows_with_overlap_and_never_falls_with_micro_batches(
    name: str, ranks: int, link: Link, overlap: float, k: int
) -> None:
    workload = MODELS[name]
    for stage in (2, 3):
        alone = exposed(workload, stage, ranks, link, k)
        assert 0 < exposed(workload, stage, ranks, link, k, overlap) <= alone * (1 + 1e-12)
        assert exposed(workload, stage, ranks, link, k + 1) >= alone


@given(names)
def test_units_hold_all_parameters(name: str) -> None:
    workload = MODELS[name]
    assert (units(workload) - 1) * unit_parameters(workload) < workload.parameters
    assert units(workload) * unit_parameters(workload) >= workload.parameters
