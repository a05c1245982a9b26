"""Caffe's two nets for CIFAR-10, ``full`` and ``quick``, in PyTorch, and the archive of CIFAR-10.

The layers are those of Caffe's examples: three convolutions of 5 x 5 with 32, 32 and 64 channels, each with a pooling
of 3 x 3 at stride 2 (the first takes maxima, the others averages), then linear layers. ``full`` has a local response
normalization within channels after the first two poolings and one linear layer, ``quick`` has two linear layers and no
normalization. Weights start from normal distributions with Caffe's deviations, and biases from 0. Biases have twice the
learning rate of weights, and images are centred by the mean image of the training part, as in Caffe.

Differences from Caffe: averages at the border divide by the pixels inside the image only, and PyTorch draws other
random numbers, for weights and for the order of images. The net is written from its published description; no code of
Caffe was used, and nothing was compared with a run of Caffe.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
"""Checksum of the archive cifar-10-binary.tar.gz of the data set's authors."""
_PIXELS = 3 * 32 * 32


class WithinChannelNorm(nn.Module):
    """Local response normalization within channels: x / (1 + alpha mean of x² over 3 x 3 pixels)^beta."""

    def __init__(self, alpha: float = 5e-5, beta: float = 0.75) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x / (1 + self.alpha * avg_pool2d(x * x, 3, 1, padding=1)) ** self.beta
        return result


class Centred(nn.Module):
    """Images from 0 to 1 as Caffe sees them: from 0 to 255, minus the mean image of the training part."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        return 255 * (x - self.mean)


def caffe_net(name: str, mean: Tensor, classes: int) -> nn.Sequential:
    """Return the net ``full`` or ``quick`` for images with the shape of ``mean``, their mean, as (channels, h, w).

    Raise ValueError for another name.
    """
    if name not in ("full", "quick"):
        raise ValueError(f"net: found {name!r}; expected full or quick")
    full = name == "full"
    widths = (mean.shape[0], 32, 32, 64)
    layers: list[nn.Module] = [Centred(mean)]
    for i in range(3):
        layers.append(_started(nn.Conv2d(widths[i], widths[i + 1], 5, padding=2), (1e-4, 1e-2, 1e-2)[i]))
        average = nn.AvgPool2d(3, 2, ceil_mode=True, count_include_pad=False)
        pooling: nn.Module = nn.MaxPool2d(3, 2, ceil_mode=True) if i == 0 else average
        layers += [pooling, nn.ReLU()] if i == 0 else [nn.ReLU(), pooling]
        if full and i < 2:
            layers.append(WithinChannelNorm())
    side = mean.shape[1]
    for _ in range(3):
        side = -(-max(0, side - 3) // 2) + 1
    features = 64 * side * side
    layers.append(nn.Flatten())
    if full:
        layers.append(_started(nn.Linear(features, classes), 1e-2))
    else:
        layers += [_started(nn.Linear(features, 64), 0.1), _started(nn.Linear(64, classes), 0.1)]
    return nn.Sequential(*layers)


def _started(layer: Any, deviation: float) -> Any:
    nn.init.normal_(layer.weight, std=deviation)
    nn.init.zeros_(layer.bias)
    return layer


def groups(net: nn.Module, rate: float, full: bool) -> list[dict[str, Any]]:
    """Return parameter groups with Caffe's learning rates and weight decays: the bias learns twice as fast.

    In ``full``, the linear layer's weight has 250 times the decay and its bias none.
    """
    result = []
    for module in net:  # type: ignore[attr-defined]
        linear = full and isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters():
            bias = name == "bias"
            decay = 0.004 * ((0 if bias else 250) if linear else 1)
            own = rate if linear and bias else (2 * rate if bias else rate)
            result.append({"params": [parameter], "lr": own, "weight_decay": decay, "factor": own / rate})
    return result


def read_cifar10(archive: Path) -> dict[str, NDArray[np.generic]]:
    """Return the arrays x, y, x_test and y_test of CIFAR-10's binary archive. Images are bytes of (3, 32, 32).

    Raise ValueError if a file is missing or has another size.
    """
    wanted = {f"data_batch_{i}.bin": "train" for i in range(1, 6)} | {"test_batch.bin": "test"}
    parts: dict[str, list[NDArray[np.uint8]]] = {"train": [], "test": []}
    with tarfile.open(archive) as tar:
        for name, data in _files(tar):
            if (kind := wanted.pop(name, None)) is None:
                continue
            if not data or len(data) % (1 + _PIXELS):
                raise ValueError(f"{name}: found {len(data)} bytes; expected a multiple of {1 + _PIXELS}")
            parts[kind].append(np.frombuffer(data, np.uint8).reshape(-1, 1 + _PIXELS))
    if wanted:
        raise ValueError(f"{archive}: found no {', '.join(sorted(wanted))}; expected CIFAR-10's binary archive")
    train, test = (np.concatenate(parts[kind]) for kind in ("train", "test"))
    return {
        "x": train[:, 1:].reshape(-1, 3, 32, 32), "y": train[:, 0].astype(np.int64),
        "x_test": test[:, 1:].reshape(-1, 3, 32, 32), "y_test": test[:, 0].astype(np.int64),
    }  # fmt: skip


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        if member.isfile() and (file := tar.extractfile(member)) is not None:
            yield Path(member.name).name, file.read()


def mean_image(x: Tensor) -> Tensor:
    """Return the mean of images (samples, channels, h, w), which must not be empty."""
    return torch.mean(x, 0)
