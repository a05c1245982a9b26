"""Memory of a rank and of a pod, and the size of a pod's /dev/shm.

The memory is a fixed amount, plus an amount for each sample in the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from dlcontract import CollectiveName
from dljob.cluster.catalogue import TermFactors
from dljob.perf.workload import structure
from dljob.perf.workload.workload import REAL_NBYTES, Workload

PROCESS_NBYTES = 384 * 2**20
"""Main memory of a rank before it trains: Python, PyTorch 2.13's CUDA build with its compiler and optimizers, MPI.
After these imports and one AdamW step, 364 MiB are anonymous (after a bare ``import torch``: 283 MiB). Another 303 MiB
are mapped files, which the pods of a node share and the kernel can drop."""
AGENT_NBYTES = 128 * 2**20
"""Main memory of a pod besides its ranks: the agent, its preloaded interpreter and MPI's daemon. A pod that trains
digits-cnn peaked at only 226 MiB, because its rank shares most of the interpreter with the agent. A rank that runs a
training script shares nothing."""
STORE_CLIENT_NBYTES = 160 * 2**20
"""Main memory for the client of an object store with checkpoints, and for the parts that are on their way. A process
that wrote and read an object of 240 MiB in parts of 8 MiB peaked at 132 MiB. A pod has one client, or one for each rank
that uploads its part of a checkpoint (strategy Sharded)."""
GPU_PROCESS_NBYTES = 2 * 2**30
"""Main memory of a rank that trains on a GPU, besides training state and batches: CUDA's libraries and context, pinned
memory and NCCL's buffers. Single ranks on an H200 peaked at 1.1 to 1.5 GiB, mapped files included. The value is
generous, because it determines the pod's memory limit, and GPU nodes have far more main memory per GPU."""
GPU_CONTEXT_NBYTES = 850 * 2**20
"""GPU memory that CUDA and its libraries use besides PyTorch's allocator: 821 to 841 MiB on an H200 with PyTorch 2.11
and CUDA 13 (benchmarks/gpu/predictions.py)."""
GPU_WORKSPACE_NBYTES = 128 * 2**20
"""Memory of PyTorch's allocator for the workspaces of cuBLAS and cuDNN: 30 to 110 MiB in the same measurements."""
SHM_PER_RANK_NBYTES = 128 * 2**20
"""Size of /dev/shm per rank on CPUs. It holds Open MPI's shared-memory segments and the newest training state, from
which the rank can restart."""
SHM_PER_GPU_NBYTES = 512 * 2**20
"""Size of /dev/shm per rank on a GPU. NCCL needs 10 MB for each connection between GPUs that cannot access each other's
memory (T4s: two to four channels to each neighbour, both ways), and fails without that space."""
MARGIN = 1.1
"""Factor on the predicted memory of GPU ranks. It covers what allocators lose by rounding and fragmentation."""
GROWTH_MARGIN = 1.25
"""Factor on the predicted main memory of a rank on CPUs, because Kubernetes kills a pod that exceeds its limit. With
this factor, 98 of 100 generated networks need less than predicted (benchmarks/perfmodel/structure_regression.py)."""
PART: Mapping[str, float] = {"process": 2.8e7, "parameter_B": 1.25, "kept_B": 1.9, "largest_B": 1.25}
"""Term of ``structure.GROWTH`` → bytes for a rank with a part of a model on CPUs, or for one byte of the term.

Kernels of convolutions copy tensors to other layouts, so that kept activations count nearly twice. The values are above
the measurements to which they were fitted. Of 33 later ones (``benchmarks/training/model_split/memory.py``, two
rounds), one was 2 % above. ``PART_MARGIN`` covers it."""
PART_MARGIN = 1.08
"""Factor on the predicted main memory of a rank with a part of a model on CPUs, beside its process."""
EARLY_MESSAGE = 1.1
"""Bytes that MPI takes for a byte of a message that arrives before its receive is posted. Over TCP, messages are below
the eager limit, so that MPI stores them: 64 MiB in messages of 56 KiB took 70 MiB in the receiver, once for all steps,
and 6 MiB in the sender (``benchmarks/training/early_messages.py``). Between ranks of a pod, they stay in the sender's
buffer, apart from up to 16 MiB in /dev/shm, for which ``SHM_PER_RANK_NBYTES`` has room."""
RECEIVE_WINDOW = 0.125
"""Bytes of posted receives for a byte of gradients: four segments of up to 128 KiB for each bucket of 4 MiB."""
CONVOLUTIONS_REPLICATED = 2.0
"""Additional bytes for a byte of a part's parameters if a model with convolutions, or one that may have some, has
replicas. In 8 runs of two replicas of two stages of resnet18, the peaks of the larger stage, whose parameters take 40
MiB, were 170 to 172 MiB in 6 ranks and 220 to 238 in 10. It is memory of the heap that the others did not need. If the
ranks reduced the empty gradients once before the first step, this happened to 2 of 8, so that presumably what MPI
allocates between the passes splits blocks that gradients of 9 MiB had before."""


@dataclass(frozen=True)
class Factors:
    """Main memory of a rank's tensors on CPUs."""

    parameter_B: float
    """Bytes for a byte of parameters, gradients and optimizer state."""
    kept_B: float
    """Bytes for a byte of samples and activations that are kept for the backward pass."""
    largest_B: float
    """Bytes for a byte of the largest activations that exist only briefly."""
    update_nbytes: float = 0.0
    """Bytes of temporaries while a parameter is updated."""


COPYING = Factors(PART["parameter_B"], PART["kept_B"], PART["largest_B"])
"""For a part of a model whose kernels may copy tensors to other layouts."""
DENSE = Factors(1.2, 1.4, PART["largest_B"])
"""For whole and for split models without convolutions and recurrent layers.

Their kernels copy no tensors to other layouts: tensors count once, and the rest is what the heap loses between blocks
of different sizes, and the temporaries of an optimizer's update.

Peaks of 21 cases are 0.69 to 0.94 times the result: decoders of 10, 25 and 50 million parameters and networks of linear
layers with 25 million, whole and split (``benchmarks/training/model_split/script_memory.py``), and gpt-mini."""
REUSING = Factors(1.0, 1.0, 1.0)
"""As ``DENSE``, for ranks in whose heap a later tensor fits into the block of a freed one (``Workload.reuses_blocks``),
if the largest parameter and the largest activation are known.

Every tensor counts once, so that no value is fitted. Of 62 peaks of decoders and networks of linear layers with 9 to 50
million parameters, whole and split, and 8 of gpt-mini, all are 0.68 to 0.97 times the result (``docs/design/0016``)."""
UPDATE_COPIES = 2.0
"""Tensors of the size of a parameter that exist only while Adam updates it: the square root of the second moment, and
the quotient. Before, in the backward pass, its gradient exists twice until it is added to the gradient buffer."""
PREFETCHED_BATCHES = 2
"""Batches that the data-loading thread, or each data-loading process, prepares in advance."""
WORKER_NBYTES = 64 * 2**20
"""Main memory of a data-loading process besides its batches: 8 MiB after its start (it shares the rest with the agent's
interpreter), and room for a dataset's imports."""
MAX_SAMPLES = 2**31 - 1
"""Maximum batch size that the API accepts. It also bounds ``largest_batch`` if samples need hardly any memory."""


def fixed_nbytes(workload: Workload) -> float:
    """Return the bytes of parameters, gradients (one buffer), optimizer state and the 16-bit copies of autocast."""
    return (2 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters + workload.parameter_copies_nbytes


@lru_cache(maxsize=256)
def sharded(workload: Workload, ranks: int) -> Workload:
    """Return the workload with the optimizer state that one of ``ranks`` ranks holds if they shard the optimizer.

    This is ZeRO-1 (Rajbhandari et al. 2020). For a checkpoint, rank 0 gathers and copies all of the state.
    """
    gathered = int(workload.optimizer_slots * REAL_NBYTES * workload.parameters) if workload.copied_nbytes else 0
    slots = workload.optimizer_slots / ranks
    return replace(workload, optimizer_slots=slots, copied_nbytes=workload.copied_nbytes + gathered)


def sample_nbytes(workload: Workload) -> float:
    """Return the memory in bytes that each sample adds to the memory of a rank.

    It is the sum of three parts: the activations that are kept for the backward pass, the largest activation with its
    gradient, which exist only briefly, and a sample in each of the ``PREFETCHED_BATCHES`` batches loaded in advance.
    """
    return workload.activation_nbytes + workload.transient_nbytes + PREFETCHED_BATCHES * workload.sample_nbytes


@lru_cache(maxsize=64)
def _coefficients(growth: TermFactors) -> dict[str, float]:
    """Return the coefficients of a rank's memory on CPUs. ``growth``: measured factors of some of them."""
    measured = dict(growth)
    units = structure.GROWTH_UNIT
    return {
        name: measured[name] * units[name] if name in measured else value for name, value in structure.GROWTH.items()
    }


def on_gpu_nbytes(tensors_nbytes: float) -> float:
    """Return the GPU memory in bytes of a rank whose tensors take ``tensors_nbytes``."""
    return GPU_CONTEXT_NBYTES + GPU_WORKSPACE_NBYTES + MARGIN * tensors_nbytes


def dense_factors(workload: Workload) -> Factors | None:
    """Return the factors of a workload's tensors on CPUs; None if it may have convolutions or recurrent layers."""
    if not workload.is_dense:
        return None
    if not workload.counts_once:
        return DENSE
    return replace(REUSING, update_nbytes=UPDATE_COPIES * (workload.largest_parameter_nbytes or 0))


def held_nbytes(
    parameter_nbytes: float,
    kept_nbytes: float,
    largest_nbytes: float,
    is_gpu: bool,
    growth: TermFactors = (),
    has_convolutions: bool = True,
    dense: Factors | None = None,
) -> float:
    """Return the memory of a rank in bytes, including its process (CPU) or CUDA context (GPU).

    ``parameter_nbytes``: parameters, gradients and optimizer state. ``kept_nbytes``: samples, and activations kept for
    the backward pass. ``largest_nbytes``: the largest activations that exist only briefly. On CPUs, each amount is
    multiplied by a coefficient fitted to measurements (``structure.GROWTH``), because kernels also copy tensors to
    other layouts. ``growth``: measured factors of these coefficients on the device (``Device.growth_factors``).
    ``has_convolutions``: True if the model has convolutions, whose scratch memory only measured factors count apart.
    ``dense``: factors of a model that is known to have neither convolutions nor recurrent layers (``dense_factors``).
    """
    if is_gpu:
        return on_gpu_nbytes(parameter_nbytes + kept_nbytes + largest_nbytes)
    if dense is not None:
        return part_nbytes(parameter_nbytes, kept_nbytes, largest_nbytes, is_gpu, growth, dense)
    terms = {
        "process": 1.0,
        "convolution": float(has_convolutions),
        "parameter_B": parameter_nbytes,
        "kept_B": kept_nbytes,
        "largest_B": largest_nbytes,
    }
    return PROCESS_NBYTES + GROWTH_MARGIN * structure.total(terms, _coefficients(growth))


def part_nbytes(
    state_nbytes: float,
    kept_nbytes: float,
    largest_nbytes: float,
    is_gpu: bool,
    growth: TermFactors = (),
    factors: Factors = COPYING,
) -> float:
    """Return the memory in bytes of a rank with a part of a model, including its process or CUDA context.

    The other arguments are those of ``held_nbytes``. Of ``growth``, only factors above 1 count, because they were
    measured with whole networks.
    """
    if is_gpu:
        return on_gpu_nbytes(state_nbytes + kept_nbytes + largest_nbytes)
    amounts = {
        "parameter_B": factors.parameter_B * state_nbytes,
        "kept_B": factors.kept_B * kept_nbytes,
        "largest_B": factors.largest_B * largest_nbytes,
    }
    measured = {term: max(1.0, factor) for term, factor in growth}
    held = PART["process"] + factors.update_nbytes + sum(measured.get(term, 1.0) * n for term, n in amounts.items())
    return PROCESS_NBYTES + PART_MARGIN * held


def early_part(ranks: int, collective: CollectiveName) -> float:
    """Return how much of a buffer can have arrived at a rank that has not handled it, in its sum over ``ranks`` ranks.

    The rank computes its backward pass, before it begins the sum or after any of its messages. In a ring, all other
    chunks arrive, and the sum of the first chunk that it has sent. A tree and a butterfly send the whole buffer in each
    of their log2 n exchanges, and halving-doubling halves, quarters and so on, and the half that this rank has sent.
    Simulations of the schedules give the same (tests/trainer/comm/test_early_messages.py).
    """
    core = 1 << (ranks.bit_length() - 1)
    if collective in ("Tree", "Butterfly"):
        return float((ranks - 1).bit_length())
    if collective == "HalvingDoubling":  # Ranks beyond a power of two first send a half to a partner.
        return (core - 1) / core + (1.0 if ranks > core else 0.5)
    return 1.0


def replicas_nbytes(gradient_nbytes: float, replicas: int, collective: CollectiveName, *, is_dense: bool) -> float:
    """Return the main memory in bytes that a rank needs to sum the gradients of its part over replicas of the model.

    ``gradient_nbytes``: bytes of these gradients. ``collective``: the algorithm of the sum. ``is_dense``: True
    if the model is known to have neither convolutions nor recurrent layers.
    """
    if replicas == 1:
        return 0.0
    unposted = early_part(replicas, collective) - RECEIVE_WINDOW  # A posted receive takes its message.
    messages = (EARLY_MESSAGE * unposted + RECEIVE_WINDOW) * gradient_nbytes
    return messages if is_dense else max(messages, CONVOLUTIONS_REPLICATED * gradient_nbytes)


def largest_nbytes(workload: Workload, is_gpu: bool) -> float:
    """Return the bytes for a sample of the largest activations that exist only briefly.

    On CPUs, the loss of a model of which ``DENSE`` counts tensors once is added.
    """
    if is_gpu:
        return workload.transient_nbytes
    return workload.briefly_nbytes() + (workload.loss_nbytes if workload.is_dense else 0.0)


def frozen_nbytes(nbytes: float, is_gpu: bool) -> float:
    """Return the memory in bytes for ``nbytes`` bytes of parameters that are not trained, with the margin.

    They are allocated once and never change, so that they count once, whatever kernels copy.
    """
    return (MARGIN if is_gpu else PART_MARGIN) * nbytes


def start_nbytes(workload: Workload, is_gpu: bool) -> float:
    """Return the memory in bytes that a rank needs while it loads its frozen parameters; 0 without any.

    The script creates the model, loads the weights beside it, copies them, and frees them (``load_state_dict``). The
    model of a rank on a GPU is still in main memory.
    """
    if is_gpu or not workload.frozen_nbytes:
        return 0.0
    return held_nbytes(0.0, 0.0, 0.0, is_gpu, dense=COPYING) + frozen_nbytes(workload.loading_nbytes, is_gpu)


def _copied_nbytes(workload: Workload, is_gpu: bool) -> float:
    """Return the memory in bytes for the copy of the state that rank 0 keeps for checkpoints, on CPUs.

    The margin of models that may have convolutions (``structure.GROWTH``) has room for it.
    """
    return 0.0 if is_gpu or dense_factors(workload) is None else frozen_nbytes(workload.copied_nbytes, is_gpu)


@lru_cache(maxsize=256)
def _line(workload: Workload, is_gpu: bool, growth: TermFactors) -> tuple[float, float]:
    """Return (fixed bytes, bytes for each sample of the local batch) of the memory that a rank needs."""
    kept = workload.activation_nbytes + PREFETCHED_BATCHES * workload.sample_nbytes
    largest, dense = largest_nbytes(workload, is_gpu), dense_factors(workload)
    fixed = held_nbytes(fixed_nbytes(workload), 0.0, 0.0, is_gpu, growth, workload.has_convolutions, dense)
    fixed += frozen_nbytes(workload.frozen_nbytes + workload.frozen_copies_nbytes, is_gpu)
    fixed += _copied_nbytes(workload, is_gpu)
    empty, one = (held_nbytes(0.0, n * kept, n * largest, is_gpu, growth, dense=dense) for n in (0, 1))
    return fixed, one - empty


def rank_nbytes(workload: Workload, batch: int, is_gpu: bool, growth: TermFactors = ()) -> int:
    """Return the memory in bytes that a rank needs with a local batch of ``batch`` samples.

    On a GPU this is GPU memory, on CPUs main memory. ``growth``: as for ``held_nbytes``.
    """
    fixed, each = _line(workload, is_gpu, growth)
    return int(max(fixed + batch * each, start_nbytes(workload, is_gpu)))


def parts_nbytes(workload: Workload, batch: int, is_gpu: bool) -> dict[str, float]:
    """Return the memory of a rank in bytes by its purpose, the largest part first. The sum is ``rank_nbytes``.

    Each part includes its share of the margins. Parts that need nothing are left out.
    """
    dense = dense_factors(workload)
    updating = held_nbytes(0.0, 0.0, 0.0, is_gpu, dense=dense)
    process = held_nbytes(0.0, 0.0, 0.0, is_gpu, dense=dense and replace(dense, update_nbytes=0.0))

    def part(parameter_nbytes: float = 0.0, kept_nbytes: float = 0.0, briefly_nbytes: float = 0.0) -> float:
        amounts = parameter_nbytes, kept_nbytes, briefly_nbytes
        return held_nbytes(*amounts, is_gpu, dense=dense) - updating

    values_nbytes = float(REAL_NBYTES * workload.parameters)
    found = {
        "parameters": part(values_nbytes),
        "gradients": part(values_nbytes),
        "optimizer state": part(workload.optimizer_slots * values_nbytes),
        "frozen parameters": frozen_nbytes(workload.frozen_nbytes, is_gpu),
        "16-bit copies of parameters": part(workload.parameter_copies_nbytes)
        + frozen_nbytes(workload.frozen_copies_nbytes, is_gpu),
        "copy for checkpoints": _copied_nbytes(workload, is_gpu),
        "update of the largest parameter": updating - process,
        "activations": part(0.0, batch * workload.activation_nbytes, batch * largest_nbytes(workload, is_gpu)),
        "prefetched samples": part(0.0, batch * PREFETCHED_BATCHES * workload.sample_nbytes),
        "CUDA" if is_gpu else "process": process,
    }
    found["loading of the frozen parameters"] = max(0.0, start_nbytes(workload, is_gpu) - sum(found.values()))
    return {name: nbytes for name, nbytes in sorted(found.items(), key=lambda item: -item[1]) if nbytes}


def largest_batch(
    workload: Workload, memory_nbytes: float, is_gpu: bool, growth: TermFactors = (), workers: int = 0
) -> int:
    """Return the largest local batch in samples with which a rank needs at most ``memory_nbytes`` bytes of memory.

    Return 0 if the model alone does not fit, and at most ``MAX_SAMPLES``. The memory is GPU memory or, on CPUs, main
    memory. ``growth``: as for ``held_nbytes``. ``workers``: data-loading processes of the rank that use this memory.
    """
    fixed, each = _line(workload, is_gpu, growth)
    fixed += loaders_nbytes(workload, 0, workers)
    each += workers * PREFETCHED_BATCHES * workload.sample_nbytes
    if memory_nbytes <= fixed or memory_nbytes < start_nbytes(workload, is_gpu):
        return 0
    return int(min(MAX_SAMPLES, (memory_nbytes - fixed) / max(each, MARGIN)))


def loaders_nbytes(workload: Workload, batch: int, workers: int) -> int:
    """Return the main memory in bytes of a rank's data-loading processes, with a local batch of ``batch`` samples."""
    return workers * (WORKER_NBYTES + int(PREFETCHED_BATCHES * batch * workload.sample_nbytes))


def shm_nbytes(ranks: int, is_gpu: bool) -> int:
    """Return the size of a pod's /dev/shm in bytes. /dev/shm is main memory and counts against the pod's limit."""
    return ranks * (SHM_PER_GPU_NBYTES if is_gpu else SHM_PER_RANK_NBYTES)


def pod_nbytes(
    workload: Workload, batch: int, ranks: int, is_gpu: bool, workers: int = 0, growth: TermFactors = ()
) -> int:
    """Return the main memory in bytes that a pod requests, including /dev/shm.

    The pod has ``ranks`` ranks with ``batch`` samples each. ``workers``: data-loading processes of each rank.
    ``growth``: as for ``held_nbytes``.
    """
    fixed = AGENT_NBYTES + workload.beside_ranks_nbytes + shm_nbytes(ranks, is_gpu)
    if is_gpu:
        held, each = _beside_gpu(workload, workers)
        return fixed + ranks * int(held + batch * each)
    each_rank = rank_nbytes(workload, batch, is_gpu, growth) + loaders_nbytes(workload, batch, workers)
    return fixed + ranks * each_rank


def largest_batch_of_pod(workload: Workload, memory_nbytes: float, ranks: int, workers: int = 0) -> int:
    """Return the largest local batch in samples with which a pod on GPUs requests at most ``memory_nbytes`` bytes.

    Return 0 if the pod needs more even without samples, and at most ``MAX_SAMPLES``. The other arguments are those of
    ``pod_nbytes``.
    """
    held, each = _beside_gpu(workload, workers)
    room = (memory_nbytes - AGENT_NBYTES - workload.beside_ranks_nbytes - shm_nbytes(ranks, is_gpu=True)) / ranks
    return int(min(MAX_SAMPLES, max(0.0, room - held) / max(each, MARGIN)))


def _beside_gpu(workload: Workload, workers: int) -> tuple[float, float]:
    """Return (fixed bytes, bytes for each sample) of main memory that a rank on a GPU needs, with its loaders.

    A GPU rank copies its state to main memory to write a checkpoint, and holds batches in flight. Before, its script
    loads frozen parameters there.
    """
    copies = max(workload.checkpoint_nbytes, workload.loading_nbytes)
    ahead = PREFETCHED_BATCHES * workload.sample_nbytes
    return GPU_PROCESS_NBYTES + MARGIN * copies + workers * WORKER_NBYTES, (MARGIN + workers) * ahead
