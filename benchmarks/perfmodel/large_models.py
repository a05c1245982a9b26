"""Predict published training steps of large transformers on A100s: FSDP, data parallelism, and tensor parallelism.

``literature`` prints the table. Every row is predicted by the planner's own code from data sheets alone, with the
published device, number of GPUs, batch, micro-batches and activation checkpointing, on nodes with eight GPUs and the
published network. ``ratio`` is predicted / published time of a step.

Sources:

foundry: the tables of the README in scripts/train/benchmarking of mosaicml/llm-foundry (commit 061f2c7): decoders with
    2,048 tokens, FULL_SHARD, bf16, nodes connected with 1600 Gbit/s. Their numbers of parameters are those of ours.
    With mixed precision PURE (A100-40GB), gradients are exchanged in 16 bits, and the prediction assumes 32.
titan: docs/performance.md of pytorch/torchtitan (commit 0413364): FSDP2 on 64 A100-80GB, 4,096 tokens. The network is
    not stated; eight cards with 200 Gbit/s are assumed. Rows with selective activation checkpointing are left out.
Narayanan: Narayanan et al. 2021 (arXiv 2104.04473), table 1: float16 with activation checkpointing on DGX A100 with
    eight cards of 200 Gbit/s. The time follows from the stated rate of operations and equation 3. The micro-batches are
    not stated; the fewest that fit are assumed. Rows with three kinds of parallelism are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Literal

from dlcontract import Precision
from dljob.cluster import ClusterView, Node
from dljob.perf.step.model_split import cut_up
from dljob.perf.workload.datasets import Dataset
from dljob.perf.workload.layers import Net
from dljob.perf.workload.models import decoder
from dljob.perf.workload.workload import Workload, in_precision, of_layers, recomputing
from dljob.planner import Choice, Prediction, Request
from dljob.planner.candidates.accumulation import accumulating
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.options import options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.strategies import zero
from dljob.planner.candidates.strategies.model_split import predict
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate

A100_40, A100_80 = "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB"
NETWORK_Bps = 8 * 200e9 / 8
"""Bandwidth of a node with eight network cards of 200 Gbit/s in each direction."""
PER_NODE = 8


@dataclass(frozen=True)
class Shape:
    """A decoder: width, layers, heads, tokens of a sample, and vocabulary."""

    width: int
    blocks: int
    heads: int
    tokens: int
    vocabulary: int

    def gpt(self) -> Workload:
        """Return a GPT-2 with this shape."""
        data = self._data()
        return of_layers("GPT", decoder(data, self.width, self.blocks, self.heads), data, "AdamW")

    def llama(self, hidden: int, pairs: int) -> Workload:
        """Return a Llama: three matrices of ``hidden`` features in each feed-forward layer, ``pairs`` key-value heads.

        Positions and biases of norms are those of a GPT-2, which adds less than half a per cent of the parameters.
        """
        data = self._data()
        net = Net(*data.shape).embedding(data.classes, self.width)
        keys = 2 * pairs * self.width // self.heads
        for _ in range(self.blocks):
            with net.block():
                net.layer_norm().linear(self.width + keys, bias=False)
                net.go(((self.tokens, 3 * self.width), net.at[1])).attention(self.heads)
                net.linear(self.width, bias=False).add().layer_norm().linear(2 * hidden, bias=False).gelu()
                net.go(((self.tokens, hidden), net.at[1])).linear(self.width, bias=False).add()
        with net.as_one():
            net.layer_norm().linear(data.classes, bias=False)
        return of_layers("Llama", net, data, "AdamW")

    def _data(self) -> Dataset:
        return Dataset(10**6, 0, (self.tokens,), self.vocabulary, self.tokens * 8)


GPT_3B, GPT_7B, GPT_13B, GPT_30B = (
    Shape(2560, 32, 20, 2048, 50_368),
    Shape(4096, 32, 32, 2048, 50_368),
    Shape(5120, 40, 40, 2048, 50_368),
    Shape(7168, 48, 56, 2048, 50_368),
)
FOUNDRY_PARAMETERS = {
    GPT_3B: 2_651_837_440, GPT_7B: 6_658_859_008, GPT_13B: 12_853_954_560, GPT_30B: 29_975_214_080,
}  # fmt: skip
"""Published numbers of parameters (NumParams)."""


def llama2_13b() -> Workload:
    return Shape(5120, 40, 40, 4096, 32_000).llama(13_824, 40)


def llama2_70b() -> Workload:
    return Shape(8192, 80, 64, 4096, 32_000).llama(28_672, 8)


@dataclass(frozen=True)
class Row:
    """A published step. ``tensor``: ranks of a tensor-parallel group; None: FSDP (ZeRO-3)."""

    source: Literal["foundry", "titan", "Narayanan"]
    name: str
    model: Callable[[], Workload]
    device: str
    gpus: int
    batch: int
    published_s: float
    micro_batches: int | None
    recomputes: bool
    tensor: int | None = None
    precision: Precision = "BF16"


def _foundry(
    name: str, shape: Shape, device: str, gpus: int, batch: int, accumulated: int, tokens_per_s: int, again: bool
) -> Row:
    step_s = batch * shape.tokens / tokens_per_s
    return Row("foundry", name, shape.gpt, device, gpus, batch, step_s, accumulated, again)


def _titan(name: str, model: Callable[[], Workload], local: int, tokens_per_gpu_s: int, again: bool) -> Row:
    return Row("titan", name, model, A100_80, 64, 64 * local, local * 4096 / tokens_per_gpu_s, 1, again)


def _narayanan(name: str, shape: Shape, tensor: int, gpus: int, batch: int, rate_FLOPs: float) -> Row:
    """Equation 3: 96 B s l h² (1 + s / 6h + V / 16lh) operations, with those of activation checkpointing."""
    h, layers, s, v = shape.width, shape.blocks, shape.tokens, shape.vocabulary
    operations = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    step_s = operations / (gpus * rate_FLOPs)
    return Row("Narayanan", name, shape.gpt, A100_80, gpus, batch, step_s, None, True, tensor, "FP16")


ROWS = (
    _foundry("GPT 3B", GPT_3B, A100_40, 8, 320, 8, 80_520, False),
    _foundry("GPT 3B", GPT_3B, A100_40, 16, 80, 1, 156_013, False),
    _foundry("GPT 3B", GPT_3B, A100_40, 64, 384, 1, 623_167, False),
    _foundry("GPT 7B", GPT_7B, A100_80, 8, 96, 2, 37_130, False),
    _foundry("GPT 7B", GPT_7B, A100_40, 8, 384, 4, 29_436, True),
    _foundry("GPT 7B", GPT_7B, A100_40, 16, 256, 1, 58_322, True),
    _foundry("GPT 7B", GPT_7B, A100_40, 32, 576, 1, 119_202, True),
    _foundry("GPT 7B", GPT_7B, A100_40, 64, 1152, 1, 234_614, True),
    _foundry("GPT 13B", GPT_13B, A100_40, 64, 1024, 1, 126_479, True),
    _foundry("GPT 30B", GPT_30B, A100_40, 32, 128, 1, 27_431, True),
    _titan("Llama 2 13B", llama2_13b, 2, 2162, False),
    _titan("Llama 2 70B", llama2_70b, 2, 353, True),
    _narayanan("GPT 1.7B", Shape(2304, 24, 24, 2048, 51_200), 1, 32, 512, 137e12),
    _narayanan("GPT 3.6B", Shape(3072, 30, 32, 2048, 51_200), 2, 64, 512, 138e12),
    _narayanan("GPT 7.5B", Shape(4096, 36, 32, 2048, 51_200), 4, 128, 512, 142e12),
    _narayanan("GPT 18.4B", Shape(6144, 40, 48, 2048, 51_200), 8, 256, 1024, 135e12),
)


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction. ``ratio``: predicted / published time.

    The published plans ran, so a predicted memory above that of the device is too large.
    """

    row: Row
    step_s: float
    memory_nbytes: int
    communication_s: float

    @property
    def ratio(self) -> float:
        return self.step_s / self.row.published_s


@cache
def predicted(row: Row) -> Predicted:
    """Return the prediction of a row. Raise ValueError if the published plan would not fit into memory."""
    nodes = ceil(row.gpus / PER_NODE)
    cluster = ClusterView(
        tuple(
            Node(f"n{i}", row.device, PER_NODE, PER_NODE, 128, 128, 2**41, link_bandwidth_Bps=NETWORK_Bps, is_gpu=True)
            for i in range(nodes)
        )
    )
    request = Request("literature", row.batch, 1, chooses_micro_batches=True, precision=row.precision)
    typed = in_precision(row.model(), row.precision)
    workload = recomputing(typed) if row.recomputes else typed
    (pool,) = eligible(request, cluster).pools
    (option,) = options(pool, Layout(PER_NODE, 1.0), workload, request, {})
    found = _prediction(row, Part(option, nodes), request, workload)
    if found is None:
        raise ValueError(f"{row.source}, {row.name} on {row.gpus} GPUs: does not fit")
    return Predicted(row, found.step_s, found.memory_nbytes, found.communication_s)


def _prediction(row: Row, part: Part, request: Request, workload: Workload) -> Prediction | None:
    if row.tensor is None:
        k = row.micro_batches
        fewest = zero.candidate(part, 3, request, workload)
        candidate = zero.ZeroCandidate(part, 3, k) if k else fewest
        return None if candidate is None else zero.predict(candidate, request, workload)
    for k in range(1, row.batch * row.tensor // row.gpus + 1):
        if row.tensor == 1:
            found = evaluate([replace(part, option=accumulating(part.option, k))], "Torch", request, workload)
            if isinstance(found, Choice):
                return found.prediction
        else:
            parts = SplitCandidate(part, "Tensor", "Torch", k, row.gpus // row.tensor)
            split = predict(parts, request, cut_up(workload))
            if isinstance(split, Prediction):
                return split
    return None


def report() -> list[dict[str, object]]:
    """Return the table as objects for JSON."""
    return [
        {
            "source": row.source, "model": row.name, "device": row.device, "gpus": row.gpus, "batch": row.batch,
            "tensor": row.tensor, "recomputes": row.recomputes, "published_s": row.published_s,
            "predicted_s": predicted(row).step_s, "ratio": predicted(row).ratio,
            "memory_nbytes": predicted(row).memory_nbytes,
        }
        for row in ROWS
    ]  # fmt: skip


def show() -> None:
    """Print the table."""
    print("\nLarge transformers on A100s, from data sheets: predicted beside published seconds of a step")
    print(
        f"{'source':10} {'model':12} {'GPUs':>16}  {'plan':22} {'published':>9} {'predicted':>9} {'ratio':>6}  memory"
    )
    for row in ROWS:
        found = predicted(row)
        plan = "FSDP" if row.tensor is None else f"{row.gpus // row.tensor} x tensor {row.tensor}"
        plan += ", recomputing" if row.recomputes else ""
        device = f"{row.gpus} x {row.device.removeprefix('NVIDIA-').replace('-SXM4', '')}"
        print(
            f"{row.source:10} {row.name:12} {device:>16}  {plan:22} {row.published_s:9.2f} {found.step_s:9.2f} "
            f"{found.ratio:6.2f}  {found.memory_nbytes / 2**30:.0f} GiB"
        )
