"""Prepare a model's BatchNorm layers for training on several ranks."""

import warnings
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltrain.elastic.team import Team
from dltrain.parallel.batch_norm import Ranks, local_layers, synchronized, unsynchronized
from dltrain.train.steps.step import Step

Model = TypeVar("Model", bound=nn.Module)


def warn_of_batch_norm(model: nn.Module, micro_batches: int, rank: int) -> None:
    """Warn if ``model`` has BatchNorm layers, synchronized or not, and steps have several ``micro_batches``.

    Their statistics are then those of a micro-batch. ``rank``: this rank's number. Only rank 0 warns.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if layers and micro_batches > 1 and rank == 0:
        warnings.warn(
            f"t.steps: model: found {len(layers)} BatchNorm layers ({layers[0]}, …) with {micro_batches} micro-batches "
            "per step; expected none, because these layers use the statistics of one micro-batch, so results differ "
            "from those of whole batches. Use GroupNorm or LayerNorm, or set spec.parallelism.gradientAccumulation to "
            "Never",
            stacklevel=3,
        )


def with_batch_norm(model: Model, team: Team, step: Step, *, synchronize: bool) -> Model:
    """Return the model with BatchNorm layers that compute their statistics over all ranks, if ``synchronize`` is true.

    Otherwise, return the model unchanged and warn about its BatchNorm layers. A model without such layers, or with a
    single worker, is always returned unchanged.
    """
    if team.workers == 1 or not (layers := local_layers(model)):
        return model
    if not synchronize:
        if team.rank == 0:
            warnings.warn(unsynchronized(layers), stacklevel=3)
        return model
    # If a rank were lost during a forward pass, the others would stop inside this pass. A step cannot be repeated from
    # there, so the process group must not shrink.
    team.elastic.active = False
    counts, weight = lambda: step.weight_by_samples > 0, lambda: step.weight
    # The lambda reads ``team.worker_group`` at each call, because this attribute changes when ranks are lost.
    return synchronized(model, Ranks(lambda of: team.worker_group.sum(of), counts, weight))
