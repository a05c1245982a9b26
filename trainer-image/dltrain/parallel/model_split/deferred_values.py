"""Give the tensors of a deferred model, which have no memory, their initial values: on all ranks those of rank 0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from dltrain.comm.process_group import ProcessGroup
from dltrain.models.deferred import InitialValues, initial_values, temporary, tensor_attributes


def received(process_group: ProcessGroup, initial: InitialValues, name: str, like: Tensor, *, stays: bool) -> Tensor:
    """Return rank 0's initial values of a parameter or buffer on every rank, in main memory. All ranks must call it.

    ``like``: this parameter or buffer, whose own values count if it has memory. ``stays``: True if the result becomes a
    tensor of the rank's model, False if it is freed soon. Raise PeerLostError if a rank is lost.
    """
    make = torch.empty if stays else temporary
    whole = make(tuple(like.shape), dtype=like.dtype)
    if not process_group.rank:
        if like.is_meta:
            initial.fill(name, whole, like)
        else:
            whole.copy_(like.detach())
    process_group.broadcast_into(whole.reshape(-1).view(torch.uint8).numpy())
    return whole


def receive_buffers(
    process_group: ProcessGroup, initial: InitialValues, model: nn.Module, device: torch.device
) -> None:
    """Give all buffers of ``model`` rank 0's initial values, on ``device``. All ranks must call it.

    Tensors without memory that are plain attributes of modules get them in main memory, where ``t.wrap`` leaves such
    tensors.
    """
    made: dict[Tensor, Tensor] = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if buffer not in made:
            whole = received(process_group, initial, name, buffer, stays=device.type == "cpu")
            made[buffer] = whole.to(device)
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, made[buffer])
    for name, owner, key, attribute in tensor_attributes(model):
        vars(owner)[key] = received(process_group, initial, name, attribute, stays=True)


def receiver(
    process_group: ProcessGroup, model: nn.Module, device: torch.device
) -> Callable[[Sequence[nn.Parameter]], None]:
    """Return a function that gives parameters of a deferred model their initial values, and give them to its buffers.

    For a model in memory, the function does nothing. All ranks must call both.
    """
    initial = initial_values(model)
    if initial is None:
        return lambda parameters: None
    receive_buffers(process_group, initial, model, device)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def receive(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            give_values(parameter, received(process_group, initial, names[parameter], parameter, stays=False))

    return receive


def give_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, also of another shape. The model and the optimizer keep the same object."""
    if parameter.is_meta:
        made = nn.Parameter(values, requires_grad=parameter.requires_grad)
        swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
    else:
        parameter.data = values


@contextmanager
def without_weak_references(model: nn.Module) -> Iterator[None]:
    """Remove the weak references of recurrent layers to their parameters, which torch cannot swap otherwise."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._init_flat_weights()
