"""Memory of one rank: what is there whatever the batch, and what each sample adds."""

from dataclasses import replace

from dljob.perf.workload import structure
from dljob.perf.workload.workload import REAL_NBYTES, Workload

PROCESS_NBYTES = 320 * 2**20
"""Main memory of a rank before it trains: Python, PyTorch with its optimizers, MPI (312 MiB after their imports)."""
AGENT_NBYTES = 128 * 2**20
"""Main memory of a pod beside its ranks: the agent, its preloaded interpreter and MPI's daemon. A pod that trains
digits-cnn was seen to peak at 226 MiB, for most of the interpreter is shared; a script of the user's shares nothing."""
GPU_PROCESS_NBYTES = 2 * 2**30
"""Main memory of a rank that trains on a GPU, beside state and batches: CUDA's libraries and context, pinned memory,
NCCL's buffers. An assumption, on the safe side: the pod's limit follows it, and nodes have far more for each GPU."""
GPU_CONTEXT_NBYTES = 600 * 2**20
"""Device memory that CUDA, cuBLAS and cuDNN take."""
MARGIN = 1.1
"""Allocators round up and fragment."""
GROWTH_MARGIN = 1.25
"""On CPUs, over what is predicted: a pod that needs more is killed. Of generated networks 98 of 100 stay below
(benchmarks/perfmodel/structure_regression.py)."""
PREFETCHED_BATCHES = 2
"""Made ahead, by a thread or by each worker."""
WORKER_NBYTES = 64 * 2**20
"""Main memory of a process that makes batches, beside what it makes: 8 MiB of its own after its start (it shares others
with the agent's interpreter), and room for what a dataset imports."""
MAX_SAMPLES = 2**31 - 1
"""Of a batch, by the API; what a sample of no size is limited by."""


def fixed_nbytes(workload: Workload) -> float:
    """Parameters, gradients (one contiguous buffer) and optimizer state."""
    return (2 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters


def sharded(workload: Workload, ranks: int) -> Workload:
    """The workload as each of ``ranks`` holds it that share out optimizer state (Rajbhandari et al. 2020, stage 1)."""
    return replace(workload, optimizer_slots=workload.optimizer_slots / ranks)


def sample_nbytes(workload: Workload) -> float:
    """What one sample of the batch adds: kept activations, the largest transient ones, the sample itself."""
    return workload.activation_nbytes + workload.transient_nbytes + PREFETCHED_BATCHES * workload.sample_nbytes


def held_nbytes(parameter_nbytes: float, kept_nbytes: float, largest_nbytes: float, is_gpu: bool) -> float:
    """Memory of a rank: its process or context, ``parameter_nbytes`` of parameters, gradients and optimizer state, kept
    activations with the samples, and the largest transient ones.

    A GPU holds just that. A CPU's kernels lay tensors out anew besides: by ``structure``'s regression.
    """
    if is_gpu:
        return GPU_CONTEXT_NBYTES + MARGIN * (parameter_nbytes + kept_nbytes + largest_nbytes)
    terms = {"process": 1.0, "parameter_B": parameter_nbytes, "kept_B": kept_nbytes, "largest_B": largest_nbytes}
    return PROCESS_NBYTES + GROWTH_MARGIN * structure.total(terms, structure.GROWTH)


def _line(workload: Workload, is_gpu: bool) -> tuple[float, float]:
    """Memory of a rank whatever the batch, and what each sample adds."""
    kept = workload.activation_nbytes + PREFETCHED_BATCHES * workload.sample_nbytes
    fixed = held_nbytes(fixed_nbytes(workload), 0.0, 0.0, is_gpu)
    return fixed, held_nbytes(0.0, kept, workload.transient_nbytes, is_gpu) - held_nbytes(0.0, 0.0, 0.0, is_gpu)


def rank_nbytes(workload: Workload, batch: int, is_gpu: bool) -> int:
    """Memory that a rank needs where it computes: on its GPU, or in main memory. Rises with the batch."""
    fixed, each = _line(workload, is_gpu)
    return int(fixed + batch * each)


def largest_batch(workload: Workload, memory_nbytes: float, is_gpu: bool) -> int:
    """The most samples a rank can hold in ``memory_nbytes``; 0 when the model alone does not fit."""
    fixed, each = _line(workload, is_gpu)
    if memory_nbytes <= fixed:
        return 0
    return int(min(MAX_SAMPLES, (memory_nbytes - fixed) / max(each, MARGIN)))


def pod_nbytes(workload: Workload, batch: int, ranks: int, is_gpu: bool, workers: int = 0) -> int:
    """Main memory of a pod with ``ranks`` ranks of ``batch`` samples: what its container should request.

    ``workers``: processes of each rank that make batches.
    """
    ahead = workers * (WORKER_NBYTES + int(PREFETCHED_BATCHES * batch * workload.sample_nbytes))
    if not is_gpu:
        return AGENT_NBYTES + ranks * (rank_nbytes(workload, batch, is_gpu) + ahead)
    # A GPU's rank holds its parameters a second time while it writes a checkpoint, and batches under way.
    copies = (1 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters
    batches = PREFETCHED_BATCHES * batch * workload.sample_nbytes
    return AGENT_NBYTES + ranks * (int(GPU_PROCESS_NBYTES + MARGIN * (copies + batches)) + ahead)
