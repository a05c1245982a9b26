"""Tests of the performance model's layer tables against ``dltrain.profile`` of the same models in PyTorch."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.perf.workload.datasets import DATASETS, Dataset
from dljob.perf.workload.layers import PRODUCTS, Net
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.references import IMAGENET, OPENWEBTEXT, alexnet, bert_base, gpt2, llama, vgg16, vit

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dltrain.models import InputShape, build  # noqa: E402
from dltrain.models.pass_costs import Input  # noqa: E402
from dltrain.profile import profile  # noqa: E402


def assert_agreement(model: Any, net: Net, *inputs: Input, rel: float = 0.03) -> None:
    found = profile(model, inputs)
    assert found.parameters == sum(layer.parameters for layer in net.layers)
    counted = [layer for layer in net.layers if layer.kind in PRODUCTS]
    assert found.forward_FLOPs == pytest.approx(sum(layer.forward_FLOPs for layer in counted), rel=1e-6)
    # PyTorch counts the scores that fused attention computes again.
    assert found.backward_FLOPs == pytest.approx(sum(layer.backward_FLOPs for layer in counted), rel=rel)
    assert found.activation_nbytes == pytest.approx(4 * net.kept_elements, rel=rel)
    assert found.sample_nbytes == sum(i.nbytes for i in inputs)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("mlp", DATASETS["digits"]),
        ("lenet", DATASETS["synthetic-images"]),
        ("resnet18", DATASETS["synthetic-images"]),
        ("resnet18", IMAGENET),
        ("resnet50", IMAGENET),
        ("gpt-mini", DATASETS["synthetic-tokens"]),
    ],
)
def test_profile_of_built_in_models_matches_their_tables(name: str, data: Dataset) -> None:
    tokens = name == "gpt-mini"
    with torch.device("meta"):
        model = build(name, InputShape(data.shape, data.classes, tokens))
    assert_agreement(
        model, MODELS[name][0](data), Input(data.shape, torch.int64 if tokens else torch.float32), rel=0.05
    )


def _convolutional(*layers: tuple[int, int, int, int] | int) -> list[Any]:
    """Build layers from (filters, side, stride, padding) of a convolution or the side of a pool of stride 2."""
    made: list[Any] = []
    channels = 3
    for layer in layers:
        if isinstance(layer, int):
            made.append(nn.MaxPool2d(layer, 2))
        else:
            filters, *shape = layer
            made += [nn.Conv2d(channels, filters, *shape), nn.ReLU(inplace=True)]
            channels = filters
    return [*made, nn.Flatten()]


def test_profile_of_alexnet_matches_its_table() -> None:
    """Compare operations and parameters. Only GPUs store a dropout mask as one byte per element."""
    features = _convolutional((64, 11, 4, 2), 3, (192, 5, 1, 2), 3, (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1), 3)
    dense = [nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()]
    assert_agreement(nn.Sequential(*features, *dense, nn.Linear(4096, 1000)), alexnet(IMAGENET), Input((3, 224, 224)))


def test_profile_of_vgg16_matches_its_table() -> None:
    stages = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
    features = _convolutional(*(x for f, n in stages for x in [*[(f, 3, 1, 1)] * n, 2]))
    dense = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    with torch.device("meta"):
        assert_agreement(nn.Sequential(*features, *dense, nn.Linear(4096, 1000)), vgg16(IMAGENET), Input((3, 224, 224)))


def test_profile_of_gpt2_matches_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's decoder is built in the size of GPT-2."""
    import dltrain.models.gpt as decoder

    for name, value in (("LAYERS", 12), ("HEADS", 12), ("WIDTH", 768)):
        monkeypatch.setattr(decoder, name, value)
    with torch.device("meta"):
        model = decoder.GPT(1024, 50_257)
    assert_agreement(model, gpt2(OPENWEBTEXT), Input((1024,), torch.int64), rel=0.05)


class Encoder(nn.Module):
    """BERT-base in PyTorch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, 768) for rows in (30_522, 512, 2))
        self.norm, self.dropout = nn.LayerNorm(768), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        self.layers, self.pooler = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.Linear(768, 768)

    def forward(self, tokens: Any, types: Any) -> dict[str, Any]:
        words, positions, kinds = self.embeddings
        x = words(tokens) + positions(torch.arange(tokens.shape[1])) + kinds(types)
        return {"pooled": torch.tanh(self.pooler(self.layers(self.dropout(self.norm(x)))[:, 0])), "none": None}


def test_profile_of_bert_base_matches_its_table() -> None:
    """Compare parameters and forward operations. PyTorch's layer has one more dropout than BERT and copies heads."""
    found = profile(Encoder(), [Input((512,), torch.int64)] * 2)
    net = bert_base(replace(OPENWEBTEXT, shape=(512,), classes=30_522))
    assert found.parameters == sum(layer.parameters for layer in net.layers)
    forward = sum(layer.forward_FLOPs for layer in net.layers if layer.kind in PRODUCTS)
    assert found.forward_FLOPs == pytest.approx(forward, rel=1e-6)


class VisionTransformer(nn.Module):
    """A vision transformer as torchvision builds it, with blocks of the trainer's decoder without its mask."""

    def __init__(self, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.patches, self.heads = nn.Conv2d(3, width, 16, 16), heads
        self.first, self.positions = (nn.Parameter(torch.zeros(1, each, width)) for each in (1, 197))
        self.blocks = nn.ModuleList(
            nn.ModuleList((nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
                           nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)))
            for _ in range(blocks)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        for norm, given, out, second, up, down in self.blocks:
            q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in given(norm(x)).chunk(3, -1))
            x = x + out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + down(nn.functional.gelu(up(second(x))))
        return self.head(self.norm(x)[:, 0])


class Llama(nn.Module):
    """A Llama as Hugging Face's code computes it, with 4 heads of queries for each head of keys."""

    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def __init__(self, width: int, blocks: int, heads: int, hidden: int, shared: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.heads, self.shared = nn.Embedding(vocabulary, width), heads, shared
        keys = width // heads * shared
        self.blocks = nn.ModuleList(
            nn.ModuleList((
                self.Norm(width), *(nn.Linear(width, each, bias=False) for each in (width, keys, keys, width)),
                self.Norm(width), *(nn.Linear(width, hidden, bias=False) for _ in range(2)),
                nn.Linear(hidden, width, bias=False),
            ))
            for _ in range(blocks)
        )  # fmt: skip
        self.norm, self.head = self.Norm(width), nn.Linear(width, vocabulary, bias=False)

    def turned(self, x: Any) -> Any:
        angles = torch.outer(torch.arange(x.shape[2]), torch.arange(x.shape[3]))
        one, two = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for norm, query, key, value, out, second, gate, up, down in self.blocks:
            y = norm(x)
            q, k, v = (
                each(y).unflatten(-1, (-1, x.shape[2] // self.heads)).transpose(1, 2) for each in (query, key, value)
            )
            q, k = self.turned(q), self.turned(k)
            k, v = (each.repeat_interleave(self.heads // self.shared, 1) for each in (k, v))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(attended.transpose(1, 2).flatten(2))
            y = second(x)
            x = x + down(nn.functional.silu(gate(y)) * up(y))
        return self.head(self.norm(x))


def test_profile_of_a_vision_transformer_matches_its_table() -> None:
    with torch.device("meta"):
        model = VisionTransformer(768, 12, 12)
    assert_agreement(model, vit(768, 12, 12)(IMAGENET), Input((3, 224, 224)), rel=0.05)


def test_profile_of_a_llama_matches_its_table() -> None:
    data = replace(OPENWEBTEXT, shape=(512,), classes=32_000)
    with torch.device("meta"):
        model = Llama(1024, 8, 16, 2752, 4, data.classes)
    assert_agreement(model, llama(1024, 8, 16, 2752, 4)(data), Input(data.shape, torch.int64), rel=0.05)
