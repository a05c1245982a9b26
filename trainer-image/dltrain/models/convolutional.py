"""Small convolutional networks: one for 8 x 8 digits, and LeNet-5."""

from torch import nn


def _image(shape: tuple[int, ...], sides: str, fits: bool) -> None:
    if len(shape) != 3 or not fits:
        raise ValueError(f"images (channels, height, width) with {sides}")


def digits_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return three 3 x 3 convolutions (32, 64, 64 channels), two poolings and one linear layer.

    The network has 58,314 parameters for the dataset digits (8 x 8 images, 10 classes). It accepts images whose sides
    are multiples of 4.
    """
    _image(shape, "sides that are multiples of 4", all(side % 4 == 0 for side in shape[1:]))
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), classes),
    )


def lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return LeNet-5 (LeCun et al. 1998, figure 2), with ReLU and max pooling as in today's versions.

    The network accepts images of 32 x 32, or of 28 x 28, which the first convolution pads. It has 62,006 parameters for
    images of shape (3, 32, 32) and 10 classes.
    """
    _image(shape, "32 x 32 or 28 x 28 pixels", shape[1:] in ((32, 32), (28, 28)))
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=(32 - shape[1]) // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )
