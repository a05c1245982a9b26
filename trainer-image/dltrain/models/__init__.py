"""Built-in models in plain PyTorch, written from the papers.

The models use GroupNorm (Wu and He 2018) instead of BatchNorm. Statistics of GroupNorm cover only one sample, so the
gradient of the global batch does not depend on how the batch is split over ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from dltrain.models.convolutional import digits_cnn, lenet
from dltrain.models.gpt import Block, gpt_mini
from dltrain.models.mlp import mlp
from dltrain.models.resnet import Residual, resnet18, resnet50
from dltrain.protocol.errors import BadInputError


@dataclass(frozen=True)
class InputShape:
    """Input of a model: the ``shape`` of one sample, and the number of ``classes``.

    If ``tokens`` is true, samples are sequences of tokens, and ``classes`` is the size of the vocabulary.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: bool = False


Build = Callable[[tuple[int, ...], int], nn.Module]
"""A function that creates a model for (shape of one sample, number of classes). The model returns logits.

The function raises ValueError if the model does not support the shape.
"""

_MODELS: dict[str, tuple[Build, bool]] = {
    "mlp": (mlp, False),
    "digits-cnn": (digits_cnn, False),
    "lenet": (lenet, False),
    "resnet18": (resnet18, False),
    "resnet50": (resnet50, False),
    "gpt-mini": (gpt_mini, True),
}
NAMES = tuple(_MODELS)


def build(name: str, data: InputShape) -> nn.Module:
    """Return a new model for the data. Raise BadInputError if there is no such model or it does not suit the data.

    torch's global random generator determines the initial weights, so seed this generator first.
    """
    if name not in _MODELS:
        raise BadInputError("spec.model.name", f"'{name}'", f"one of {', '.join(NAMES)}", "choose a built-in model")
    make, takes_tokens = _MODELS[name]
    if takes_tokens != data.tokens:
        found, expected = ("tokens", "images or tables") if data.tokens else ("images or tables", "tokens")
        raise BadInputError(
            "spec.dataset.name",
            f"{found} of shape {data.shape}",
            f"{expected} for model {name}",
            "choose another dataset or model",
        )
    try:
        return make(data.shape, data.classes)
    except ValueError as error:
        raise BadInputError(
            "spec.dataset.name", f"samples of shape {data.shape}", str(error), "choose another dataset or model"
        ) from None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a built-in model, for activation checkpointing: residual blocks or transformer layers."""
    return [module for module in model.modules() if isinstance(module, Residual | Block)]
