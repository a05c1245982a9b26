"""What a script can get wrong with the five lines, said where it is wrong."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, SparseAdam

from dltrain.protocol.errors import MisuseError

IN_PARTS = ": gradients are not accumulated over batches, but over parts of one, under t.no_sync()"


def check_wrapped(model: Any, optimizer: Any, *, again: bool) -> None:
    """What is passed to ``t.wrap``. Raises MisuseError."""
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            found = f"{type(given).__module__}.{type(given).__name__}"
            raise MisuseError(f"t.wrap: {name}: found {found}, expected a torch {kind.__name__}")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise MisuseError(
            f"t.wrap: model: found parameters {', '.join(lazy)} of lazy layers, which have no shape yet: call the "
            "model once on a sample before the optimizer is made"
        )
    if odd := [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]:
        raise MisuseError(
            f"t.wrap: model: found state that is no tensor in {', '.join(odd)}, expected tensors, which ranks exchange "
            "and checkpoints hold: keep it in a buffer, or as an attribute that your script sets"
        )
    if odd := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise MisuseError(
            f"t.wrap: model: found complex parameters {', '.join(odd)}, expected real ones, which ranks can sum: make "
            "them of torch.view_as_real, and use torch.view_as_complex in forward"
        )
    if isinstance(optimizer, SparseAdam):
        raise MisuseError(
            "t.wrap: optimizer: found SparseAdam, expected one for dense gradients, which is what ranks sum: Adam, or "
            "SGD for embeddings with sparse=True"
        )
    if again:
        raise MisuseError(
            "t.wrap: found a second call, expected one: put what is trained into one nn.Module with one optimizer"
        )


def number(loss: Any) -> Tensor:
    """A loss as a tensor of no dimension. Raises MisuseError when it is not one number."""
    try:
        found = torch.as_tensor(loss).detach()
    except (TypeError, ValueError, RuntimeError):
        raise MisuseError(f"t.log: loss: found {type(loss).__name__}, expected a number") from None
    if found.numel() != 1:
        raise MisuseError(f"t.log: loss: found shape {tuple(found.shape)}, expected one number: the mean of the batch")
    return found.reshape(())


def numbers(values: Any) -> Sequence[float]:
    """What is to be summed over ranks. Raises MisuseError for one number."""
    if not hasattr(values, "__len__") or (isinstance(values, Tensor) and not values.dim()):
        raise MisuseError(f"t.sum: found one {type(values).__name__}, expected a list: t.sum([right, seen])")
    found: Sequence[float] = values
    return found


def check_samples(counts: Sequence[int]) -> None:
    """Of the dataset on each rank. Raises MisuseError when they differ."""
    if len(set(counts)) > 1:
        raise MisuseError(
            f"t.steps: found {', '.join(map(str, counts))} samples in the dataset on ranks 0, 1, …, expected the whole "
            "dataset on each: dltrain divides it among them"
        )


def warn_of_unlike_buffers(names: Sequence[str], rank: int) -> None:
    """Of those that differ between ranks after a step."""
    if names and rank == 0:
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        warnings.warn(
            f"buffers of the model ({some}) differ between ranks: forward writes there what it sees of one rank's "
            "samples, so that results depend on the split, and checkpoints hold rank 0's: write t.mean(…) of it",
            stacklevel=2,
        )


def warn_of_a_second_pass(step: int) -> None:
    """A loop over epochs around ``t.steps`` goes through it once."""
    warnings.warn(
        f"t.steps goes through all epochs, and all {step} steps are done: leave out a loop over epochs around it, and "
        "look at t.epoch and t.end_of_epoch within",
        stacklevel=3,
    )
