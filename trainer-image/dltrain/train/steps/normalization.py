"""Prepare a model's BatchNorm layers for training on several ranks."""

import warnings
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltrain.elastic.team import Team
from dltrain.parallel.batch_norm import Ranks, local_layers, synchronized, torch_layers, unsynchronized
from dltrain.protocol.errors import MisuseError
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


def check_no_layers_of_torch(model: nn.Module) -> None:
    """Raise MisuseError if the script has converted the layers of ``model`` to torch's SyncBatchNorm after ``wrap``."""
    if layers := list(torch_layers(model)):
        raise MisuseError(
            f"t.steps: model: found layers of torch.nn.SyncBatchNorm ({layers[0]}, …), made after t.wrap; "
            "expected them before it, because torch's own layers ignore the ranks' different batch sizes. Call "
            "convert_sync_batchnorm before t.wrap, or pass sync_batch_norm=True to t.wrap instead"
        )


def with_batch_norm(model: Model, team: Team, step: Step, *, synchronize: bool) -> Model:
    """Return the model with BatchNorm layers that compute their statistics over all ranks, if ``synchronize`` is true.

    Layers of torch.nn.SyncBatchNorm do so in any case: dltrain's own ones replace them. Warn about other BatchNorm
    layers that are left as they are, unless there is a single worker. Raise MisuseError for a layer of torch with a
    process group.
    """
    of_torch, others = torch_layers(model), local_layers(model)
    if grouped := [name for name, layer in of_torch.items() if layer.process_group is not None]:
        raise MisuseError(
            f"t.wrap: model: found a torch.nn.SyncBatchNorm with a process group ({grouped[0]}); expected one over all "
            "ranks. Call convert_sync_batchnorm without process_group"
        )
    if others and not synchronize and team.workers > 1 and team.rank == 0:
        warnings.warn(unsynchronized(others), stacklevel=3)
    if not of_torch and (not synchronize or not others or team.workers == 1):
        return model
    # If a rank were lost during a forward pass, the others would stop inside this pass. A step cannot be repeated from
    # there, so the process group must not shrink.
    team.elastic.active = False
    counts, weight = lambda: step.weight_by_samples > 0, lambda: step.weight
    # The lambda reads ``team.worker_group`` at each call, because this attribute changes when ranks are lost.
    ranks = Ranks(lambda of: team.worker_group.sum(of), counts, weight)
    return synchronized(model, ranks) if synchronize else synchronized(model, ranks, nn.SyncBatchNorm)
