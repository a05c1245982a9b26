"""Count the operations and memory of a PyTorch model: ``python -m dltrain.profile MODULE:NAME --input SHAPE``.

The command prints ``spec.model.hints`` for a custom model. It builds the model and runs one forward and backward pass
on PyTorch's meta device, where tensors have shapes but no values. GPT-2 XL takes seconds and no memory. Nothing is
trained.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pkgutil import resolve_name
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


@dataclass(frozen=True)
class Profile:
    """Operations and memory that a model needs for one sample, and its number of trainable ``parameters``.

    A multiply-add counts as two operations (FLOPs). ``sample_nbytes``: size of one sample in bytes.
    """

    parameters: int
    forward_FLOPs: float
    backward_FLOPs: float
    activation_nbytes: float
    """Bytes that the forward pass saves for the backward pass, including the sample itself. A storage that several
    tensors share counts once."""
    sample_nbytes: int
    checkpointed_nbytes: float | None = None
    """``activation_nbytes`` with activation checkpointing of the given blocks; None without blocks."""

    def hints(self) -> str:
        """Return the profile as YAML for ``spec.model.hints``, with which the operator plans a custom model."""
        return (
            f"model:\n  hints:\n    parameters: {self.parameters}\n"
            f"    flopsPerSample: {self.forward_FLOPs + self.backward_FLOPs:.0f}"
            f"  # forward {self.forward_FLOPs:.4g}, backward {self.backward_FLOPs:.4g}\n"
            f"    activationBytesPerSample: {self.activation_nbytes:.0f}\n{self._checkpointed()}"
            f"# dataset.sampleBytes: {self.sample_nbytes} if samples are stored like the model's input\n"
        )

    def _checkpointed(self) -> str:
        if self.checkpointed_nbytes is None:
            return ""
        return f"    checkpointedActivationBytesPerSample: {self.checkpointed_nbytes:.0f}\n"


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
        """Remove the hooks. Return the bytes of all storages, of those outside of blocks, and then of those in each
        block.
        """
        for handle in self._handles:
            handle.remove()
        for scope in self._within:
            for key in scope.keys() & self._outside.keys():
                del scope[key]
        return [
            float(sum(storage.nbytes() for storage in each.values()))
            for each in (self.whole, self._outside, *self._within)
        ]


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


def _differentiable(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output that require a gradient."""
    return [tensor for tensor in _tensors(output) if tensor.requires_grad]


def _pass(model: nn.Module, inputs: Sequence[Input], batch: int, blocks: Sequence[nn.Module]) -> list[float]:
    """Run one forward and backward pass with ``batch`` samples.

    Return a list: FLOPs of the forward pass, FLOPs of the backward pass, bytes that the forward pass saves for the
    backward pass, those of them outside of ``blocks`` or as their inputs, and what each block saves besides. The FLOPs
    and bytes are those of the whole batch.
    """
    samples = [torch.empty((batch, *i.shape), dtype=i.dtype, device="meta") for i in inputs]
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved = _Saved(own, blocks)
    with FlopCounterMode(display=False) as forward, saved_tensors_hooks(saved.save, lambda tensor: tensor), _Fused():
        outputs = _differentiable(model(*samples))
    if not outputs:
        raise ValueError(
            "model: found no output with a gradient; expected at least one tensor. Return the logits or the loss"
        )
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    return [forward.get_total_flops(), backward.get_total_flops(), *saved.nbytes()]


def blocks_at(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the blocks at ``path`` of the model, such as ``encoder.layers``: the modules of a list or Sequential.

    Raise ValueError if there are none.
    """
    try:
        found = list(model.get_submodule(path).children())
    except AttributeError:
        found = []
    if not found:
        raise ValueError(
            f"--blocks: found no modules at {path!r} of the model; expected the path of a ModuleList or Sequential, "
            "such as encoder.layers. Name the modules that the script passes to t.checkpoint_activations"
        )
    return found


def profile(model: nn.Module, inputs: Sequence[Input], blocks: Sequence[str] = ()) -> Profile:
    """Return the operations and memory per sample of ``model`` in training mode. The model moves to the meta device.

    ``inputs``: shapes of the model's arguments. FLOPs are those of matrix products, convolutions and attention; a
    multiply-add counts as two. ``blocks``: paths of lists of modules for which to count activation checkpointing
    (``blocks_at``). Raise ValueError if the model fails on such inputs, returns no tensor with a gradient, has no
    trainable parameter or no such blocks, or computes something that depends on tensor values.
    """
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not parameters:
        raise ValueError("model: found no trainable parameter; expected at least one to train")
    model = model.to("meta").train()
    wrapped = [block for path in blocks for block in blocks_at(model, path)]
    try:
        with torch.device("meta"):  # for tensors that forward() creates
            low, high = (_pass(model, inputs, batch, wrapped) for batch in BATCHES)
    except (RuntimeError, TypeError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, NotImplementedError) or "meta tensors" in str(error):
            raise ValueError(
                f"model: found code that needs tensor values, which the meta device does not have ({_line(error)}). "
                "Remove this code from forward(), or write spec.model.hints by hand: parameters, and 6 x parameters "
                "as flopsPerSample"
            ) from error
        shapes = ", ".join(f"(batch, {', '.join(map(str, i.shape))}) of {i.dtype}" for i in inputs)
        raise ValueError(
            f"model: found an error on inputs of shapes {shapes}: {_line(error)}. Give --input with the right shape "
            "for each input of the model"
        ) from error
    samples = BATCHES[1] - BATCHES[0]
    forward, backward, saved, outside, *within = ((b - a) / samples for a, b in zip(low, high, strict=True))
    checkpointed = outside + max(within) if within else None
    return Profile(parameters, forward, backward, saved, sum(i.nbytes for i in inputs), checkpointed)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def load(name: str) -> nn.Module:
    """Return the model that ``name`` refers to: a function without arguments that returns it, or the model itself.

    ``name``: ``MODULE:FUNCTION`` or ``MODULE:MODEL``. Raise ValueError if there is no such object or it creates no
    model.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(
            f"found {name!r}; expected MODULE:NAME, such as train:make_model. "
            "NAME is a model, or a function that returns one"
        )
    try:
        factory = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name}: found an import error: {_line(error)}; expected a function in a module. Run this where `import "
            f"{module}` works"
        ) from error
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise ValueError(f"{name}: found {type(factory).__name__}; expected a function without arguments, or a model")  # noqa: TRY004
    with torch.device("meta"):
        try:
            model = factory()
        except Exception as error:
            raise ValueError(
                f"{name}() fails on the meta device: {type(error).__name__}: {_line(error)}. Name a function that "
                "needs no arguments and no tensor values"
            ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(  # noqa: TRY004 - input of a user
            f"{name}(): found a result of type {type(model).__name__}; expected a torch.nn.Module. Return the model"
        )
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dltrain.profile",
        description="Print spec.model.hints for a PyTorch model: parameters, FLOPs and activation bytes of one "
        "sample, counted on the meta device, without data, GPU or training.",
        epilog="Example: python -m dltrain.profile train:make_model --input 3,224,224",
    )
    parser.add_argument("model", metavar="MODULE:NAME", help="a model, or a function that returns one")
    parser.add_argument(
        "--input",
        metavar="SHAPE[:DTYPE]",
        action="append",
        required=True,
        help="shape of one sample, such as 3,224,224 or 512:int64 (default float32); once for each input of forward()",
    )
    parser.add_argument(
        "--blocks",
        metavar="PATH",
        action="append",
        default=[],
        help="modules that the script passes to t.checkpoint_activations, such as encoder.layers for the modules in "
        "model.encoder.layers; also prints the activation bytes with activation checkpointing",
    )
    given = parser.parse_args(arguments)
    try:
        inputs = [Input.parse(text) for text in given.input]
        sys.stdout.write(profile(load(given.model), inputs, given.blocks).hints())
    except ValueError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
