"""Layer tables: the cost of one sample in each layer (``layer.Layer``), computed from shapes.

The counts follow from the definitions of the layers. A convolution from c channels to f channels of h x w with k x k
filters does 2 k² c f h w operations (multiply and add). Its backward pass does as many for the gradient of the filters,
and as many for the gradient of the input, except in the first layer with parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, Self

from dljob.perf.workload.layer import Layer

LANES = 16
"""Kernels of convolutions on CPUs pad the channels to a multiple of this: numbers of 4 bytes in an AVX-512 register."""
NARROW = 3.5
"""Length of an output row in positions below which kernels of convolutions on CPUs no longer reach their usual speed.

They compute an image row by row and read the weights for each row, so an operation takes NARROW / length times as long.
Measured on one core of an AMD EPYC with training steps of single convolutions of 64 to 512 channels and 64 samples:
rows of one position reach 0.15 to 0.3 of the usual speed, and rows of two positions 0.3 to 0.9."""
PRODUCTS = ("conv", "linear", "attention")
"""Kinds of layers whose time is in products of matrices, which autocast computes in 16 bits."""
_CONVERSION_NBYTES = 6.0
"""Bytes that the conversion of an element between float32 and 16 bits reads and writes."""


def _padded(channels: int) -> int:
    return -(-channels // LANES) * LANES


@dataclass
class _Kept:
    """Sizes, per sample, of the tensors that are kept for the backward pass, by the number of the tensor.

    Masks and indices have the negative number of their layer's output.
    """

    elements: dict[int, float] = field(default_factory=dict)
    """Number of the tensor → number of its elements."""
    nbytes_16: dict[tuple[int, int], float] = field(default_factory=dict)
    """(Number of the tensor, 0 or the number of a converted copy of it) → bytes with autocast to 16 bits."""


class Net:
    """Builder of a layer table. It tracks the shape of one sample through the network.

    It also counts the elements that autograd keeps for the backward pass: inputs of layers with weights, of norms and
    of pools, and outputs of activations. A tensor counts once, even if several layers keep it.

    With autocast to 16 bits, convolutions and products have 16-bit inputs and outputs, and group and layer norms
    float32 ones. Other layers compute in the type of their input. A converted tensor counts besides the original, if
    both are kept (torch's rules for CUDA; tests/trainer/models/test_workload.py compares the sums with torch's own).

    With activation checkpointing (Chen et al. 2016), a block keeps only its input. When its backward pass begins, its
    forward pass runs again, up to the last tensor that the backward pass needs, and keeps what it would keep otherwise.
    """

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.layers: list[Layer] = []
        self.largest_elements = prod(shape)
        self._kept = _Kept()
        self._outside, self._blocks = _Kept(), list[_Kept]()
        """Tensors kept with activation checkpointing: those outside of blocks, and for each block those that are kept
        while its backward pass runs."""
        self._scope = self._outside
        self._needed = 0
        """Number of layers up to and including the last one whose forward pass yields a kept tensor."""
        self._copies = 0
        self._widths = {0: 4}
        """Number of a tensor → bytes of one of its elements (2 or 4) with autocast to 16 bits."""
        self._tensor = self._tensors = 0

    @property
    def at(self) -> tuple[tuple[int, ...], int]:
        """Return the current position: (shape of the current tensor, its number).

        Pass the position to ``go`` to begin another branch of the network there.
        """
        return self.shape, self._tensor

    def go(self, at: tuple[tuple[int, ...], int]) -> Self:
        self.shape, self._tensor = at
        return self

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Mark all layers that are added in this context as one module, such as a residual block."""
        begin = len(self.layers) + 1
        yield
        self.layers[begin:] = [replace(layer, follows=True) for layer in self.layers[begin:]]

    @contextmanager
    def block(self) -> Iterator[None]:
        """Mark all layers that are added in this context as a block: one module, which activation checkpointing wraps.

        Blocks are not nested.
        """
        begin, start = len(self.layers), self._tensor
        self._needed = begin
        self._keep_in(self._outside, self._widths[start], 0)
        self._scope = _Kept()
        with self.as_one():
            yield
        self._scope.elements.pop(start, None)
        self._scope.nbytes_16.pop((start, 0), None)
        self._blocks.append(self._scope)
        self._scope, end = self._outside, max(begin, self._needed)
        self.layers[begin:end] = [replace(layer, recomputable=True) for layer in self.layers[begin:end]]

    @property
    def kept_elements(self) -> float:
        """Return how many elements per sample are kept for the backward pass, including the network's input."""
        return sum(self._kept.elements.values())

    @property
    def kept_16_nbytes(self) -> float:
        """Return how many bytes per sample are kept for the backward pass with autocast to 16 bits."""
        return sum(self._kept.nbytes_16.values())

    @property
    def checkpointed_elements(self) -> float | None:
        """Return how many elements per sample are kept with activation checkpointing; None without blocks.

        They are the inputs of all blocks, what is kept outside of blocks, and what the largest block keeps while its
        backward pass runs.
        """
        if not self._blocks:
            return None
        return sum(self._outside.elements.values()) + max(sum(each.elements.values()) for each in self._blocks)

    @property
    def checkpointed_16_nbytes(self) -> float | None:
        """Return how many bytes per sample are kept with activation checkpointing and autocast to 16 bits."""
        if not self._blocks:
            return None
        return sum(self._outside.nbytes_16.values()) + max(sum(each.nbytes_16.values()) for each in self._blocks)

    def _keep(self, width: int) -> None:
        """Count the current tensor as kept for the backward pass. ``width``: its bytes per element with autocast."""
        # Each layer that needs another type converts the tensor for itself.
        self._copies += 1
        copy = 0 if width == self._widths[self._tensor] else self._copies
        for kept in (self._kept, self._scope):
            self._keep_in(kept, width, copy)
        self._needed = len(self.layers)

    def _keep_in(self, kept: _Kept, width: int, copy: int) -> None:
        elements = prod(self.shape)
        kept.elements[self._tensor] = max(kept.elements.get(self._tensor, 0), elements)
        kept.nbytes_16[self._tensor, copy] = width * elements

    def _keep_besides(self, elements: float, nbytes: float) -> None:
        """Count something else, such as a mask, as kept for the backward pass.

        ``elements``: its size in elements of 4 bytes, for float32. ``nbytes``: its size in bytes with autocast to 16
        bits.
        """
        for kept in (self._kept, self._scope):
            kept.elements[-self._tensor], kept.nbytes_16[-self._tensor, 0] = elements, nbytes
        self._needed = len(self.layers)

    def _emit(
        self,
        kind: str,
        out: tuple[int, ...],
        forward_FLOPs: float,
        parameters: int = 0,
        tensors: int = 0,
        keep: Literal["input", "output", "nothing"] = "input",
        has_weights: bool = False,
        in_float32: bool = False,
    ) -> Self:
        first = not any(layer.parameters for layer in self.layers)
        given = self._widths[self._tensor]
        width = 2 if kind in PRODUCTS else 4 if in_float32 else given
        if keep == "input":
            self._keep(width)
        # Forward reads the input and writes the output. Backward reads the output's gradient and the kept tensor, and
        # writes the input's gradient.
        moved = prod(self.shape) * (2 + (keep == "input")) + 2 * prod(out)
        backward = forward_FLOPs * (2 if has_weights and not first else 1)
        moved_16 = width * moved + 2 * _CONVERSION_NBYTES * prod(self.shape) * (width != given)  # in both passes
        forward = prod(self.shape) + prod(out)
        forward_16 = width * forward + _CONVERSION_NBYTES * prod(self.shape) * (width != given)
        self.layers.append(
            Layer(
                kind, parameters, tensors, forward_FLOPs, backward, moved, prod(out), kind == "conv", moved_16,
                forward_elements=forward, forward_16_nbytes=forward_16,
            )
        )  # fmt: skip
        if kind == "norm":
            self._needed = len(self.layers)  # its backward pass needs the mean and the deviation, which it computes
        self._tensors += 1
        self.shape, self._tensor, self._widths[self._tensors] = out, self._tensors, width
        self.largest_elements = max(self.largest_elements, prod(out))
        if keep == "output":
            self._keep(width)
        return self

    def conv(self, filters: int, k: int, stride: int = 1, pad: int | None = None, bias: bool = True) -> Self:
        c, h, w = self.shape
        pad = k // 2 if pad is None else pad
        out = (filters, (h + 2 * pad - k) // stride + 1, (w + 2 * pad - k) // stride + 1)
        weights = filters * c * k * k
        flops = 2.0 * weights * out[1] * out[2]
        self._emit("conv", out, flops, weights + filters * bias, 1 + bias, has_weights=True)
        # Kernels for images with at most three channels do not pad them.
        part = _padded(filters) / filters * (_padded(c) / c if c > 3 else 1.0) - 1
        self.layers[-1] = replace(self.layers[-1], padding_part=part, narrow_part=max(0.0, NARROW / max(1, out[2]) - 1))
        return self

    def linear(self, outputs: int, bias: bool = True, tied: bool = False) -> Self:
        """Add a linear layer. ``tied``: True if the layer uses another layer's weights."""
        *rest, inputs = self.shape
        flops = 2.0 * inputs * outputs * prod(rest)
        parameters = 0 if tied else inputs * outputs + outputs * bias
        return self._emit("linear", (*rest, outputs), flops, parameters, 0 if tied else 1 + bias, has_weights=True)

    def group_norm(self) -> Self:
        return self._emit("norm", self.shape, 8.0 * prod(self.shape), 2 * self.shape[0], 2, in_float32=True)

    def batch_norm(self) -> Self:
        return self._emit("norm", self.shape, 8.0 * prod(self.shape), 2 * self.shape[0], 2)

    def layer_norm(self) -> Self:
        return self._emit("norm", self.shape, 8.0 * prod(self.shape), 2 * self.shape[-1], 2, in_float32=True)

    def rms_norm(self) -> Self:
        """Add an RMSNorm. It keeps its input and its result before the weights, as Hugging Face's code does."""
        self._emit("norm", self.shape, 6.0 * prod(self.shape), self.shape[-1], 1, in_float32=True)
        self._keep_besides(prod(self.shape), 4 * prod(self.shape))
        return self

    def relu(self) -> Self:
        return self._emit("activation", self.shape, float(prod(self.shape)), keep="output")

    def tanh(self) -> Self:
        return self._function("output")

    def gelu(self) -> Self:
        return self._function("input")

    def silu(self) -> Self:
        return self._function("input")

    def multiply(self, other: tuple[tuple[int, ...], int]) -> Self:
        """Add a product by elements with another branch, of which both passes need both factors.

        ``other``: the position where the other branch ends.
        """
        here, elements = self.at, prod(self.shape)
        self.go(other)._keep(self._widths[other[1]])
        self.go(here)._emit("multiply", self.shape, float(elements))
        more, width = 3 * elements, self._widths[self._tensor]  # two reads and a gradient of the other factor
        layer = self.layers[-1]
        self.layers[-1] = replace(
            layer,
            moved_elements=layer.moved_elements + more,
            moved_16_nbytes=layer.moved_16_nbytes + width * more,
            forward_elements=layer.forward_elements + elements,
            forward_16_nbytes=layer.forward_16_nbytes + width * elements,
        )
        return self

    def rotary(self) -> Self:
        """Add rotary embeddings (Su et al. 2021), which turn pairs of features by angles that depend on positions."""
        return self._emit("rotary", self.shape, 4.0 * prod(self.shape), keep="nothing")

    def _function(self, keep: Literal["input", "output"]) -> Self:
        """Add an activation that computes an elementary function."""
        self._emit("activation", self.shape, 10.0 * prod(self.shape), keep=keep)
        self.layers[-1] = replace(self.layers[-1], function_elements=float(prod(self.shape)))
        return self

    def dropout(self) -> Self:
        """Add a dropout layer. It keeps a mask with one byte per element, as PyTorch does on GPUs."""
        self._emit("dropout", self.shape, float(prod(self.shape)), keep="nothing")
        self._keep_besides(prod(self.shape) / 4, prod(self.shape))
        return self

    def pool(self, k: int, stride: int | None = None, pad: int = 0, ceil: bool = False) -> Self:
        """Add a k x k max pool, which keeps indices of 8 bytes. ``ceil``: True if windows may extend over the edge."""
        stride = stride or k
        c, h, w = self.shape
        spare = (stride - 1) * ceil
        out = (c, (h + 2 * pad - k + spare) // stride + 1, (w + 2 * pad - k + spare) // stride + 1)
        self._emit("pool", out, float(k * k * prod(out)))
        self._keep_besides(2 * prod(out), 8 * prod(out))
        return self

    def global_pool(self) -> Self:
        return self._emit("pool", (self.shape[0],), float(prod(self.shape)), keep="nothing")

    def flatten(self) -> Self:
        self.shape = (prod(self.shape),)
        return self

    def add(self) -> Self:
        """Add a layer that adds a skip connection to the current tensor.

        With autocast, the sum is in float32 if the network has layers with float32 outputs, because the skip
        connection then depends on one of them.
        """
        wide = 4 in list(self._widths.values())[1:]
        return self._emit("add", self.shape, float(prod(self.shape)), keep="nothing", in_float32=wide)

    def concat(self, *ends: tuple[tuple[int, ...], int]) -> Self:
        """Add a layer that concatenates branches along the first axis. ``ends``: the positions where they end."""
        self.shape = (sum(shape[0] for shape, _ in ends), *self.shape[1:])
        return self._emit("concat", self.shape, 0.0, keep="nothing")

    def first_token(self) -> Self:
        """Continue with the first position of the sequence: from the shape (tokens, width) to (width,).

        This adds no layer. The whole sequence counts as kept for the backward pass, because the selection is a view.
        """
        self._keep(self._widths[self._tensor])
        self.shape = self.shape[1:]
        return self

    def embedding(self, vocabulary: int, width: int, positions: int | None = None, types: int = 0) -> Self:
        """Add embeddings of tokens, positions and token types, each with ``width`` elements.

        ``vocabulary``: number of different tokens. ``positions``: number of positions (default: the sequence's length).
        ``types``: number of token types.
        """
        (tokens,) = self.shape
        positions = tokens if positions is None else positions
        rows = vocabulary + positions + types
        tensors = 1 + (positions > 0) + (types > 0)
        return self._emit("embedding", (tokens, width), 0.0, rows * width, tensors, in_float32=True)

    def image_tokens(self) -> Self:
        """Turn an image (features, height, width) into a sequence of its pixels.

        A learned token comes before them, and a learned embedding of each position is added.
        """
        features, *sides = self.shape
        tokens = prod(sides) + 1
        return self._emit("embedding", (tokens, features), 0.0, (tokens + 1) * features, 2, "nothing", in_float32=True)

    def projections(self, width: int, shared: int | None = None, bias: bool = True, rotary: bool = False) -> Self:
        """Add linear layers for queries, keys and values, which have ``width`` features each. Call ``attention`` next.

        ``shared``: features of keys and of values if several heads of queries share each of their heads (grouped-query
        attention). They are then repeated for each head, as code without kernels for it does.
        """
        start = self.at
        for each in (width, shared or width, shared or width):
            self.go(start).linear(each, bias)
        if rotary:
            self.shape = (start[0][0], width + (shared or width))
            self.rotary()
        self.shape = (start[0][0], 3 * width)
        return self

    def attention(self, heads: int, fused: bool = True) -> Self:
        """Add scaled dot-product attention without its projections, from (tokens, 3 x width) to (tokens, width).

        ``fused``: True if the backward pass recomputes the scores, False if they are kept.
        """
        tokens, triple = self.shape
        flops = 2 * 2.0 * tokens * tokens * (triple // 3)
        out = (tokens, triple // 3)
        kept = self._tensor
        self._emit("attention", out, flops, has_weights=True)  # each product has gradients for two factors
        self.layers[-1] = replace(self.layers[-1], heads=heads, function_elements=float(heads * tokens * tokens))
        if not fused:
            for each in (self._kept, self._scope):
                each.elements[kept] += heads * tokens * tokens
                # The softmax has float32 outputs, which are converted for the next product.
                each.nbytes_16[kept, -1] = _CONVERSION_NBYTES * heads * tokens * tokens
        self._keep(2)
        return self
