"""Layer tables of the built-in models.

A trainer test compares parameter and operation counts with the models that the trainer builds.
"""

from collections.abc import Callable

from dljob.perf.workload.datasets import Dataset
from dljob.perf.workload.layers import Net


def mlp(data: Dataset) -> Net:
    return Net(*data.shape).flatten().linear(256).relu().linear(128).relu().linear(data.classes)


def digits_cnn(data: Dataset) -> Net:
    net = Net(*data.shape).conv(32, 3).relu().conv(64, 3).relu().pool(2).conv(64, 3).relu().pool(2)
    return net.flatten().linear(data.classes)


def lenet(data: Dataset) -> Net:
    net = Net(*data.shape).conv(6, 5, pad=(32 - data.shape[1]) // 2).relu().pool(2).conv(16, 5, pad=0).relu().pool(2)
    return net.flatten().linear(120).relu().linear(84).relu().linear(data.classes)


def _stem(data: Dataset, norm: Callable[[Net], Net] = Net.group_norm) -> Net:
    """Return a network with only the stem (first layers) of a residual network (He et al. 2015).

    For images of less than 64 pixels, it is the stem for CIFAR (3 x 3, no pool), otherwise the one for ImageNet.
    """
    net = Net(*data.shape)
    if data.shape[1] < 64:
        return norm(net.conv(64, 3, bias=False)).relu()
    return norm(net.conv(64, 7, 2, bias=False)).relu().pool(3, 2, 1)


def _shortcut(
    net: Net,
    start: tuple[tuple[int, ...], int],
    filters: int,
    stride: int,
    norm: Callable[[Net], Net] = Net.group_norm,
) -> None:
    """Add a block's shortcut from ``start`` (with a 1 x 1 convolution if the shape changes), the sum, and its ReLU."""
    end = net.at
    if start[0][0] != filters or stride != 1:
        norm(net.go(start).conv(filters, 1, stride, bias=False)).go(end)
    net.add().relu()


def basic_blocks(data: Dataset, *depths: int, norm: Callable[[Net], Net] = Net.group_norm) -> Net:
    """Return a residual network of blocks with two convolutions. The arguments are those of ``bottlenecks``."""
    net = _stem(data, norm)
    for stage, depth in enumerate(depths):
        filters = 64 * 2**stage
        for block in range(depth):
            stride, start = 2 if stage and not block else 1, net.at
            with net.block():
                norm(net.conv(filters, 3, stride, bias=False)).relu()
                norm(net.conv(filters, 3, bias=False))
                _shortcut(net, start, filters, stride, norm)
    return net.global_pool().linear(data.classes)


def resnet18(data: Dataset) -> Net:
    return basic_blocks(data, 2, 2, 2, 2)


def bottlenecks(data: Dataset, *depths: int, norm: Callable[[Net], Net] = Net.group_norm) -> Net:
    """Return a residual network of bottleneck blocks. ``depths``: numbers of blocks with 64, 128, 256, 512 filters.

    ``norm``: adds a norm to a network.
    """
    net = _stem(data, norm)
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for block in range(depth):
            stride, start = 2 if stage and not block else 1, net.at
            with net.block():
                norm(net.conv(width, 1, bias=False)).relu()
                norm(net.conv(width, 3, stride, bias=False)).relu()
                norm(net.conv(4 * width, 1, bias=False))
                _shortcut(net, start, 4 * width, stride, norm)
    return net.global_pool().linear(data.classes)


def resnet50(data: Dataset) -> Net:
    return bottlenecks(data, 3, 4, 6, 3)


def decoder(data: Dataset, width: int, blocks: int, heads: int) -> Net:
    """Return a decoder like GPT-2 (Radford et al. 2019), with pre-norm and output weights tied to token embeddings."""
    net = Net(*data.shape).embedding(data.classes, width)
    for _ in range(blocks):
        add_block(net, heads)
    with net.as_one():
        return net.layer_norm().linear(data.classes, bias=False, tied=True)


def add_block(net: Net, heads: int) -> None:
    """Add a transformer block with pre-norm, of the width of the current tensor, whose shape is (tokens, width)."""
    width = net.shape[1]
    with net.block():
        net.layer_norm().linear(3 * width).attention(heads).linear(width).add()
        net.layer_norm().linear(4 * width).gelu().linear(width).add()


def gpt_mini(data: Dataset) -> Net:
    return decoder(data, width=128, blocks=4, heads=4)


MODELS: dict[str, tuple[Callable[[Dataset], Net], str]] = {
    "mlp": (mlp, "digits"),
    "digits-cnn": (digits_cnn, "digits"),
    "lenet": (lenet, "synthetic-images"),
    "resnet18": (resnet18, "synthetic-images"),
    "resnet50": (resnet50, "synthetic-images"),
    "gpt-mini": (gpt_mini, "synthetic-tokens"),
}
"""Model name -> (function that builds its layer table, dataset whose shapes are used if the job names no dataset)."""
