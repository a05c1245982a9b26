"""Batch normalization (Ioffe and Szegedy 2015) over the global batch, for ranks with different local batch sizes.

Mean and variance are those of the samples of all ranks, so results do not depend on how the batch is split. torch's own
SyncBatchNorm needs GPUs and assumes that the losses of all ranks have equal weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Ranks:
    """Functions with which a BatchNorm layer communicates with other ranks. Copies of a model share these functions."""

    sum: Callable[[Sequence[float]], list[float]]
    """Returns the element-wise sum over ranks in double precision. All ranks must make the same sequence of calls."""
    counts: Callable[[], bool]
    """Returns False if this rank has no samples.

    The rank then computes samples of another rank, but its result is discarded.
    """
    weight: Callable[[], float]
    """Returns the weight of this rank's mean loss: its part of the batch or number of tokens. Only ratios matter."""


class SyncBatchNorm(_BatchNorm):
    """A replacement for the BatchNorm layer ``like``. In training, its statistics cover the samples of all ranks.

    Its parameters and buffers are those of ``like``, under the same names.
    """

    def __init__(self, like: _BatchNorm, ranks: "Ranks") -> None:
        nn.Module.__init__(self)
        self.__dict__.update({name: value for name, value in vars(like).items() if name != "_forward_impl"})
        self._ranks = ranks

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(
                f"batch norm: found input of {input.dim()} dimensions; expected at least 2: (samples, channels, …)"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalize ``input`` of shape (N, C, …) over all dimensions except C.

        Raise ValueError if the global batch has only one value per channel, and PeerLostError if a rank is lost.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None:
            self._remember(mean, variance * (count / (count - 1)))
        return cast(Tensor, output)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Update the layer's running mean and variance, which are used in evaluation, with those of a global batch.

        They are equal on all ranks, because each batch has the samples of all ranks.
        """
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


class _Normalize(torch.autograd.Function):
    """Compute y = (x - mean) / sqrt(variance + eps) * weight + bias with statistics over the samples of all ranks.

    Backward pass: let g_r be the gradient of rank r's mean loss with respect to y, w_r the weight of this loss, dx_r
    its gradient with respect to x, x̂ the normalized x, and n the number of values per channel on all ranks. Σ_s adds
    over ranks, and Σ without an index adds over the values of a channel on one rank. The gradient of the global loss
    with respect to y is w_r g_r on rank r, and
    w_r dx_r = weight / std * (w_r g_r - Σ_s w_s Σ g_s / n - x̂ Σ_s w_s Σ g_s x̂_s / n).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm) -> Any:
        over = [0, *range(2, x.dim())]
        here = x.numel() // x.shape[1] if layer._ranks.counts() else 0
        given, x = x, _wide(x)
        variance, mean = torch.var_mean(x, over, correction=0)
        mean, variance = mean.double(), variance.double()
        # To lose no digits by cancellation, the sum of squares is computed in double precision from the variance
        # about the rank's mean.
        sums = torch.cat([mean * here, (variance + mean * mean) * here])
        *values, count = layer._ranks.sum([*(sums if here else torch.zeros_like(sums)).tolist(), here])
        if count < 2:
            raise ValueError(
                f"batch norm: found {count:g} values per channel in the global batch; expected at least 2. Increase "
                "globalBatchSize"
            )
        mean, square = (torch.tensor(values, dtype=torch.float64, device=x.device) / count).chunk(2)
        variance = (square - mean * mean).clamp_(min=0)
        inverse = (variance + layer.eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x - mean.to(x.dtype).view(shape)).mul_(inverse.to(x.dtype).view(shape))
        output = normal if weight is None else normal * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        # Rounding normalized values to 16 bits would bias the sums of the backward pass. If the input has 16 bits,
        # backward therefore recomputes the normalized values from the saved input.
        ctx.save_for_backward(normal if given is x else given, weight, inverse.to(x.dtype), mean.to(x.dtype))
        ctx.ranks, ctx.counted, ctx.count, ctx.over, ctx.shape, ctx.has_bias = (
            layer._ranks,
            here > 0,
            count,
            over,
            shape,
            bias is not None,
        )
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return output.to(given.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> Any:
        normal, weight, inverse, center = ctx.saved_tensors
        if (narrow := normal.dtype) is not inverse.dtype:
            normal = (_wide(normal) - center.view(ctx.shape)) * inverse.view(ctx.shape)
        gradient = torch.zeros_like(normal) if gradient is None else _wide(gradient)
        own = ctx.ranks.weight() if ctx.counted else 0.0
        if ctx.counted and not own:
            raise RuntimeError(
                "batch norm: found a rank that has samples, but passed 0 tokens to t.weigh; expected tokens on every "
                "rank with samples. Increase the local batch sizes"
            )
        g, gx = gradient.sum(ctx.over), (gradient * normal).sum(ctx.over)
        sums = (torch.cat([g, gx]).double() * own).tolist() if own else [0.0] * (2 * len(g))
        values = ctx.ranks.sum(sums)
        if not own:
            return torch.zeros_like(gradient, dtype=narrow), None, None, None  # this rank's weight is 0
        mean, slope = (
            part.to(gradient).view(ctx.shape)
            for part in (torch.tensor(values, dtype=torch.float64, device="cpu") / (own * ctx.count)).chunk(2)
        )
        scale = inverse if weight is None else inverse * weight
        dx = (gradient - mean - normal * slope) * scale.view(ctx.shape)
        return dx.to(narrow), gx if weight is not None else None, g if ctx.has_bias else None, None


def _wide(x: Tensor) -> Tensor:
    """Convert 16-bit floats (from autocast) to float32, because sums of 16-bit floats would overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


Model = TypeVar("Model", bound=nn.Module)


def synchronized(model: Model, ranks: Ranks, kind: type[_BatchNorm] = _BatchNorm) -> Model:
    """Replace every layer of ``kind`` in ``model`` by a SyncBatchNorm. Return the model, with the same parameters."""
    if isinstance(model, kind):
        return cast(Model, SyncBatchNorm(model, ranks))
    for name, child in model.named_children():
        setattr(model, name, synchronized(child, ranks, kind))
    return model


def local_layers(model: nn.Module) -> list[str]:
    """Return the names of BatchNorm layers whose statistics cover only one rank's samples."""
    synchronizing = (SyncBatchNorm, nn.SyncBatchNorm)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    return [name for name, layer in layers.items() if not isinstance(layer, synchronizing)]


def torch_layers(model: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    """Return torch's own layers by name, such as those that ``nn.SyncBatchNorm.convert_sync_batchnorm`` makes.

    They compute with the samples of one rank if ranks reduce over MPI, and fail on CPUs otherwise.
    """
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.SyncBatchNorm)}


def unsynchronized(layers: Sequence[str]) -> str:
    """Return a warning that BatchNorm layers with the names ``layers`` use the samples of one rank only."""
    return (
        f"{len(layers)} BatchNorm layers ({layers[0]}, …) use the samples of one rank only, so results depend on the "
        "split of the batch. Set spec.model.syncBatchNorm, or pass sync_batch_norm=True to t.wrap"
    )
