"""Gradient layouts of three networks as Caffe trains them: the number of elements of each learnable tensor, in order.

AlexNet is Caffe's ``bvlc_alexnet`` (Krizhevsky et al. 2012, with groups): 60.97 million parameters in 16 tensors.
GoogLeNet is ``bvlc_googlenet`` (Szegedy et al. 2014, table 1, with both auxiliary heads): 128 tensors. ResNet-50 (He et
al. 2015) has 161 tensors: a filter, a scale and a shift for each of 53 convolutions, and two of the last layer.
"""

from collections.abc import Mapping


def _conv(to: int, of: int, k: int) -> list[int]:
    """Return a convolution with k x k filters and biases."""
    return [to * of * k * k, to]


def alexnet() -> list[int]:
    convolutions = ((96, 3, 11), (256, 48, 5), (384, 256, 3), (384, 192, 3), (256, 192, 3))
    tensors = [size for to, of, k in convolutions for size in _conv(to, of, k)]
    return tensors + [size for to, of in ((4096, 9216), (4096, 4096), (1000, 4096)) for size in _conv(to, of, 1)]


_INCEPTION = (  # of, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection
    (192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64), (480, 192, 96, 208, 16, 48, 64),
    (512, 160, 112, 224, 24, 64, 64), (512, 128, 128, 256, 24, 64, 64), (512, 112, 144, 288, 32, 64, 64),
    (528, 256, 160, 320, 32, 128, 128), (832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128),
)  # fmt: skip


def googlenet() -> list[int]:
    tensors = _conv(64, 3, 7) + _conv(64, 64, 1) + _conv(192, 64, 3)
    for index, (of, one, reduce3, three, reduce5, five, pool) in enumerate(_INCEPTION):
        if index in (3, 6):  # an auxiliary head after modules 4a and 4d
            tensors += _conv(128, of, 1) + _conv(1024, 2048, 1) + _conv(1000, 1024, 1)
        tensors += _conv(one, of, 1) + _conv(reduce3, of, 1) + _conv(three, reduce3, 3)
        tensors += _conv(reduce5, of, 1) + _conv(five, reduce5, 5) + _conv(pool, of, 1)
    return tensors + _conv(1000, 1024, 1)


def resnet50() -> list[int]:
    def unit(to: int, of: int, k: int) -> list[int]:
        return [to * of * k * k, to, to]

    tensors, of = unit(64, 3, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            tensors += unit(width, of, 1) + unit(width, width, 3) + unit(4 * width, width, 1)
            if not block:
                tensors += unit(4 * width, of, 1)
            of = 4 * width
    return tensors + _conv(1000, of, 1)


LAYOUTS: Mapping[str, tuple[int, ...]] = {
    "AlexNet": tuple(alexnet()), "GoogLeNet": tuple(googlenet()), "ResNet-50": tuple(resnet50()),
}  # fmt: skip
