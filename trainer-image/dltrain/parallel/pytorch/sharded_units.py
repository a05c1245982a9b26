"""The modules whose parameters fully_shard gathers and reduces together, and the communication of each such unit.

A unit is gathered before its forward and its backward pass, and freed after each. Its gradients are reduced when its
backward pass ends, so that every rank gets the sum for its part.

In 16 bits, ranks gather copies in 16 bits of the parameters of a unit and compute with these. Each rank stores its part
of the parameters, and sums gradients, in float32.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from dltrain.comm.algorithms.torch_distributed import raise_lost
from dltrain.models.sharding_units import units_of
from dltrain.protocol.errors import BadInputError, MisuseError
from dltrain.timing.stopwatch import Lap, reading

WARN_NBYTES, MAX_PART = 2**26, 0.5
"""Ranks warn if a model with at least so many bytes of parameters has a unit with more than this part of them."""


def shard(
    model: nn.Module,
    mesh: Any,
    communication: "UnitCommunication",
    min_nbytes: int,
    dtype: torch.dtype | None,
    prepare: Callable[[Sequence[nn.Parameter]], None] | None = None,
) -> list[nn.Module]:
    """Shard the parameters of ``model`` over the ranks of ``mesh``, in place. Return the units, last the model.

    ``communication``: the collectives of all units. ``min_nbytes``: minimum size of a unit's parameters. ``dtype``: the
    16-bit type in which ranks gather parameters; None for the parameters' own type. It does not change units with
    BatchNorm, whose statistics are float32. ``prepare``: function that is called with the parameters of each unit
    before it is sharded. Afterwards, these parameters are empty: the model has others in their place.

    Raise BadInputError if the installed torch is too old or ranks share a GPU, and MisuseError for parameters that
    cannot be sharded.
    """
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise BadInputError(
            "spec.parallelism.strategy",
            f"Sharded with torch {torch.__version__}",
            "torch 2.13 or newer",
            "choose a newer image, or another strategy",
        )
    if mesh.device_type == "cuda" and torch.distributed.get_backend() != "nccl":
        raise BadInputError(
            "spec.parallelism.strategy",
            "Sharded with ranks that share a GPU",
            "a GPU for each rank",
            "give each rank a GPU, or choose another strategy",
        )
    units = [*units_of(model, min_nbytes), model]
    _check_parameters(model, units)
    _warn_of_large_units(model, units)
    sharded: set[nn.Parameter] = set()
    for unit in units:
        own = [parameter for parameter in unit.parameters() if parameter not in sharded]
        if prepare is not None:
            prepare(own)
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=_policy(unit, units, dtype))
        for parameter in own:  # The optimizer still has it.
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        sharded.update(unit.parameters())
    for unit in units:
        assert isinstance(unit, FSDPModule), "fully_shard has just made it one"
        unit.set_gradient_divide_factor(1.0)  # the gradients are weighted before they are summed
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reduce_scatter_unused_params(True)  # a layer may be without gradients on some ranks only
        unit.set_custom_all_gather(communication.all_gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(communication.reduce_scatter)  # type: ignore[arg-type]
        unit.register_forward_hook(_copy_views, prepend=True)  # before that of fully_shard
    if dtype is not None:
        _compute_in(dtype, model, mesh.device_type)
    return units


def _policy(unit: nn.Module, units: Sequence[nn.Module], dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return in which types ranks gather a unit and sum its gradients.

    BatchNorm needs parameters of the type of its statistics. ``units``: all units, last the model, which has the rest.
    The inputs of the model stay as they are, as under autocast: a time or a position may need all its digits.
    """
    others = units[:-1] if unit is units[-1] else ()
    inner = {id(module) for other in others for module in other.modules()}
    own = (module for module in unit.modules() if id(module) not in inner)
    if dtype is None or any(isinstance(module, _NormBase) for module in own):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=unit is not units[-1])


def _copy_views(unit: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Copy outputs that are views, such as those of ``nn.Linear`` for inputs of three dimensions. A forward hook.

    If the next layer or the script changes a view in place, such as ``nn.ReLU(inplace=True)``, fully_shard's hook is
    lost, and so is that of ``FullyShardedParallel``.
    """

    def is_view(each: Any) -> bool:
        return isinstance(each, Tensor) and each.requires_grad and each._base is not None

    if not any(map(is_view, tree_leaves(outputs))):
        return None
    return tree_map(lambda each: each.clone() if is_view(each) else each, outputs)


def _compute_in(dtype: torch.dtype, model: nn.Module, device_type: str) -> None:
    """Let every forward pass of ``model`` run under autocast to ``dtype``, also outside of the script's autocast.

    A float32 buffer, or a unit with BatchNorm, lets layers with gathered parameters in 16 bits get inputs in float32,
    which torch refuses without autocast. Evaluations often run without it. Their outputs are float32, as with other
    strategies.
    """
    run = model.forward

    @wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            outputs = run(*args, **kwargs)
        if torch.is_autocast_enabled(device_type):
            return outputs
        return tree_map_only(Tensor, lambda each: each.float() if each.dtype == dtype else each, outputs)

    model.forward = forward
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
            module.register_forward_pre_hook(_cast_input)


def _cast_input(norm: nn.Module, inputs: Any) -> Any:
    """Convert the input of a norm to the type of its 16-bit weight. Autocast does this on GPUs, but not on CPUs.

    This is a forward pre-hook.
    """
    weight, given = norm.weight, inputs[0] if inputs else None
    if not isinstance(weight, Tensor) or not isinstance(given, Tensor) or given.device.type != "cpu":
        return None
    return (given.to(weight.dtype), *inputs[1:]) if given.dtype == torch.float32 else None


def _warn_of_large_units(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Warn on rank 0 if ranks gather most of a large model at once, so that sharding saves little memory."""
    total, inner = (
        sum(p.nbytes for p in model.parameters()),
        [sum(p.nbytes for p in u.parameters()) for u in units[:-1]],
    )
    largest = max([total - sum(inner), *inner])
    if total >= WARN_NBYTES and largest > MAX_PART * total and torch.distributed.get_rank() == 0:
        warnings.warn(
            f"t.wrap: model: found {100 * largest / total:.0f} % of the parameters in one unit of parallelism.strategy "
            f"Sharded; expected at most {100 * MAX_PART:.0f} %, because ranks gather a unit as a whole. Put the layers "
            "into an nn.ModuleList or nn.Sequential, each element of which becomes a unit",
            stacklevel=2,
        )


def _check_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    names = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if names:
        raise MisuseError(
            f"model: found parameters of shape () ({', '.join(names)}) with parallelism.strategy Sharded; expected at "
            "least one dimension, along which ranks divide a parameter. Use torch.zeros(1) in place of torch.zeros(())"
        )
    rest = {parameter for parameter in model.parameters() if parameter.requires_grad}
    for unit in units:
        own = rest.intersection(unit.parameters())
        rest -= own
        dtypes = {str(parameter.dtype) for parameter in own}
        if len(dtypes) > 1:
            raise MisuseError(
                f"model: found parameters of {', '.join(sorted(dtypes))} in {type(unit).__name__} with "
                "parallelism.strategy Sharded; expected one dtype, because ranks exchange a layer's parameters "
                "together. Convert the layer, such as by model.float() with t.autocast() for 16-bit computing, or put "
                "the parts of each dtype into separate elements of a list such as nn.ModuleList"
            )


class UnitCommunication:
    """The collectives of all units, by torch.distributed, with this rank's weight for its gradients."""

    def __init__(self) -> None:
        self.weight = 1.0
        """Factor by which this rank's gradients are multiplied before they are summed over ranks."""
        self.waited = Lap()
        """Time in this step during which the calling thread ran collectives. On a GPU, they run in other streams."""
        self.all_gather, self.reduce_scatter = _AllGather(self), _ReduceScatter(self)

    def run(self, operation: Any, output: Tensor, given: Tensor, **options: Any) -> Any:
        """Run a function of torch.distributed, measure its time and return its result.

        Raise PeerLostError if another rank is lost, and RuntimeError if this rank itself fails.
        """
        began = reading()
        try:
            return operation(output, given, **options)
        except RuntimeError as error:
            raise_lost(error)
        finally:
            self.waited += reading() - began


class _Communication:
    """Memory of a collective, from torch's allocator. The methods are those of the interface of ``FSDPModule``."""

    def __init__(self, of: UnitCommunication) -> None:
        self._of = of

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Communication):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._of.run(
            torch.distributed.all_gather_single, output_tensor, input_tensor, group=group, async_op=async_op
        )


class _ReduceScatter(_Communication):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        weight, scatter = self._of.weight, torch.distributed.reduce_scatter_single
        if not weight:
            input_tensor.zero_()  # the mean over no samples is NaN, and 0 * NaN is NaN
        elif weight != 1.0:
            input_tensor.mul_(weight)
        return self._of.run(scatter, output_tensor, input_tensor, op=op, group=group, async_op=async_op)
