"""What a PyTorch model costs, without running it: ``python -m dltrain.profile MODULE:FACTORY --input SHAPE``.

Prints ``spec.model.hints`` for a model of your own. The model is built and run forward and backward on PyTorch's meta
device, where tensors have shapes and no values: GPT-2 XL takes seconds and no memory. Nothing is trained.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

BATCHES = (2, 4)
"""Two, so that what does not depend on the batch drops out of the difference; none of 1, which batch norms refuse."""


@dataclass(frozen=True)
class Input:
    """One tensor that the model takes: ``shape`` of one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def parse(cls, text: str) -> "Input":
        """``3,224,224`` or ``512:int64``. Raises ValueError when it is neither."""
        sizes, _, name = text.partition(":")
        dtype = getattr(torch, name or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"found data type {name!r}, expected one of PyTorch's, such as float32 or int64")  # noqa: TRY004 (what a user wrote)
        try:
            shape = tuple(int(size) for size in sizes.split(",") if sizes)
        except ValueError:
            shape = (0,)
        if any(size < 1 for size in shape):
            raise ValueError(f"found {text!r}, expected the shape of one sample, such as 3,224,224 or 512:int64")
        return cls(shape, dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Profile:
    """Costs of one sample, but for ``parameters`` (trainable ones)."""

    parameters: int
    forward_FLOPs: float
    backward_FLOPs: float
    activation_nbytes: float
    """Kept for the backward pass, the sample itself included; each storage once."""
    sample_nbytes: int

    def hints(self) -> str:
        """As a part of a DLJob's manifest."""
        return (
            f"model:\n  hints:\n    parameters: {self.parameters}\n"
            f"    flopsPerSample: {self.forward_FLOPs + self.backward_FLOPs:.0f}"
            f"  # forward {self.forward_FLOPs:.4g}, backward {self.backward_FLOPs:.4g}\n"
            f"    activationBytesPerSample: {self.activation_nbytes:.0f}\n"
            f"# dataset.sampleBytes: {self.sample_nbytes} if samples are stored as the model takes them\n"
        )


class _Fused(TorchFunctionMode):
    """Attention by a fused kernel, as GPUs do it, which keeps no scores; the meta device takes the plain formula.

    With a mask it does: then what is kept is more than a GPU would keep.
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


def _differentiable(output: Any) -> list[Tensor]:
    """The real tensors in what a model returned, in tuples, mappings and the like, that have a gradient."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _differentiable(part)]
    return []


def _pass(model: nn.Module, inputs: Sequence[Input], batch: int) -> tuple[float, float, float]:
    """Forward operations, backward operations and bytes kept of one forward and backward pass."""
    samples = [torch.empty((batch, *i.shape), dtype=i.dtype, device="meta") for i in inputs]
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that its address is not another's
        return tensor

    with FlopCounterMode(display=False) as forward, saved_tensors_hooks(keep, lambda tensor: tensor), _Fused():
        outputs = _differentiable(model(*samples))
    if not outputs:
        raise ValueError("found no output with a gradient, expected a tensor or several: return logits or the loss")
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    nbytes = sum(storage.nbytes() for storage in kept.values())
    return forward.get_total_flops(), backward.get_total_flops(), nbytes


def profile(model: nn.Module, inputs: Sequence[Input]) -> Profile:
    """What ``model`` (on any device; it ends on the meta device) costs on samples of ``inputs``, in training mode.

    Operations are those of matrix products, convolutions and attention, a multiply-add as two. Raises ValueError when
    the model does not take such inputs, returns nothing with a gradient, has no trainable parameter, or does what
    needs values.
    """
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not parameters:
        raise ValueError("found no trainable parameter, expected some: there is nothing to train")
    model = model.to("meta").train()
    try:
        with torch.device("meta"):  # for what forward() makes
            low, high = (_pass(model, inputs, batch) for batch in BATCHES)
    except (RuntimeError, TypeError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, NotImplementedError) or "meta tensors" in str(error):
            raise ValueError(
                f"the model does what needs values, which the meta device has not ({_line(error)}): take that out of "
                "forward(), or write as hints its parameters and 6 x parameters operations"
            ) from error
        shapes = ", ".join(f"(batch, {', '.join(map(str, i.shape))}) of {i.dtype}" for i in inputs)
        raise ValueError(f"the model fails on {shapes}: {_line(error)}; give each of its inputs by --input") from error
    samples = BATCHES[1] - BATCHES[0]
    forward, backward, kept = ((b - a) / samples for a, b in zip(low, high, strict=True))
    return Profile(parameters, forward, backward, kept, sum(i.nbytes for i in inputs))


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def load(name: str) -> nn.Module:
    """What the factory ``MODULE:FUNCTION`` makes, on the meta device. Raises ValueError when it makes no model."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"found {name!r}, expected MODULE:FACTORY, such as train:make_model")
    try:
        factory = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {name}: {_line(error)}; run it where `import {module}` works") from error
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise ValueError(f"{name}: found {type(factory).__name__}, expected a function without arguments, or a model")  # noqa: TRY004
    with torch.device("meta"):
        try:
            model = factory()
        except Exception as error:
            raise ValueError(f"{name}() fails on the meta device: {type(error).__name__}: {_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name}() returned {type(model).__name__}, expected a torch.nn.Module")  # noqa: TRY004
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dltrain.profile",
        description="Print spec.model.hints for a PyTorch model: parameters, operations and activation bytes of one "
        "sample, found on the meta device, without data, GPU or training.",
        epilog="Example: python -m dltrain.profile train:make_model --input 3,224,224",
    )
    parser.add_argument("model", metavar="MODULE:FACTORY", help="a function without arguments that returns the model")
    parser.add_argument(
        "--input",
        metavar="SHAPE[:DTYPE]",
        action="append",
        required=True,
        help="shape of one sample, such as 3,224,224 or 512:int64 (default float32); once for each input of forward()",
    )
    given = parser.parse_args(arguments)
    try:
        inputs = [Input.parse(text) for text in given.input]
        sys.stdout.write(profile(load(given.model), inputs).hints())
    except ValueError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
