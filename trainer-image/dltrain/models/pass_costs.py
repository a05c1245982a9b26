"""The operations of a model's forward and backward pass, and the memory that the forward pass saves.

The passes run on PyTorch's meta device, where tensors have shapes but no values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

BATCHES = (2, 4)
"""The two batch sizes with which the model runs. Subtracting their costs cancels costs that do not depend on the batch.
Neither is 1, because batch normalization rejects a batch of one sample."""


@dataclass(frozen=True)
class Input:
    """One input tensor of the model. ``shape``: the shape of one sample, without the batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def parse(cls, text: str) -> "Input":
        """Parse text such as ``3,224,224`` or ``512:int64``. Raise ValueError if it has another form."""
        sizes, _, name = text.partition(":")
        dtype = getattr(torch, name or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"found data type {name!r}; expected one of PyTorch's, such as float32 or int64")  # noqa: TRY004 (what a user wrote)
        try:
            shape = tuple(int(size) for size in sizes.split(",") if sizes)
        except ValueError:
            shape = (0,)
        if any(size < 1 for size in shape):
            raise ValueError(f"found {text!r}; expected the shape of one sample, such as 3,224,224 or 512:int64")
        return cls(shape, dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class _Saved:
    """The storages that a forward pass saves for the backward pass: outside of blocks, and in each block.

    ``own``: storages that do not count, such as those of parameters. The input of a block counts outside of it, because
    activation checkpointing keeps it; all else that a block saves is computed again when its backward pass runs.
    """

    def __init__(self, own: set[int], blocks: Sequence[nn.Module]) -> None:
        self._own = own
        self.whole, self._outside = dict[int, Any](), dict[int, Any]()
        self._within: list[dict[int, Any]] = [{} for _ in blocks]
        self._scopes = [self._outside]
        self._handles = []
        for block, scope in zip(blocks, self._within, strict=True):
            self._handles += [
                block.register_forward_pre_hook(partial(self._enter, scope), with_kwargs=True),
                block.register_forward_hook(self._leave),
            ]

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self.whole[storage._cdata] = self._scopes[-1][storage._cdata] = storage  # so that its address is not reused
        return tensor

    def _enter(self, scope: dict[int, Any], block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for tensor in _tensors([args, kwargs]):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                self._outside[storage._cdata] = storage
        self._scopes.append(scope)

    def _leave(self, *_: Any) -> None:
        self._scopes.pop()

    def nbytes(self) -> list[float]:
        """Remove the hooks. Return the bytes of the largest storage, of all, of those outside of blocks, and then of
        those in each block.
        """
        for handle in self._handles:
            handle.remove()
        for scope in self._within:
            for key in scope.keys() & self._outside.keys():
                del scope[key]
        largest = float(max((storage.nbytes() for storage in self.whole.values()), default=0))
        scopes = self.whole, self._outside, *self._within
        return [largest, *(float(sum(storage.nbytes() for storage in each.values())) for each in scopes)]


class _Fused(TorchFunctionMode):
    """A mode in which attention runs with the fused kernel that GPUs use, which does not save the attention scores.

    On the meta device, PyTorch would otherwise use the unfused formula, which saves the scores. Attention with a mask
    still uses the unfused formula, so for such a model the result counts more activation bytes than a GPU would save.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is None and not enable_gqa and query.dim() == 4 and query.shape[-1] == value.shape[-1]:
            fused = torch.ops.aten._scaled_dot_product_flash_attention
            attended: Tensor = fused(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return attended
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors in the arguments or in the output of a model. Search nested lists, tuples and dictionaries."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _tensors(part)]
    return []


def differentiable(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output that require a gradient."""
    return [tensor for tensor in _tensors(output) if tensor.requires_grad]


def run_pass(model: nn.Module, inputs: Sequence[Input], batch: int, blocks: Sequence[nn.Module]) -> list[float]:
    """Run one forward and backward pass with ``batch`` samples.

    Return a list: FLOPs of convolutions in the forward pass, bytes of outputs with a gradient, FLOPs of the forward
    pass, FLOPs of the backward pass, bytes of the largest tensor that the forward pass saves for the backward pass, of
    all that it saves, of those of them outside of ``blocks`` or as their inputs, and what each block saves besides. The
    FLOPs and bytes are those of the whole batch.
    """
    samples = [torch.empty((batch, *i.shape), dtype=i.dtype, device="meta") for i in inputs]
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved = _Saved(own, blocks)
    with FlopCounterMode(display=False) as forward, saved_tensors_hooks(saved.save, lambda tensor: tensor), _Fused():
        outputs = differentiable(model(*samples))
    if not outputs:
        raise ValueError(
            "model: found no output with a gradient; expected at least one tensor. Return the logits or the loss"
        )
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    counts = forward.get_flop_counts().get("Global", {})
    convolutions = sum(count for operation, count in counts.items() if "convolution" in str(operation))
    output_nbytes = sum(output.nbytes for output in outputs)
    return [convolutions, output_nbytes, forward.get_total_flops(), backward.get_total_flops(), *saved.nbytes()]
