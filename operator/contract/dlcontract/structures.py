"""Random networks that the hardware probe trains for the structure regression (``dljob probe --structures N``).

The sequence of networks is fixed (``dlcontract.hardware.SEQUENCE``), so the probe's document names a network by its
position alone. CNNs vary convolution layers, filters, dense layers, nodes of a dense layer, image size and batch size.
Transformers vary blocks, width, heads, tokens, vocabulary and batch size.
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from random import Random

from dlcontract.hardware import LayerSizes, ReferenceNet

MIN_STRUCTURES = 24
"""Minimum number of networks for a regression. Fewer cannot tell its terms apart."""
MAX_FLOPS = 12e9
"""Maximum operations of a training step: about a quarter of a second on one core, so that a probe stays short."""
MAX_NBYTES = 384 * 2**20
"""Maximum bytes of training state and all layers' outputs, so that a step fits into the memory of the probe's pod."""
CLASSES = 10
TRANSFORMER_EVERY = 3
"""One of so many networks is a transformer."""
RANKS_EVERY, MAX_ON_RANKS = 5, 8
"""One of so many networks is also measured on several ranks, and the maximum number of those."""
MAX_RANK_NBYTES = 64 * 2**20
"""Maximum bytes (``cost``) of a network that is measured on several ranks, so that several fit into the probe's pod."""
_SEED = 15


@cache
def structures(count: int) -> tuple[ReferenceNet, ...]:
    """Return the first ``count`` networks of the sequence. Each has one batch size, and no two are equal.

    Only ``Random.random`` draws, whose sequence for a seed is the same in all versions of Python.
    """
    draw, found = Random(_SEED), dict[ReferenceNet, None]()
    while len(found) < count:
        net = _transformer(draw) if len(found) % TRANSFORMER_EVERY == TRANSFORMER_EVERY - 1 else _cnn(draw)
        flops, nbytes = cost(net)
        if flops <= MAX_FLOPS and nbytes <= MAX_NBYTES:
            found[net] = None
    return tuple(found)


def on_ranks(count: int) -> tuple[int, ...]:
    """Return the positions of those of the first ``count`` networks that are also measured on several ranks."""
    nets = structures(count)
    small = [i for i in range(0, count, RANKS_EVERY) if cost(nets[i])[1] <= MAX_RANK_NBYTES]
    return tuple(small[:MAX_ON_RANKS])


def _one_of(draw: Random, values: Sequence[int]) -> int:
    return values[int(draw.random() * len(values))]


def _cnn(draw: Random) -> ReferenceNet:
    """Draw a CNN: 3 x 3 convolutions with a ReLU each, then dense layers and an output layer.

    After every second convolution the network pools while at least 8 pixels are left. The number of filters doubles
    there, up to four times the initial number.
    """
    side = pixels = _one_of(draw, (8, 12, 16, 24, 32, 48, 64))
    width = filters = 2 ** _one_of(draw, range(2, 8))
    layers = list[LayerSizes]()
    for i in range(_one_of(draw, range(1, 9))):
        layers += [("conv", width), ("relu",)]
        if i % 2 == 1 and side >= 8:
            layers.append(("pool",))
            side, width = side // 2, min(2 * width, 4 * filters)
    layers.append(("flatten",))
    nodes = 2 ** _one_of(draw, range(4, 11))
    for _ in range(_one_of(draw, range(1, 4))):
        layers += [("linear", nodes), ("relu",)]
    layers.append(("linear", CLASSES))
    return ReferenceNet((3, pixels, pixels), tuple(layers), (2 ** _one_of(draw, range(1, 9)),), ())


def _transformer(draw: Random) -> ReferenceNet:
    """Draw a decoder: embeddings of tokens and positions, blocks with pre-norm, a norm and an output layer."""
    heads = 2 ** _one_of(draw, range(1, 4))
    width = heads * _one_of(draw, (16, 32, 64))
    vocabulary = 2 ** _one_of(draw, range(6, 12))
    blocks: list[LayerSizes] = [("block", heads)] * _one_of(draw, range(1, 7))
    tokens = 2 ** _one_of(draw, range(4, 9))
    layers: tuple[LayerSizes, ...] = (
        ("embedding", vocabulary, width), *blocks, ("layer_norm",), ("linear", vocabulary),
    )  # fmt: skip
    return ReferenceNet((tokens,), layers, (2 ** _one_of(draw, range(6)),), ())


def cost(net: ReferenceNet) -> tuple[float, float]:
    """Return (floating-point operations, bytes of training state and all layers' outputs) of a step, roughly.

    They bound the networks that are drawn. Predictions use the operator's layer tables instead.
    """
    shape, flops, elements, parameters = net.shape, 0.0, 0.0, 0.0
    for name, *sizes in net.layers:
        if name == "conv":
            flops += 2.0 * 9 * shape[0] * sizes[0] * shape[1] * shape[2]
            parameters += 9 * shape[0] * sizes[0]
            shape = (sizes[0], *shape[1:])
        elif name == "pool":
            shape = (shape[0], shape[1] // 2, shape[2] // 2)
        elif name == "flatten":
            shape = (prod(shape),)
        elif name == "linear":
            flops += 2.0 * prod(shape) * sizes[0]
            parameters += shape[-1] * sizes[0]
            shape = (*shape[:-1], sizes[0])
        elif name == "embedding":
            shape = (*shape, sizes[1])
            parameters += sizes[0] * sizes[1]
        elif name == "block":
            tokens, width = shape
            flops += 2.0 * tokens * width * (12 * width + 2 * tokens)
            elements += 16.0 * prod(shape)
            parameters += 12 * width**2
        elements += prod(shape)
    return 3 * flops * net.batches[0], 4 * (elements * net.batches[0] + 3 * parameters)
