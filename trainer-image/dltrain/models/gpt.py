"""A small decoder-only transformer like GPT-2 (Radford et al. 2019): layer norm comes first, embeddings are tied."""

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from dltrain.models.layers import Layer, Pair

LAYERS, HEADS, WIDTH = 4, 4, 128


class Block(nn.Module):
    """A transformer block: x = x + attention(norm(x)), then x + mlp(norm(x)) with 4 ``width`` hidden features."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output. Input and output have the shape (samples, positions, width)."""
        samples, positions, _ = x.shape
        # -1 stands for the number of heads on this rank, because a tensor-parallel rank computes only some of them.
        heads = self.qkv(self.norm1(x)).view(samples, positions, 3, -1, self._head_width).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, positions, -1))
        y: Tensor = self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + y


class GPT(nn.Module):
    """A model from tokens (samples, positions) to logits of the next tokens (samples, positions, vocabulary)."""

    def __init__(self, positions: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(positions, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual branches are scaled down with depth (GPT-2, section 2.3).
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * LAYERS) if deep else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.embed(tokens))
        return self.head(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: map (samples, positions) to (samples, positions, width)."""
        x: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return x

    def head(self, x: Tensor) -> Tensor:
        """Return logits, computed with the weights of the token embedding."""
        return linear(self.norm(x), self.token.weight)

    def layers(self) -> list[Layer]:
        """Return the layers, for pipeline parallelism. The first and the last layer share the token embedding."""
        first = Layer(self.embed, (self.token.weight, self.position.weight))
        last = Layer(self.head, (*self.norm.parameters(), self.token.weight))
        return [first, *(Layer(block, tuple(block.parameters())) for block in self.blocks), last]

    def pairs(self) -> list[Pair]:
        """Return the pairs of linear layers that tensor parallelism splits over ranks: two pairs in each block.

        The pair of the attention is split by heads, and that of the MLP by hidden features.
        """
        names = [f"blocks.{index}" for index in range(len(self.blocks))]
        attention = [Pair(f"{name}.qkv", f"{name}.out", units=HEADS, blocks=3) for name in names]
        return attention + [Pair(f"{name}.up", f"{name}.down", units=4 * WIDTH) for name in names]


def gpt_mini(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a GPT of 4 layers, 4 heads and width 128 for ``shape`` = (positions,) and ``classes`` tokens.

    The model has 842,496 parameters for 128 positions and a vocabulary of 256.
    """
    if len(shape) != 1:
        raise ValueError(f"found samples of shape {shape}; expected sequences of tokens, of shape (positions,)")
    return GPT(shape[0], classes)
