"""The interface of parallelism strategies: the parts of batch, model and optimizer that a rank has, and a step's calls.

By default, a rank has the whole model and optimizer, and a part of the batch. Some strategies override this.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dltrain.batch.sampling import Part, Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.optim.options import load_state
from dltrain.timing.backward_passes import Passes
from dltrain.timing.stopwatch import Lap

Extents = Mapping[str, tuple[int, tuple[int, ...]]]
"""The rows of each tensor that a rank has, by name: index of the first one, and shape of the whole tensor."""


@dataclass(frozen=True)
class OwnRows:
    """The rows of each tensor of model and optimizer that this rank has.

    By name of the tensor: ``NAME`` of a weight, ``INDEX.KEY`` of the optimizer's state. Others are whole."""

    weights: Extents
    optimizer: Extents


@dataclass(frozen=True)
class Copies:
    """Parameters that only some ranks have, and that must be equal on them.

    ``group``: these ranks. ``ranks``: their numbers in the plan, in the order of the group.
    """

    group: ProcessGroup
    ranks: tuple[int, ...]
    parameters: list[torch.Tensor]


class Placement:
    """Base class of parallelism strategies: it defines which part of the batch, model and optimizer a rank has.

    Its methods also assemble the whole model and the whole optimizer state for checkpoints.
    """

    shares_square = True
    """True if the strategy can share the squared norms of local gradients (``square_at``), unless it is sharded."""

    sharded = False
    """True if a rank gets only its part of the reduced gradient. A script then cannot use ``p.grad``."""

    copies_state = False
    """True if ``weights`` and ``optimizer_state`` return copies in main memory, which later steps do not change."""

    writes_rows = False
    """True if each rank has rows of the model's tensors, and can write them to a sharded checkpoint itself."""

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

    def copies(self) -> Copies | None:
        """Return this rank's parameters that some ranks have too, besides ``replicated``; None if there are none."""
        return None

    def shape_of(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return tensors with the same names, shapes and dtypes as the whole model's tensors.

        Only these properties count; the tensors may have no values. Checkpoints are compared with them before loading.
        """
        return model.state_dict()

    def weights(self, model: nn.Module, left_out: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return the whole model's tensors by name, at least on rank 0. All ranks must call this method together.

        ``left_out``: names of tensors that the result does not contain.
        """
        return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}

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

    def check_divided_state(self, optimizer: Optimizer) -> None:
        """Raise MisuseError if checkpoints cannot contain the optimizer's state, because ranks divide the state.

        Call it after the first update. The base class does nothing, because every rank has all of the state.
        """

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
        load_state(optimizer, parts)

    # Methods for sharded checkpoints, if ``writes_rows`` is true

    def checkpoint_group(self) -> Any:
        """Return a new process group of torch for checkpoints. All ranks must call this method together."""
        raise NotImplementedError

    def own_rows(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any], OwnRows]:
        """Return (the model's tensors, the optimizer's ``state_dict()``, which rows of whole tensors these are).

        Each rank returns the tensors and states that it writes to a checkpoint. They are not copied. All ranks must
        call this method together.
        """
        raise NotImplementedError

    def weight_part(self, name: str) -> tuple[torch.Tensor, int]:
        """Return (this rank's rows of the model's tensor ``name``, index of the first one). They can be overwritten."""
        raise NotImplementedError

    def optimizer_space(
        self, optimizer: Optimizer, index: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return new memory for this rank's part of a tensor of the optimizer's state of parameter ``index``.

        ``dtype``, ``shape``: those of the whole tensor. Return (the tensor for the optimizer's ``state_dict()``, the
        rows of this rank, which share its memory, index of the first one).
        """
        raise NotImplementedError

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


class Strategy(Placement, ABC):
    """A parallelism strategy that reduces the gradients of each step over ranks.

    In each step, the trainer calls ``begin``; the script computes gradients; and the trainer calls ``finish`` before
    the optimizer's update.
    """

    def __init__(self, device: torch.device) -> None:
        self.exposed_s = 0.0
        """Seconds of the last step in which this rank waited for the reduction and did not compute."""
        self._waited = Lap()
        self._no_sync = False
        """True inside ``accumulating``."""
        self.passes = Passes(device)
        """A measurement of the duration of the current step's backward passes."""
        self.sum_s = 0.0
        """Seconds of the last step from the start of the first reduction to the end of the last one."""
        self.square = 0.0
        """Squared norm of this rank's part of the last gradient. 0 if every rank has the whole gradient."""
        self.square_at: int | None = None
        """Index in the tail (the last values that ranks reduce) at which this rank shares its weight times the squared
        norm of its local gradient. None: do not share this value."""
        self.measured_norm = 0.0
        """Norm of the global batch's gradient before the script changes it. Set only if ``square_at`` is set."""
        self.weight_at: int | None = None
        """Index in the tail (the last values that ranks reduce) of each rank's weight. The reduced gradient is divided
        by the sum of these weights over ranks, unless the sum is 0. None: do not divide."""

    @property
    def waited(self) -> Lap:
        """Return the time in which calls of the script, such as ``backward``, waited for other ranks in this step.

        On a GPU, wait for the device first, because the measurement may consist of events in its stream.
        """
        return self._waited

    @property
    @abstractmethod
    def gradient_nbytes(self) -> int:
        """Return the size of all gradients in bytes."""

    @property
    @abstractmethod
    def tail_length(self) -> int:
        """Return the number of values that ranks share at every step, which they reduce with the gradients."""

    @abstractmethod
    def begin(self, weight: float, shared: list[float], *, accumulates: bool = False) -> None:
        """Zero the gradients and begin a step.

        ``weight``: this rank's fraction of the global batch. ``shared``: this rank's values for the tail, which ranks
        sum together with the gradients. ``accumulates``: True if the step has several micro-batches, each of which
        begins with ``begin_micro_batch``. Raise MisuseError if the script has made frozen parameters trainable.
        """

    @abstractmethod
    def begin_micro_batch(self, weight: float, *, last: bool) -> None:
        """Begin a micro-batch of the step. Backward passes of all but the last micro-batch start no reduction.

        ``weight``: the micro-batch's fraction of the global batch. Until the gradients are reduced, ``p.grad`` is None
        between backward passes, so that a script's ``zero_grad`` and clipping cannot change the accumulated gradients.
        """

    def select(self, number: int) -> None:
        """Let the next calls concern the gradients of optimizer ``number``, in the order of ``t.wrap``.

        A step may have several updates, each of one optimizer. Most strategies have one optimizer, and do nothing.
        """

    def skip_update(self, number: int) -> None:
        """Add up the gradients of optimizer ``number``, whose step the script has called before the last micro-batch.

        The base class does nothing, because backward passes add up the gradients.
        """

    def updated(self) -> None:
        """Record that the selected optimizer has applied its gradients, or left out its update."""

    @abstractmethod
    def share(self, position: int, values: Sequence[torch.Tensor | float]) -> bool:
        """Write ``values`` into the tail (the last values that ranks reduce), starting at its index ``position``.

        Return False if no step is in progress or if the tail was already sent. Tensors are copied without being read,
        because reading would wait for the forward pass on a GPU.
        """

    @abstractmethod
    def weigh(self, weight: float) -> None:
        """Replace the weight of this rank's loss in this step. Raise MisuseError if the backward pass has begun."""

    @abstractmethod
    def unscaled(self, scale: float, left: float) -> None:
        """Record that a GradScaler has divided the reduced gradients, so that norms are reported without its scale.

        Call this after ``finish``. ``scale``: the factor by which the script multiplied its losses. ``left``: the
        factor that gradients still contain, 1 if the GradScaler has removed all of ``scale``.
        """

    def rescale_residuals(self, factor: float) -> None:
        """Multiply the residuals (rounding errors) of gradient compression by ``factor``, as for a new loss scale."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """Return the norm of the last step's gradient of the global batch, before clipping and without loss scale."""

    @abstractmethod
    def clip(self, max_norm: float) -> float:
        """Clip the global batch's gradient to a norm of at most ``max_norm``. Return the norm before clipping.

        Return 0 without clipping before the last micro-batch, and if the step was abandoned or a rank was lost;
        ``finish`` then raises PeerLostError.
        """

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside the context, which are not complete until the next pass.

        The first backward pass after the context reduces the accumulated gradients. If ranks store only a part of the
        gradients, every pass reduces its own.
        """
        self._no_sync = True
        try:
            yield
        finally:
            self._no_sync = False

    @abstractmethod
    def finish(self) -> list[float]:
        """Wait for the reduction of all gradients. Return the tail (the values after the gradients), summed over ranks.

        Afterwards, parameters that no rank's backward pass reached have no gradient, so optimizers skip them as in one
        process. Raise PeerLostError if a rank is lost, and MisuseError if the script changed unreduced gradients.
        """

    @abstractmethod
    def whole(self) -> None:
        """Wait until ``p.grad`` contains the gradients of the global batch.

        Raise PeerLostError if a rank is lost, and MisuseError if the script changed gradients before their reduction.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Abort the reductions, so that other ranks do not wait for this one's gradients."""

    @abstractmethod
    def retire(self) -> None:
        """Remove the hooks after ranks were lost. Do not free the collective's memory: messages may still arrive."""

    @abstractmethod
    def close(self) -> None:
        """Remove the backward hooks and free the collective that reduces the gradients."""
