"""Which parts of the batch, the model and the optimizer a rank holds: here all of the model, and its part of the batch.

Strategies that divide more override what they divide.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dltrain.batch.sampling import Part, Sampler


class Placement:
    """Of one rank; checkpoints, comparisons and evaluations ask it for what is whole."""

    in_parts = False
    """Whether a rank gets the sum of its own part of the gradient only, so that ``p.grad`` is of no use to a script."""

    def part(self, sampler: Sampler, step: int, shares: Sequence[int], rank: int) -> Part:
        """What of a step's batch ``rank`` sees when ranks hold ``shares``."""
        return sampler.part(step, shares, rank)

    def predict(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The model's outputs; None on a rank that has not got them."""
        outputs: torch.Tensor = model(x)
        return outputs

    def stands_in(self, parameter: nn.Parameter) -> bool:
        """Whether it is in an optimizer in the place of a part of the model's."""
        return False

    def replicated(self, model: nn.Module) -> list[torch.Tensor]:
        """The parameters that must be equal on all ranks."""
        return list(model.parameters())

    def shape_of(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Names, shapes and dtypes of the whole model's tensors."""
        return model.state_dict()

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole model's tensors, at least on rank 0; all ranks call it together."""
        return model.state_dict()

    def load_weights(self, model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
        """Take from the whole model's tensors what this rank holds."""
        model.load_state_dict(whole)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole ``optimizer.state_dict()``; all ranks call it together."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, whole: dict[str, Any]) -> None:
        """Take from a whole state what this rank holds, in the parameters' order of elements, which files lose."""
        optimizer.load_state_dict(whole)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)

    def on_any(self, found: bool) -> bool:
        """Whether something was found in any part of the gradient. Here every rank has looked at all of it."""
        return found

    def spread(self) -> None:
        """After the update: give every rank what it lacks of it. Here each has updated everything itself."""
