"""Layer tables of decoders as published training runs computed them, which is not always as the trainer would.

The trainer's own tables (``perf.workload.models``) assume autocast and fused attention: norms, embeddings and residual
sums are in float32. A published run may differ in the points of ``Method``. Each has its source in ``large_models``.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Self

from dljob.perf.workload.datasets import Dataset
from dljob.perf.workload.layers import Net
from dljob.perf.workload.models import add_block
from dljob.perf.workload.workload import HALF_NBYTES, Workload, of_layers

SCORE_NBYTES = 13.0, 19.0
"""Bytes that forward and backward pass read and write for each score of attention without a fused kernel, in 16 bits.

Forward: the first product writes scores (2); mask and softmax are one kernel (2 + 2); dropout (2 + 2, and 1 for its
mask); the second product reads (2). Backward: the second product writes a gradient (2) and reads what dropout yielded
(2); dropout (2 + 1 + 2); softmax reads its output and a gradient and writes a gradient (2 + 2 + 2), which two products
read (2 + 2)."""
SCORE_KEPT_NBYTES = 5.0
"""Bytes that are kept for each of these scores: outputs of softmax and dropout, and the mask (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.1)."""


@dataclass(frozen=True)
class Method:
    """How a published run computed a decoder.

    ``half_stream``: norms, embeddings and residual sums are in 16 bits, because the parameters are. ``fused``:
    attention is one kernel, which keeps no scores. ``logit_nbytes``: bytes for each logit at the end of the forward
    pass: the logits, what the loss keeps, and their gradient.
    """

    half_stream: bool = True
    fused: bool = True
    logit_nbytes: float = 8.0


class PublishedNet(Net):
    """Builder of the layer table of a published run, with 16-bit precision."""

    def __init__(self, method: Method, *shape: int) -> None:
        super().__init__(*shape)
        self.method = method

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
        wide = in_float32 and not self.method.half_stream
        return super()._emit(kind, out, forward_FLOPs, parameters, tensors, keep, has_weights, wide)

    def attention(self, heads: int, fused: bool = True) -> Self:
        tokens, number = self.shape[0], self._tensor
        super().attention(heads, fused)
        if not self.method.fused:
            scores = float(heads * tokens * tokens)
            forward, backward = SCORE_NBYTES
            layer = self.layers[-1]
            self.layers[-1] = replace(
                layer,
                moved_16_nbytes=layer.moved_16_nbytes + (forward + backward) * scores,
                forward_16_nbytes=layer.forward_16_nbytes + forward * scores,
            )
            for kept in (self._kept, self._scope):
                kept.nbytes_16[number, -1] = SCORE_KEPT_NBYTES * scores
        return self

    def grouped_attention(self, heads: int, width: int) -> Self:
        """Add attention with fewer heads of keys and values than of queries, which have ``width`` features together.

        It computes what usual attention computes, but keeps fewer keys and values.
        """
        (tokens, _), number = self.at
        kept_nbytes = float(HALF_NBYTES * prod(self.shape))
        self.go(((tokens, 3 * width), number)).attention(heads)
        for kept in (self._kept, self._scope):
            kept.nbytes_16[number, 0] = kept_nbytes
        return self


@dataclass(frozen=True)
class Shape:
    """A decoder: width, layers, heads, tokens of a sample, and vocabulary."""

    width: int
    blocks: int
    heads: int
    tokens: int
    vocabulary: int

    def gpt(self, method: Method) -> Workload:
        """Return a GPT-2 with this shape."""
        net = PublishedNet(method, self.tokens).embedding(self.vocabulary, self.width)
        for _ in range(self.blocks):
            add_block(net, self.heads)
        return self._workload("GPT", net, method, tied=True)

    def llama(self, method: Method, hidden: int, pairs: int) -> Workload:
        """Return a Llama: three matrices of ``hidden`` features in each feed-forward layer, ``pairs`` key-value heads.

        Positions and biases of norms are those of a GPT-2, which adds less than half a per cent of the parameters.
        """
        net = PublishedNet(method, self.tokens).embedding(self.vocabulary, self.width)
        keys = 2 * pairs * self.width // self.heads
        for _ in range(self.blocks):
            with net.block():
                net.layer_norm().linear(self.width + keys, bias=False).grouped_attention(self.heads, self.width)
                net.linear(self.width, bias=False).add().layer_norm().linear(2 * hidden, bias=False).gelu()
                net.go(((self.tokens, hidden), net.at[1])).linear(self.width, bias=False).add()
        return self._workload("Llama", net, method, tied=False)

    def _workload(self, name: str, net: Net, method: Method, *, tied: bool) -> Workload:
        """Add the output layer. The largest activation with its gradient is the logits', or one within a block."""
        block = max(layer.output_elements for layer in net.layers)
        with net.as_one():
            net.layer_norm().linear(self.vocabulary, bias=False, tied=tied)
        data = Dataset(10**6, 0, (self.tokens,), self.vocabulary, self.tokens * 8)
        logits_nbytes = method.logit_nbytes * self.tokens * self.vocabulary
        found = of_layers(name, net, data, "AdamW")
        return replace(found, transient_nbytes=max(2.0 * HALF_NBYTES * block, logits_nbytes))
