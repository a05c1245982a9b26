"""The parts of the batch, the model and the optimizer that each rank has.

By default, a rank has the whole model and optimizer, and a part of the batch. Some strategies override this.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dltrain.batch.sampling import Part, Sampler


class Placement:
    """Base class of parallelism strategies: it defines which part of the batch, model and optimizer a rank has.

    Its methods also assemble the whole model and the whole optimizer state for checkpoints.
    """

    sharded = False
    """True if a rank gets only its part of the reduced gradient. A script then cannot use ``p.grad``."""

    def part(self, sampler: Sampler, step: int, shares: Sequence[int], rank: int) -> Part:
        """Return the samples of a step's batch that ``rank`` processes. ``shares``: local batch size of each rank."""
        return sampler.part(step, shares, rank)

    def predict(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Return the model's outputs for ``x``, or None on a rank that does not compute the last layer."""
        outputs: torch.Tensor = model(x)
        return outputs

    def stands_in(self, parameter: nn.Parameter) -> bool:
        """Return True if ``parameter`` is an optimizer shard that stands in for a model parameter.

        A shard is the part of a model parameter that this rank updates. The base class has no shards.
        """
        return False

    def replicated(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the parameters that must be equal on all ranks."""
        return list(model.parameters())

    def shape_of(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return tensors with the same names, shapes and dtypes as the whole model's tensors.

        Only these properties count; the tensors may have no values. Checkpoints are compared with them before loading.
        """
        return model.state_dict()

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the whole model's tensors by name, at least on rank 0. All ranks must call this method together."""
        return model.state_dict()

    def load_weight(self, name: str, whole: torch.Tensor) -> bool:
        """Load this rank's part of ``whole``, the tensor ``name`` of the whole model.

        Return False, without loading anything, if ranks have the whole model; the caller then loads the tensor. Return
        True otherwise, also if this rank has no part of the tensor.
        """
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the ``state_dict()`` of an optimizer for the whole model, at least on rank 0.

        All ranks must call this method together.
        """
        return optimizer.state_dict()

    def optimizer_part(self, optimizer: Optimizer, index: int, key: str, whole: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a tensor of the optimizer's state; None if this rank has no part of it.

        ``whole``: the tensor from a checkpoint, for the whole parameter. ``index``: index of the parameter in an
        optimizer for the whole model. ``key``: name of the state, such as ``exp_avg`` of Adam.

        The part does not share memory with ``whole``. It has the parameter's device and memory format (such as
        channels_last), which checkpoint files do not contain.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if index >= len(parameters) or whole.shape != parameters[index].shape or not whole.dim():
            return whole.clone()
        return torch.empty_like(parameters[index], dtype=whole.dtype, requires_grad=False).copy_(whole)

    def load_optimizer(self, optimizer: Optimizer, parts: dict[str, Any]) -> None:
        """Load the optimizer's state from a checkpoint into this rank's optimizer.

        ``parts``: a ``state_dict()`` with the groups and parameter indices of an optimizer for the whole model. Its
        tensors are the parts that ``optimizer_part`` has returned; parameters without a part on this rank are absent.
        """
        optimizer.load_state_dict(parts)

    def any_rank(self, found: bool) -> bool:
        """Return True if ``found`` is true on any rank. ``found``: True if this rank has a gradient that is not finite.

        The default returns ``found``, because every rank checks all gradients and has the same result.
        """
        return found

    def spread(self) -> None:
        """Send the parameters that this rank has updated to the other ranks. Call it after each optimizer step.

        The base class does nothing, because every rank updates all parameters. With a sharded optimizer (ZeRO-1), each
        rank updates only a part of them.
        """
