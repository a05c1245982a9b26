"""Cost of one layer of a network, and the modules that layers form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layer:
    """Costs of one layer, per sample except where stated. An element has 4 bytes."""

    kind: str
    parameters: int
    """Number of trainable parameters, not per sample."""
    tensors: int
    """Number of tensors that hold the parameters, not per sample."""
    forward_FLOPs: float
    backward_FLOPs: float
    moved_elements: float
    """Elements that the forward and the backward pass read and write, without parameters."""
    output_elements: float = 0.0
    is_conv: bool = False
    moved_16_nbytes: float = 0.0
    """Bytes that both passes read and write with autocast to 16 bits, without parameters, but with conversions."""
    follows: bool = False
    """True if the trainer treats this layer and the previous one as one module, which pipeline stages never divide."""
    recomputable: bool = False
    """True if the layer is in a block, and activation checkpointing computes its forward pass again."""
    forward_elements: float = 0.0
    """The part of ``moved_elements`` that the forward pass reads and writes."""
    forward_16_nbytes: float = 0.0
    """The part of ``moved_16_nbytes`` that the forward pass reads and writes."""
    heads: int = 0
    """Number of attention heads; 0 for other layers."""
    padding_part: float = 0.0
    """Additional operations of a convolution whose kernels pad channels to ``LANES``, as a part of its operations."""
    narrow_part: float = 0.0
    """Additional time of a convolution with short output rows (``NARROW``) on CPUs, as a part of its operations."""
    function_elements: float = 0.0
    """Elements of which both passes compute an elementary function, per sample: exponentials of attention scores, GELU
    and tanh. They take longer than memory traffic or usual operations."""
    weight_accesses: int = 3
    """How often both passes access the parameters: each reads them, and the backward pass writes their gradients."""

    def recomputed(self) -> "Layer":
        """Return the layer with activation checkpointing: if it is in a block, its forward pass runs twice."""
        if not self.recomputable:
            return self
        return replace(
            self,
            backward_FLOPs=self.backward_FLOPs + self.forward_FLOPs,
            moved_elements=self.moved_elements + self.forward_elements,
            moved_16_nbytes=self.moved_16_nbytes + self.forward_16_nbytes,
            function_elements=1.5 * self.function_elements,
            weight_accesses=self.weight_accesses + 1,
        )


def modules_of(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Return the layers of each module, in their order. A layer with ``follows`` is in the module of the one before."""
    found: list[list[Layer]] = []
    for layer in layers:
        if layer.follows:
            found[-1].append(layer)
        else:
            found.append([layer])
    return found


def largest_unit(layers: Sequence[Layer]) -> int:
    """Return the parameters of the largest module that ranks gather at once when they shard the model.

    These modules are the blocks, and everything outside of them together. Without blocks, it is the largest layer.
    """
    blocks = [module for module in modules_of(layers) if any(layer.recomputable for layer in module)]
    if not blocks:
        return max((layer.parameters for layer in layers), default=0)
    sizes = [sum(layer.parameters for layer in block) for block in blocks]
    return max(*sizes, sum(layer.parameters for layer in layers) - sum(sizes))
