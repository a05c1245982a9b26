"""Prepare a model's BatchNorm layers for training on several ranks."""

import warnings
from typing import TypeVar

from torch import nn

from dltrain.elastic.team import Team
from dltrain.parallel.batch_norm import Ranks, local_layers, synchronized, unsynchronized
from dltrain.train.step import Step

Model = TypeVar("Model", bound=nn.Module)


def with_batch_norm(model: Model, team: Team, step: Step, *, synchronize: bool) -> Model:
    """Synchronize the model's BatchNorm statistics over the ranks, or warn that they are not synchronized."""
    if team.workers == 1 or not (layers := local_layers(model)):
        return model
    if not synchronize:
        if team.rank == 0:
            warnings.warn(unsynchronized(layers), stacklevel=3)
        return model
    # A rank lost within forward would leave the others in the middle of it, where a step cannot be repeated.
    team.elastic.active = False
    counts, weight = lambda: step.weight_by_samples > 0, lambda: step.weight
    # ``team.worker_group`` is looked up at each call, because ranks change.
    return synchronized(model, Ranks(lambda of: team.worker_group.sum(of), counts, weight))
