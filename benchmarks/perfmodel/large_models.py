"""Predict published training steps of large transformers on A100s: ZeRO-2 and 3, data, tensor, pipeline parallelism.

``literature`` prints the table. Every row is predicted by the planner's own code from data sheets alone, with the
published device, number of GPUs, batch, micro-batches and activation checkpointing, on nodes with eight GPUs and the
published network. The layer tables have the published kernels and formats (``models.decoders``), which are not always
those of the trainer. ``ratio`` is predicted / published time of a step. Constants may be fitted to the rows of
``FITTED`` only. Left out: three kinds of parallelism at once, and selective activation checkpointing.

Where the prediction differs from the published run: with activation checkpointing, it stops at the last tensor that the
backward pass needs, where older runs computed whole blocks (6 % more operations). It reduces gradients in 32 bits.
Tensor parallelism splits pairs of linear layers, where Megatron-LM also splits the vocabulary.

Sources:

foundry: the tables of the README in scripts/train/benchmarking of mosaicml/llm-foundry (commit 8c8dd48): decoders with
    2,048 tokens, FULL_SHARD, bf16, nodes connected with 1600 Gbit/s. Their numbers of parameters are those of ours.
titan: docs/performance.md of pytorch/torchtitan (commit 0413364): FSDP2 on 64 A100-80GB, 4,096 tokens. The network is
    not stated; eight cards with 200 Gbit/s are assumed.
fms: the README of foundation-model-stack/fms-fsdp (commit 5a296af): FSDP on 128 A100-80GB, 400 Gbit/s, 4,096 tokens.
    3,700 tokens/s is the mean of a whole training, and 4,550 the speed of a compiled model. Nodes shard the state among
    their eight GPUs (HSDP) in the published run, and all GPUs in the prediction.
FlagPerf: training/nvidia/*/README.md of FlagOpen/FlagPerf (commit 1b5a030), eight A100 or A800, with the peak of the
    memory: llama2_7b-deepspeed (ZeRO-3), llama1_7B-paddle and gpt3_6.7B-paddle
    (ZeRO-2, and tensor parallelism with a sharded optimizer, float16), llama3_8B-megatron (8,192 tokens).
Narayanan: Narayanan et al. 2021 (arXiv 2104.04473), table 1: float16 with activation checkpointing on DGX A100 with
    eight cards of 200 Gbit/s. The time follows from the stated rate of operations and equation 3. The micro-batches are
    not stated; the fewest that fit are assumed.
vTrain: measured iterations of Megatron-DeepSpeed in VIA-Research/vTrain (commit f8dda84; arXiv 2312.12391): float16
    with activation checkpointing, 1F1B pipelines, nodes connected with 800 Gbit/s (config/validation/multi).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, inf
from statistics import median
from typing import Literal

from benchmarks.perfmodel.models.decoders import Method, Shape

from dlcontract import Precision
from dljob.cluster import ClusterView, Node, catalogue
from dljob.perf.resources import memory
from dljob.perf.step.model_split import cut_up
from dljob.perf.workload.workload import REAL_NBYTES, Workload, in_precision, recomputing
from dljob.planner import Choice, Prediction, Request
from dljob.planner.candidates.accumulation import accumulating
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.options import options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.strategies import model_split, zero
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate

A100_40, A100_80 = "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB"
NETWORK_Bps = 8 * 200e9 / 8
"""Bandwidth of a node with eight network cards of 200 Gbit/s in each direction."""
PER_NODE = 8

MIXED = Method(logit_nbytes=12.0)
"""FSDP with 16-bit parameters: everything is in 16 bits but the loss, whose logits are in float32 as well."""
AUTOCAST = Method(half_stream=False, logit_nbytes=14.0)
"""The trainer's tables. Hugging Face's Llama and Paddle's without a fused norm compute norms in float32, too."""
FOUNDRY = Method(logit_nbytes=4.0)
"""Logits and their gradient in 16 bits (``loss_fn: fused_crossentropy``), ``norm_type: low_precision_layernorm``."""
MEGATRON = Method(fused=False, logit_nbytes=14.0)
"""Attention in several kernels, with dropout. The loss converts logits to float32 and keeps their exponentials."""

GPT_1B, GPT_3B, GPT_7B, GPT_13B, GPT_30B, GPT_70B = (
    Shape(2048, 24, 16, 2048, 50_368),
    Shape(2560, 32, 20, 2048, 50_368),
    Shape(4096, 32, 32, 2048, 50_368),
    Shape(5120, 40, 40, 2048, 50_368),
    Shape(7168, 48, 56, 2048, 50_368),
    Shape(8192, 80, 64, 2048, 50_368),
)
FOUNDRY_PARAMETERS = {
    GPT_1B: 1_315_950_592, GPT_3B: 2_651_837_440, GPT_7B: 6_658_859_008, GPT_13B: 12_853_954_560,
    GPT_30B: 29_975_214_080, GPT_70B: 64_862_437_376,
}  # fmt: skip
"""Published numbers of parameters (NumParams)."""
MEGATRON_2B, MEGATRON_4B, MEGATRON_8B, MEGATRON_18B = (
    Shape(2304, 24, 24, 2048, 51_200),
    Shape(3072, 30, 32, 2048, 51_200),
    Shape(4096, 36, 32, 2048, 51_200),
    Shape(6144, 40, 48, 2048, 51_200),
)


GPT3_7B, GPT3_13B = Shape(4096, 32, 32, 2048, 50_304), Shape(5120, 40, 40, 2048, 50_304)


def llama_7b(tokens: int, method: Method = MIXED) -> Workload:
    return Shape(4096, 32, 32, tokens, 32_000).llama(method, 11_008, 32)


def llama_13b() -> Workload:
    return Shape(5120, 40, 40, 2048, 32_000).llama(MIXED, 13_824, 40)


def llama3_8b() -> Workload:
    return Shape(4096, 32, 32, 8192, 128_256).llama(MIXED, 14_336, 8)


def llama2_13b() -> Workload:
    return Shape(5120, 40, 40, 4096, 32_000).llama(MIXED, 13_824, 40)


def llama2_70b() -> Workload:
    return Shape(8192, 80, 64, 4096, 32_000).llama(MIXED, 28_672, 8)


Kind = Literal["Data", "ZeRO-2", "ZeRO-3", "Tensor", "Pipeline"]
Source = Literal["foundry 40GB", "foundry 80GB", "titan", "fms", "FlagPerf", "Narayanan", "vTrain"]
FITTED: Source = "foundry 40GB"
"""Source of the rows to which a constant may be fitted. All others are held out."""
WHOLE = 2**62
"""Size of a bucket that holds all gradients."""


class OneReduction(Request):
    """A request whose ranks reduce all gradients at once after the last backward pass, as Megatron-LM did."""

    @property
    def bucket_nbytes(self) -> int:
        return WHOLE


@dataclass(frozen=True)
class Row:
    """A published step of ``gpus`` GPUs. ``kind``: what splits the state, or the model among ``over`` ranks.

    With Tensor and Pipeline, the GPUs hold gpus / over replicas. ``published_GiB``: published peak of a GPU's memory.
    ``main_sharded``: replicas shard the float32 parameters and, with Tensor, the optimizer's state.
    """

    source: Source
    name: str
    model: Callable[[], Workload]
    device: str
    gpus: int
    batch: int
    published_s: float
    micro_batches: int | None
    recomputes: bool
    kind: Kind = "ZeRO-3"
    over: int = 1
    precision: Precision = "BF16"
    network_Bps: float = NETWORK_Bps
    published_GiB: float | None = None
    main_sharded: bool = False

    @property
    def plan(self) -> str:
        found = f"{self.gpus // self.over} x {self.kind.lower()} {self.over}" if self.over > 1 else self.kind
        return found + (", R" if self.recomputes else "")


def _foundry(
    name: str, shape: Shape, device: str, gpus: int, batch: int, accumulated: int, tokens_per_s: int, again: bool
) -> Row:
    source: Source = "foundry 40GB" if device == A100_40 else "foundry 80GB"
    step_s = batch * shape.tokens / tokens_per_s
    return Row(source, name, partial(shape.gpt, FOUNDRY), device, gpus, batch, step_s, accumulated, again)


def _titan(name: str, model: Callable[[], Workload], local: int, tokens_per_gpu_s: int, again: bool) -> Row:
    return Row("titan", name, model, A100_80, 64, 64 * local, local * 4096 / tokens_per_gpu_s, 1, again)


def _narayanan(name: str, shape: Shape, tensor: int, gpus: int, batch: int, rate_FLOPs: float) -> Row:
    """Equation 3: 96 B s l h² (1 + s / 6h + V / 16lh) operations, with those of activation checkpointing."""
    h, layers, s, v = shape.width, shape.blocks, shape.tokens, shape.vocabulary
    operations = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    step_s = operations / (gpus * rate_FLOPs)
    model = partial(shape.gpt, MEGATRON)
    kind: Kind = "Tensor" if tensor > 1 else "Data"
    return Row("Narayanan", name, model, A100_80, gpus, batch, step_s, None, True, kind, tensor, "FP16")


def _vtrain(
    name: str, shape: Shape, gpus: int, batch: int, micro: int, tensor: int, stages: int, step_ms: float
) -> Row:
    over = tensor * stages
    kind: Kind = "Pipeline" if stages > 1 else "Tensor" if tensor > 1 else "Data"
    model, k = partial(shape.gpt, MEGATRON), batch * over // gpus // micro
    return Row("vTrain", name, model, A100_80, gpus, batch, 1e-3 * step_ms, k, True, kind, over, "FP16", 1e11)


def _llama3(kind: Kind, over: int, tokens_per_gpu_s: float, peak_GiB: float) -> Row:
    step_s, k = 512 * 8192 / 8 / tokens_per_gpu_s, 512 * over // 8
    return Row(
        "FlagPerf", "Llama 3 8B", llama3_8b, A100_80, 8, 512, step_s, k, False, kind, over,
        published_GiB=peak_GiB, main_sharded=True,
    )  # fmt: skip


def _flagperf(
    name: str, model: Callable[[], Workload], kind: Literal["ZeRO-2", "ZeRO-3", "Tensor"], micro: int, k: int,
    tokens: int, tokens_per_gpu_s: float, again: bool, peak_GiB: float, device: str = A100_80,
) -> Row:  # fmt: skip
    over = 2 if kind == "Tensor" else 1
    batch = 8 // over * micro * k
    step_s = batch * tokens / 8 / tokens_per_gpu_s
    precision: Precision = "BF16" if kind == "ZeRO-3" else "FP16"
    return Row(
        "FlagPerf", name, model, device, 8, batch, step_s, k, again, kind, over, precision,
        published_GiB=peak_GiB, main_sharded=kind != "ZeRO-3",
    )  # fmt: skip


ROWS = (
    _foundry("GPT 1.3B", GPT_1B, A100_40, 8, 512, 8, 154_171, False),
    _foundry("GPT 3B", GPT_3B, A100_40, 8, 320, 8, 80_520, False),
    _foundry("GPT 3B", GPT_3B, A100_40, 16, 80, 1, 156_013, False),
    _foundry("GPT 3B", GPT_3B, A100_40, 64, 384, 1, 623_167, False),
    _foundry("GPT 7B", GPT_7B, A100_40, 8, 384, 4, 29_436, True),
    _foundry("GPT 7B", GPT_7B, A100_40, 16, 256, 1, 58_322, True),
    _foundry("GPT 7B", GPT_7B, A100_40, 32, 576, 1, 119_202, True),
    _foundry("GPT 7B", GPT_7B, A100_40, 64, 1152, 1, 234_614, True),
    _foundry("GPT 13B", GPT_13B, A100_40, 16, 160, 1, 31_900, True),
    _foundry("GPT 13B", GPT_13B, A100_40, 64, 1024, 1, 126_479, True),
    _foundry("GPT 30B", GPT_30B, A100_40, 32, 128, 1, 27_431, True),
    _foundry("GPT 1.3B", GPT_1B, A100_80, 8, 448, 4, 164_109, False),
    _foundry("GPT 3B", GPT_3B, A100_80, 8, 160, 2, 86_491, False),
    _foundry("GPT 7B", GPT_7B, A100_80, 8, 96, 2, 37_130, False),
    _foundry("GPT 13B", GPT_13B, A100_80, 8, 48, 3, 18_097, False),
    _foundry("GPT 30B", GPT_30B, A100_80, 8, 504, 21, 7_330, True),
    _foundry("GPT 70B", GPT_70B, A100_80, 32, 1024, 16, 11_962, True),
    _foundry("GPT 70B", GPT_70B, A100_80, 64, 2048, 4, 26_274, True),
    _titan("Llama 2 13B", llama2_13b, 2, 2162, False),
    _titan("Llama 2 70B", llama2_70b, 2, 353, True),
    Row("fms", "Llama 2 7B", partial(llama_7b, 4096), A100_80, 128, 256, 2 * 4096 / 3700, 1, False, network_Bps=5e10),
    Row("fms", "Llama 2 7B", partial(llama_7b, 4096), A100_80, 128, 256, 2 * 4096 / 4550, 1, False, network_Bps=5e10),
    _flagperf("Llama 2 7B", partial(llama_7b, 4096, AUTOCAST), "ZeRO-3", 1, 1, 4096, 3564, False, 57),
    _flagperf("Llama 2 7B", partial(llama_7b, 2048, AUTOCAST), "ZeRO-3", 3, 1, 2048, 3917, False, 70),
    _flagperf("Llama 2 7B", partial(llama_7b, 2048, AUTOCAST), "ZeRO-3", 3, 64, 2048, 4062, False, 70),
    _flagperf("Llama 7B", partial(llama_7b, 2048), "ZeRO-2", 4, 64, 2048, 4267, False, 70.09),
    _flagperf("Llama 7B", partial(llama_7b, 2048, AUTOCAST), "ZeRO-2", 2, 128, 2048, 2744, True, 33.55, A100_40),
    _flagperf("Llama 7B", partial(llama_7b, 2048), "Tensor", 4, 128, 2048, 3888, False, 58.73),
    _flagperf("Llama 13B", llama_13b, "ZeRO-2", 2, 128, 2048, 1707, True, 60.06),
    _flagperf("GPT-3 6.7B", partial(GPT3_7B.gpt, MIXED), "ZeRO-2", 4, 32, 2048, 4410, False, 66.27),
    _flagperf("GPT-3 6.7B", partial(GPT3_7B.gpt, MIXED), "Tensor", 4, 64, 2048, 4024, False, 54.65),
    _flagperf("GPT-3 13B", partial(GPT3_13B.gpt, MIXED), "ZeRO-2", 2, 64, 2048, 1784, True, 76.29),
    _llama3("Pipeline", 2, 3698.7, 76),
    _llama3("Pipeline", 4, 3306.5, 59),
    _llama3("Pipeline", 8, 2690.3, 55),
    _llama3("Tensor", 8, 2451.2, 30),
    _narayanan("GPT 1.7B", MEGATRON_2B, 1, 32, 512, 137e12),
    _narayanan("GPT 3.6B", MEGATRON_4B, 2, 64, 512, 138e12),
    _narayanan("GPT 7.5B", MEGATRON_8B, 4, 128, 512, 142e12),
    _narayanan("GPT 18.4B", MEGATRON_18B, 8, 256, 1024, 135e12),
    _vtrain("GPT 3.6B", MEGATRON_4B, 64, 512, 2, 1, 1, 3700.5),
    _vtrain("GPT 3.6B", MEGATRON_4B, 64, 512, 8, 2, 1, 3975.2),
    _vtrain("GPT 3.6B", MEGATRON_4B, 64, 512, 8, 4, 1, 4634.4),
    _vtrain("GPT 3.6B", MEGATRON_4B, 64, 512, 8, 8, 1, 5178.0),
    _vtrain("GPT 3.6B", MEGATRON_4B, 64, 512, 2, 1, 2, 4034.9),
    _vtrain("GPT 18.4B", MEGATRON_18B, 256, 1024, 8, 8, 1, 9603.6),
    _vtrain("GPT 18.4B", MEGATRON_18B, 256, 1024, 4, 1, 8, 12379.0),
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

    @property
    def memory_part(self) -> float:
        """Return the predicted memory of a rank, divided by that of its device."""
        device = catalogue.gpu(self.row.device)
        assert device is not None and device.memory_nbytes
        return self.memory_nbytes / device.memory_nbytes


@cache
def predicted(row: Row) -> Predicted:
    """Return the prediction of a row, whether or not its predicted memory is above the device's."""
    nodes = ceil(row.gpus / PER_NODE)
    cluster = ClusterView(
        tuple(
            Node(
                f"n{i}", row.device, PER_NODE, PER_NODE, 128, 128, 2**41, link_bandwidth_Bps=row.network_Bps,
                is_gpu=True,
            )
            for i in range(nodes)
        )
    )  # fmt: skip
    ask = OneReduction if row.source in ("Narayanan", "vTrain") else Request
    request = ask("literature", row.batch, 1, chooses_micro_batches=True, precision=row.precision)
    typed = in_precision(row.model(), row.precision)
    workload = recomputing(typed) if row.recomputes else typed
    (pool,) = eligible(request, cluster).pools
    (option,) = options(pool, Layout(PER_NODE, 1.0), workload, request, {})
    found = _prediction(row, Part(option, nodes), request, workload)
    return Predicted(row, found.step_s, found.memory_nbytes - _spared_nbytes(row, workload), found.communication_s)


def _spared_nbytes(row: Row, workload: Workload) -> int:
    """Return the memory that a rank of the published run saves, because replicas shard what ours hold whole."""
    if not row.main_sharded:
        return 0
    values = 1 + (0 if row.kind == "ZeRO-2" else workload.optimizer_slots)
    held = memory.MARGIN * values * REAL_NBYTES * workload.parameters / row.over
    return int(held * (1 - row.over / row.gpus))


def _prediction(row: Row, part: Part, request: Request, workload: Workload) -> Prediction:
    local = row.batch * row.over // row.gpus
    roomy = replace(part, option=replace(part.option, memory_nbytes=inf, largest_batch=local))
    if row.kind == "ZeRO-2" or row.kind == "ZeRO-3":
        assert row.micro_batches is not None
        candidate = zero.ZeroCandidate(roomy, 2 if row.kind == "ZeRO-2" else 3, row.micro_batches)
        return zero.predict(candidate, request, workload)
    for k in [row.micro_batches] if row.micro_batches else range(1, local + 1):
        at = roomy if row.micro_batches else part
        if row.kind == "Data":
            plan = evaluate([replace(at, option=accumulating(at.option, k))], "Torch", request, workload)
            found = plan.prediction if isinstance(plan, Choice) else plan
        else:
            found = model_split.predict(
                SplitCandidate(at, row.kind, "Torch", k, row.gpus // row.over), request, cut_up(workload)
            )
        if isinstance(found, Prediction):
            return found
    raise ValueError(f"{row.source}, {row.name} on {row.gpus} GPUs: does not fit")


def report() -> list[dict[str, object]]:
    """Return the table as objects for JSON."""
    return [
        {
            "source": row.source, "model": row.name, "device": row.device, "gpus": row.gpus, "batch": row.batch,
            "plan": row.plan, "published_s": row.published_s,
            "predicted_s": predicted(row).step_s, "ratio": predicted(row).ratio,
            "memory": predicted(row).memory_part,
        }
        for row in ROWS
    ]  # fmt: skip


def show() -> None:
    """Print the table."""
    print("\nLarge transformers on A100s, from data sheets: predicted beside published seconds of a step")
    print(
        f"{'source':12} {'model':12} {'GPUs':>16}  {'plan':18} {'published':>9} {'predicted':>9} {'ratio':>6} "
        f"{'communication':>13}  {'memory / device':>15}  {'/ published':>11}"
    )
    for row in ROWS:
        found = predicted(row)
        peak = f"{found.memory_nbytes / 2**30 / row.published_GiB:.2f}" if row.published_GiB else ""
        device = f"{row.gpus} x {row.device.removeprefix('NVIDIA-').replace('-SXM4', '')}"
        print(
            f"{row.source:12} {row.name:12} {device:>16}  {row.plan:18} {row.published_s:9.2f} {found.step_s:9.2f} "
            f"{found.ratio:6.2f} {found.communication_s:13.2f}  {found.memory_part:15.2f}  {peak:>11}"
        )
    for name, chosen in (("fitted", True), ("held out", False)):
        rows = [predicted(row) for row in ROWS if (row.source == FITTED) == chosen]
        ratios = [found.ratio for found in rows]
        print(
            f"{name}: {len(rows)} rows, ratio at the median {median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}); {sum(abs(ratio - 1) <= 0.15 for ratio in ratios)} within 15 %; "
            f"{sum(found.memory_part <= 1 for found in rows)} fit into memory"
        )
