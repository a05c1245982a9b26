"""Residual networks (He, Zhang, Ren and Sun 2015, tables 1 and 6), with GroupNorm instead of BatchNorm."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.nn.functional import relu

_GROUPS = 32
_SMALL_SIDE = 64
"""For images with shorter sides (in pixels), the first layer is that of He et al. for CIFAR: 3 x 3, without pooling.

With the layer for large images, small images would shrink to 1 x 1.
"""


class _Block(Protocol):
    """A class of residual blocks. Calling it with input channels, inner channels and stride returns a block.

    ``expansion``: number of output channels divided by number of inner channels.
    """

    expansion: int

    def __call__(self, inputs: int, width: int, stride: int) -> nn.Module: ...


class Residual(nn.Module):
    """A residual block: relu(body(x) + shortcut(x)).

    The shortcut is the identity, or a 1 x 1 convolution if the shape changes (option B of He et al. 2015).
    """

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return relu(y + self.shortcut(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.GroupNorm(_GROUPS, outputs)


class Basic(Residual):
    """A residual block of two 3 x 3 convolutions (He et al. 2015, figure 5, left)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        body = nn.Sequential(*_convolution(inputs, width, 3, stride), nn.ReLU(), *_convolution(width, width, 3))
        super().__init__(body, inputs, width, stride)


class Bottleneck(Residual):
    """A residual block of 1 x 1, 3 x 3 and 1 x 1 convolutions (He et al. 2015, figure 5, right).

    The 3 x 3 convolution applies the stride.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        body = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, 4 * width, 1),
        )
        super().__init__(body, inputs, 4 * width, stride)


def _resnet(block: _Block, depths: Sequence[int], shape: tuple[int, ...], classes: int) -> nn.Module:
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise ValueError("images of shape (channels, height, width) with sides of at least 8")
    small = min(shape[1:]) < _SMALL_SIDE
    layers: list[nn.Module] = [*_convolution(shape[0], 64, 3 if small else 7, 1 if small else 2), nn.ReLU()]
    if not small:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    channels = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            width = 64 * 2**stage
            layers.append(block(channels, width, 2 if stage and not index else 1))
            channels = width * block.expansion
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a ResNet-18. It has 11,689,512 parameters for images of shape (3, 224, 224) and 1000 classes."""
    return _resnet(Basic, (2, 2, 2, 2), shape, classes)


def resnet50(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a ResNet-50. It has 25,557,032 parameters for images of shape (3, 224, 224) and 1000 classes."""
    return _resnet(Bottleneck, (3, 4, 6, 3), shape, classes)
