"""Tests of the layer tables of reference models against published sizes and general properties."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.api.spec import BUILTIN_MODELS, ReferenceModel
from dljob.cluster import catalogue
from dljob.perf.step import model_split as split
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.workload.layer import Layer
from dljob.perf.workload.layers import Net
from dljob.perf.workload.references import IMAGENET, OPENWEBTEXT, REFERENCES, WIKIPEDIA, alexnet, bert_base, gpt2, vgg16
from dljob.perf.workload.workload import Workload, builtin, reference
from dljob.planner import Request
from dljob.planner.candidates.request_workload import workload_of

PUBLISHED = {  # parameters; forward multiply-adds of one sample of the given positions (None: the data's own)
    # torchvision's documentation of its weights ("num_params", "GFLOPS": multiply-adds of convolutions and products)
    "AlexNet": (61_100_840, 0.714e9, None),
    "VGG-16": (138_357_544, 15.47e9, None),
    "GoogLeNet": (6_624_904, 1.498e9, None),
    "ResNet-18": (11_689_512, 1.814e9, None),
    "ResNet-34": (21_797_672, 3.664e9, None),
    "ResNet-50": (25_557_032, 4.089e9, None),
    "ResNet-101": (44_549_160, 7.801e9, None),
    "ResNet-152": (60_192_808, 11.514e9, None),
    "ViT-B-16": (86_567_656, 17.564e9, None),
    "ViT-L-16": (304_326_632, 61.555e9, None),
    # Parameters of Hugging Face's BertModel; Sun et al. 2020 (MobileBERT), table 4: 22.5e9 operations at 128 tokens
    "BERT-base": (109_482_240, 22.5e9 / 2, 128),
    "BERT-large": (335_141_888, None, None),
    # Parameters of OpenAI's checkpoints; operations of the first two as Karpathy's nanoGPT counts them at 1024 tokens
    "GPT-2": (124_439_808, 291_648_307_200 / 2, None),
    "GPT-2-medium": (354_823_168, 830_172_299_264 / 2, None),
    "GPT-2-large": (774_030_080, None, None),
    "GPT-2-XL": (1_557_611_200, None, None),
    # Parameters of Hugging Face's LlamaForCausalLM with the configurations that Meta published
    "Llama-2-7B": (6_738_415_616, None, None),
    "Llama-2-13B": (13_015_864_320, None, None),
    "Llama-2-70B": (68_976_648_192, None, None),
    "Llama-3.2-1B": (1_235_814_400, None, None),
    "Llama-3-8B": (8_030_261_248, None, None),
    "Llama-3-70B": (70_553_706_496, None, None),
}
SIZES = {"GPT-2": (12, 768), "GPT-2-medium": (24, 1024), "GPT-2-large": (36, 1280), "GPT-2-XL": (48, 1600)}
MATRIX = ("conv", "linear", "attention")


def products(net: Net) -> float:
    return sum(layer.forward_FLOPs for layer in net.layers if layer.kind in MATRIX)


def test_every_reference_has_published_figures() -> None:
    assert list(PUBLISHED) == list(REFERENCES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_match_published_figures(name: str) -> None:
    assert reference(name).parameters == PUBLISHED[name][0]


@pytest.mark.parametrize("name", [name for name, (_, known, _) in PUBLISHED.items() if known])
def test_operations_match_published_figures(name: str) -> None:
    _, multiply_adds, positions = PUBLISHED[name]
    assert multiply_adds is not None
    build, data = REFERENCES[name]
    net = build(replace(data, shape=(positions,)) if positions else data)
    assert products(net) == pytest.approx(2 * multiply_adds, rel=0.02)


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_decoder_operations_match_narayanan_et_al(name: str, size: tuple[int, int]) -> None:
    """Compare with equation 3 of Narayanan et al. 2021 without recomputation: 24 s l h² (1 + s/6h + V/12lh)."""
    (blocks, h), s, vocabulary = size, 1024, 50_257
    expected = 24 * s * blocks * h**2 * (1 + s / (6 * h) + vocabulary / (12 * blocks * h))
    assert products(REFERENCES[name][0](OPENWEBTEXT)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in REFERENCES if name.startswith("Llama")])
def test_operations_of_llamas_match_hoffmann_et_al(name: str) -> None:
    """Compare with 2 operations for each weight in a product and token (Hoffmann et al. 2022, appendix F), and scores."""
    workload, (_, data) = reference(name), REFERENCES[name]
    attention = [layer.forward_FLOPs for layer in workload.layers if layer.kind == "attention"]
    once = next(layer.parameters for layer in workload.layers if layer.kind == "embedding")
    norms = sum(layer.parameters for layer in workload.layers if layer.kind == "norm")
    weights = workload.parameters - norms - (0 if "3.2" in name else once)  # that of the output layer is tied
    tokens = data.shape[0]
    assert sum(attention) == pytest.approx(len(attention) * 4 * tokens**2 * (once / data.classes))
    assert products(REFERENCES[name][0](data)) == pytest.approx(2 * weights * tokens + sum(attention), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "weights", "units", "sums"),
    [
        ("BERT-base", 12 * (12 * 768**2 + 9 * 768), 12, [512 * 768] * 48),
        ("GPT-2", 12 * (12 * 768**2 + 9 * 768), 12, [1024 * 768] * 48),
        ("Llama-2-7B", 32 * (4 * 4096**2 + 3 * 4096 * 11_008), 32, [4096 * 4096] * 128),
        ("Llama-3-8B", 32 * 3 * 4096 * 14_336, 14_336, [8192 * 4096] * 64),  # grouped-query attention is not split
    ],
)
def test_tensor_parallelism_splits_the_pairs_of_the_trainer(
    name: str, weights: int, units: int, sums: list[float]
) -> None:
    """Regression: of Llamas, gate and up were a pair, and attention was none; of BERT, queries and keys were whole."""
    pairs = split.cut_up(reference(name)).pairs
    assert pairs is not None and (pairs.parameters, pairs.units) == (weights, units)
    assert list(pairs.summed_elements) == sums


@pytest.mark.parametrize("name", REFERENCES)
def test_backward_costs_twice_forward_except_in_the_first_layer(name: str) -> None:
    """Each product has gradients for both factors, but the input of the first layer needs none."""
    weighted = [layer for layer in reference(name).layers if layer.kind in MATRIX]
    first, rest = (weighted[0], weighted[1:]) if weighted[0].kind == "conv" else (None, weighted)
    if first is not None:
        assert first.backward_FLOPs == first.forward_FLOPs > 0
    assert all(layer.backward_FLOPs == 2 * layer.forward_FLOPs > 0 for layer in rest)


@pytest.mark.parametrize("name", REFERENCES)
def test_layer_costs_are_plausible(name: str) -> None:
    workload = reference(name, "AdamW")

    def plausible(layer: Layer) -> bool:
        tensors = 0 < layer.tensors <= layer.parameters or layer.tensors == layer.parameters == 0
        return tensors and layer.moved_elements > 0 and min(layer.forward_FLOPs, layer.backward_FLOPs) >= 0

    assert all(map(plausible, workload.layers))
    assert workload.sample_nbytes / 2 <= workload.activation_nbytes  # tokens of 8 bytes count as floats of 4
    assert 4 * workload.activation_nbytes > workload.transient_nbytes > 0
    assert workload.optimizer_slots == 2


@given(tokens=st.integers(1, 512))
def test_sequence_length_does_not_change_parameters(tokens: int) -> None:
    net = bert_base(replace(WIKIPEDIA, shape=(tokens,)))
    assert sum(layer.parameters for layer in net.layers) == 109_482_240
    quadratic = [layer.forward_FLOPs for layer in net.layers if layer.kind == "attention"]
    assert quadratic == [4.0 * tokens**2 * 768] * 12


@pytest.mark.parametrize("build", [alexnet, vgg16])
def test_convolutions_grow_with_the_image_size(build: Callable[..., Net]) -> None:
    """A side of k times as many pixels takes about k² operations, and exactly k² without rounding."""
    small, large = (
        sum(layer.forward_FLOPs for layer in build(replace(IMAGENET, shape=(3, side, side))).layers if layer.is_conv)
        for side in (224, 448)
    )
    assert large / small == pytest.approx(4, rel=0.0 if build is vgg16 else 0.1)


@pytest.mark.parametrize("name", REFERENCES)
def test_time_grows_with_the_batch_and_is_linear_for_large_batches(name: str) -> None:
    curve = catalogue_curve(reference(name), catalogue.cpu("cpu", 4.0))
    one, two, four = (curve.seconds(batch) for batch in (256.0, 512.0, 1024.0))
    assert four - two == pytest.approx(2 * (two - one), rel=0.01)  # operations and traffic are linear in it
    assert 0 < one < two < four


@given(side=st.integers(3, 64), k=st.integers(1, 3), stride=st.integers(1, 3))
def test_pool_with_ceil_covers_the_edge(side: int, k: int, stride: int) -> None:
    net = Net(1, side, side).pool(k, stride, ceil=True)
    assert net.shape[1] == ceil((side - k) / stride) + 1


@pytest.mark.parametrize("make", [lambda: reference("bert"), lambda: builtin("BERT-base", None)])
def test_unknown_model_is_rejected(make: Callable[[], Workload]) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        make()


def test_script_like_a_reference_is_planned_as_the_reference() -> None:
    request = Request(job="j", global_batch=8, total_steps=1, like="BERT-base", optimizer="AdamW", sample_nbytes=99)
    workload = workload_of(request)
    assert (workload.layers, workload.sample_nbytes) == (reference("BERT-base").layers, 99)
    assert workload.optimizer_slots == 2
    assert workload_of(replace(request, sample_nbytes=None)).sample_nbytes == WIKIPEDIA.sample_nbytes


def test_api_lists_the_references_separately_from_built_in_models() -> None:
    assert [member.value for member in ReferenceModel] == list(REFERENCES)
    assert not {name.lower() for name in REFERENCES} & set(BUILTIN_MODELS)


def test_operations_grow_superlinearly_with_the_context() -> None:
    short, long = (products(gpt2(replace(OPENWEBTEXT, shape=(tokens,)))) for tokens in (512, 1024))
    assert 2 * short < long < 4 * short
