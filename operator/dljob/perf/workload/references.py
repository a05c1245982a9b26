"""Layer tables of models from the literature, as workloads for predictions and comparisons.

The trainer image does not contain these models, so ``spec.model.name`` cannot name them. Their parameter counts equal
those of published networks: torchvision's for images and Hugging Face's for text. In torchvision, AlexNet is that of
Krizhevsky 2014, and GoogLeNet has batch norms, and 3 x 3 filters where the paper has 5 x 5. Our GoogLeNet omits the
auxiliary classifiers. A batch norm has as many parameters as GroupNorm.
"""

from collections.abc import Callable

from dljob.perf.workload.datasets import Dataset
from dljob.perf.workload.layers import Net
from dljob.perf.workload.models import add_block, basic_blocks, bottlenecks, decoder

IMAGENET = Dataset(1_281_167, 50_000, (3, 224, 224), 1000, 3 * 224 * 224 * 4)
"""ILSVRC 2012 (Russakovsky et al. 2015) with cropped images, in the format in which the trainer holds samples."""
WIKIPEDIA = Dataset(4_882_812, 0, (512,), 30_522, 512 * 8)
"""BERT's 2,500 million words of Wikipedia in sequences of 512, one token per word; uncased WordPiece vocabulary."""
OPENWEBTEXT = Dataset(8_823_810, 4_330, (1024,), 50_257, 1024 * 8)
"""OpenWebText (Gokaslan and Cohen 2019) in sequences of 1024 tokens of GPT-2's vocabulary: 9,035,582,198 tokens, and
4,434,897 held out."""
LLAMA_2_TEXT = Dataset(488_281_250, 0, (4096,), 32_000, 4096 * 8)
"""The 2.0 trillion tokens of Llama 2 (Touvron et al. 2023, arXiv 2307.09288, table 1) in sequences of its context."""
LLAMA_3_TEXT = Dataset(1_904_296_875, 0, (8192,), 128_256, 8192 * 8)
"""The 15.6 trillion tokens of Llama 3 (Dubey et al. 2024, arXiv 2407.21783) in sequences of 8192, its first context."""


def alexnet(data: Dataset) -> Net:
    """Return AlexNet (Krizhevsky 2014, arXiv 1404.5997)."""
    net = Net(*data.shape).conv(64, 11, 4, 2).relu().pool(3, 2).conv(192, 5).relu().pool(3, 2)
    net.conv(384, 3).relu().conv(256, 3).relu().conv(256, 3).relu().pool(3, 2)
    net.flatten().dropout().linear(4096).relu().dropout().linear(4096).relu()
    return net.linear(data.classes)


def vgg16(data: Dataset) -> Net:
    """Return VGG-16 (Simonyan and Zisserman 2014, table 1, column D)."""
    net = Net(*data.shape)
    for filters, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            net.conv(filters, 3).relu()
        net.pool(2)
    net.flatten().linear(4096).relu().dropout().linear(4096).relu().dropout()
    return net.linear(data.classes)


def _unit(net: Net, filters: int, k: int, stride: int = 1) -> Net:
    return net.conv(filters, k, stride, bias=False).batch_norm().relu()


def _inception(net: Net, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> None:
    """Add an Inception module: four branches of convolutions, and the concatenation of their outputs.

    ``one``: number of filters of the first branch, a 1 x 1 convolution. ``three``: numbers of filters of the second
    branch, a 1 x 1 and then a 3 x 3 convolution. ``five``: the same for the third branch, whose last convolution is
    3 x 3 here but 5 x 5 in the paper. ``pooled``: number of filters of the fourth branch, a max pool and then a 1 x 1
    convolution.
    """
    start = net.at
    ends = [_unit(net, one, 1).at]
    for reduced, filters in (three, five):
        net.go(start)
        ends.append(_unit(_unit(net, reduced, 1), filters, 3).at)
    ends.append(_unit(net.go(start).pool(3, 1, 1), pooled, 1).at)
    net.concat(*ends)


def googlenet(data: Dataset) -> Net:
    """Return Inception v1 (Szegedy et al. 2014, table 1)."""
    net = _unit(Net(*data.shape), 64, 7, 2).pool(3, 2, ceil=True)
    _unit(_unit(net, 64, 1), 192, 3).pool(3, 2, ceil=True)
    _inception(net, 64, (96, 128), (16, 32), 32)
    _inception(net, 128, (128, 192), (32, 96), 64)
    net.pool(3, 2, ceil=True)
    _inception(net, 192, (96, 208), (16, 48), 64)
    _inception(net, 160, (112, 224), (24, 64), 64)
    _inception(net, 128, (128, 256), (24, 64), 64)
    _inception(net, 112, (144, 288), (32, 64), 64)
    _inception(net, 256, (160, 320), (32, 128), 128)
    net.pool(2, 2, ceil=True)
    _inception(net, 256, (160, 320), (32, 128), 128)
    _inception(net, 384, (192, 384), (48, 128), 128)
    return net.global_pool().dropout().linear(data.classes)


def resnet(blocks: Callable[..., Net], *depths: int) -> Callable[[Dataset], Net]:
    """Return the function that builds a ResNet with batch norms (He et al. 2015, table 1).

    ``blocks``: ``basic_blocks`` or ``bottlenecks``. ``depths``: numbers of blocks with 64, 128, 256, 512 filters.
    """
    return lambda data: blocks(data, *depths, norm=Net.batch_norm)


def vit(width: int, blocks: int, heads: int, side: int = 16) -> Callable[[Dataset], Net]:
    """Return the function that builds a vision transformer (Dosovitskiy et al. 2020, table 1).

    ``side``: pixels on each side of the patches that become tokens.
    """

    def build(data: Dataset) -> Net:
        net = Net(*data.shape).conv(width, side, side, pad=0).image_tokens()
        for _ in range(blocks):
            add_block(net, heads)
        return net.layer_norm().first_token().linear(data.classes)

    return build


def bert(width: int, blocks: int, heads: int) -> Callable[[Dataset], Net]:
    """Return the function that builds a BERT (Devlin et al. 2018): post-norm, with pooler, without a head."""

    def build(data: Dataset) -> Net:
        net = Net(*data.shape).embedding(data.classes, width, positions=512, types=2).layer_norm().dropout()
        for _ in range(blocks):
            with net.block():
                net.projections(width).attention(heads).linear(width).dropout().add().layer_norm()
                net.linear(4 * width).gelu().linear(width).dropout().add().layer_norm()
        return net.first_token().linear(width).tanh()

    return build


bert_base = bert(768, 12, 12)


def llama(
    width: int, blocks: int, heads: int, hidden: int, shared_heads: int | None = None, tied: bool = False
) -> Callable[[Dataset], Net]:
    """Return the function that builds a Llama (Touvron et al. 2023): RMSNorm, rotary positions, gated linear units.

    ``hidden``: features between the linear layers of a feed-forward network. ``shared_heads``: number of heads of keys
    and values; None: that of queries. ``tied``: True if the output layer has the weights of the embedding.
    """
    shared = None if shared_heads is None else shared_heads * width // heads

    def build(data: Dataset) -> Net:
        net = Net(*data.shape).embedding(data.classes, width, positions=0)
        for _ in range(blocks):
            with net.block():
                net.rms_norm().projections(width, shared, bias=False, rotary=True).attention(heads)
                net.linear(width, bias=False).add().rms_norm()
                start = net.at
                gate = net.linear(hidden, bias=False).silu().at
                net.go(start).linear(hidden, bias=False).multiply(gate).linear(width, bias=False).add()
        with net.as_one():
            return net.rms_norm().linear(data.classes, bias=False, tied=tied)

    return build


def gpt2(data: Dataset) -> Net:
    return decoder(data, width=768, blocks=12, heads=12)


def gpt2_medium(data: Dataset) -> Net:
    return decoder(data, width=1024, blocks=24, heads=16)


def gpt2_large(data: Dataset) -> Net:
    return decoder(data, width=1280, blocks=36, heads=20)


def gpt2_xl(data: Dataset) -> Net:
    return decoder(data, width=1600, blocks=48, heads=25)


REFERENCES: dict[str, tuple[Callable[[Dataset], Net], Dataset]] = {
    "AlexNet": (alexnet, IMAGENET),
    "VGG-16": (vgg16, IMAGENET),
    "GoogLeNet": (googlenet, IMAGENET),
    "ResNet-18": (resnet(basic_blocks, 2, 2, 2, 2), IMAGENET),
    "ResNet-34": (resnet(basic_blocks, 3, 4, 6, 3), IMAGENET),
    "ResNet-50": (resnet(bottlenecks, 3, 4, 6, 3), IMAGENET),
    "ResNet-101": (resnet(bottlenecks, 3, 4, 23, 3), IMAGENET),
    "ResNet-152": (resnet(bottlenecks, 3, 8, 36, 3), IMAGENET),
    "ViT-B-16": (vit(768, 12, 12), IMAGENET),
    "ViT-L-16": (vit(1024, 24, 16), IMAGENET),
    "BERT-base": (bert_base, WIKIPEDIA),
    "BERT-large": (bert(1024, 24, 16), WIKIPEDIA),
    "GPT-2": (gpt2, OPENWEBTEXT),
    "GPT-2-medium": (gpt2_medium, OPENWEBTEXT),
    "GPT-2-large": (gpt2_large, OPENWEBTEXT),
    "GPT-2-XL": (gpt2_xl, OPENWEBTEXT),
    "Llama-2-7B": (llama(4096, 32, 32, 11_008), LLAMA_2_TEXT),
    "Llama-2-13B": (llama(5120, 40, 40, 13_824), LLAMA_2_TEXT),
    "Llama-2-70B": (llama(8192, 80, 64, 28_672, 8), LLAMA_2_TEXT),
    "Llama-3.2-1B": (llama(2048, 16, 32, 8192, 8, tied=True), LLAMA_3_TEXT),
    "Llama-3-8B": (llama(4096, 32, 32, 14_336, 8), LLAMA_3_TEXT),
    "Llama-3-70B": (llama(8192, 80, 64, 28_672, 8), LLAMA_3_TEXT),
}
"""Model name -> (function that builds its layer table, dataset of the published model)."""
