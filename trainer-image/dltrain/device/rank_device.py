"""The device of a rank: selecting the device, comparing it with the plan, and waiting for work on it.

Nothing here may run before a rank is forked, because CUDA does not survive a fork.
"""

import re
import sys

import torch

from dlcontract import Plan, Rank
from dlcontract.pods import without_limits
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import DeviceMissingError

MISMATCH = "cpu"
"""Device name of a rank that was planned on a GPU but found none."""
MEMORY_FRACTION = 0.9
"""Fraction of a GPU's memory up to which the local batch size may grow. Allocators need the rest for rounding and
fragmentation."""


def find_device(rank: Rank) -> tuple[torch.device, str]:
    """Select the device of a rank. Return (torch device, name of this device for reports).

    If the device is the one that the plan expects, the name is spelled as in the plan. For a rank that is planned on a
    CPU, the name is always that of the plan, because the rank cannot check the kind of CPU. If the rank is planned on a
    GPU but finds none, the result is the CPU with the name ``MISMATCH``. A GPU becomes the current device, so that code
    without a device index (a script's ``"cuda"``, pinned memory, a library) uses this rank's GPU.
    """
    if not rank.gpu:
        return torch.device("cpu"), rank.device
    if not torch.cuda.is_available():
        return torch.device("cpu"), MISMATCH
    device = torch.device("cuda", rank.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    found = product_label(torch.cuda.get_device_name(device))
    return device, rank.device if same_product(found, rank.device) else found


def product_label(name: str) -> str:
    """Return a GPU's name as in node label ``nvidia.com/gpu.product``: NVIDIA's name with dashes for spaces."""
    return "-".join(name.split())


def same_product(found: str, label: str) -> bool:
    """Return True if ``label``, the product in a node's label, means the GPU ``found``.

    Labels differ in punctuation, and end with SHARED if the device plugin time-slices the GPU. In plans, power and
    clock limits may follow the product.
    """
    label = without_limits(label).product
    plain = [re.sub(r"[^a-z0-9]", "", re.sub(r"-shared$", "", text.lower())) for text in (found, label)]
    return plain[0] == plain[1]


def check(process_group: ProcessGroup, plan: Plan, device: torch.device) -> None:
    """Check that every rank has a GPU if the plan puts ranks on GPUs. All ranks must call it together.

    ``device``: the device that this rank has found. If no rank has a GPU, all ranks train slowly on CPUs, and the log
    gives the reason, such as a simulated GPU or an image for CPUs. Raise DeviceMissingError on all ranks if only some
    ranks have a GPU, because GPUs and CPUs cannot reduce gradients together.
    """
    if not any(rank.gpu for rank in plan.ranks):
        return
    lacking = [number for number, (has,) in enumerate(process_group.gather([float(device.type == "cuda")])) if not has]
    if len(lacking) == process_group.size and process_group.local_rank == 0:
        planned = plan.ranks[process_group.rank].device
        print(  # noqa: T201
            f"dltrain: rank {process_group.rank} trains on the CPU: found no GPU; expected {planned}. "
            f"{gpu_missing_reason()}",
            file=sys.stderr,
            flush=True,
        )
    if 0 < len(lacking) < process_group.size:
        names = ", ".join(f"{number} (pod {plan.ranks[number].pod})" for number in lacking[:8])
        why = f": {gpu_missing_reason()}" if process_group.rank in lacking else ""
        raise DeviceMissingError(
            f"device: found no GPU on rank {names} of {process_group.size} ranks; expected a GPU on each rank{why}",
            lacking[0],
            plan.ranks[lacking[0]].pod,
        )


def gpu_missing_reason() -> str:
    """Return a text with the reason why torch finds no GPU: torch's own message, its version and where to read more."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    else:
        reason = "the driver lists no GPU"
    return f"{reason} (torch {torch.__version__}); see docs/how-to/gpus.md"


def finish(device: torch.device) -> None:
    """Wait for the work on this thread's GPU stream. On a CPU, return at once.

    The thread sleeps while it waits, because a pod has few CPUs.
    """
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def peak_nbytes(device: torch.device) -> int | None:
    """Return the largest memory in bytes that tensors have taken on a GPU so far, or None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def max_samples(device: torch.device, share: int, batch: int) -> int:
    """Return how many samples per step this rank could compute within its device's memory, at most ``batch``.

    The result follows from the peak memory of the steps so far. ``share``: this rank's local batch size in these steps.
    ``batch``: the global batch size. Call this function between two steps, when only persistent memory is allocated. On
    a CPU, return ``batch``.
    """
    if device.type != "cuda":
        return batch
    free, _ = torch.cuda.mem_get_info(device)
    persistent, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return samples_within(free + torch.cuda.memory_reserved(device), persistent, peak, share, batch)


def samples_within(usable_nbytes: int, persistent_nbytes: int, peak_nbytes: int, share: int, batch: int) -> int:
    """Return how many samples per step fit into ``usable_nbytes`` bytes of memory, from ``share`` to ``batch``.

    ``share``: the present local batch size. ``batch``: the global batch size. ``peak_nbytes``: the peak memory of a
    step with ``share`` samples. It consists of ``persistent_nbytes``, which stays allocated between steps, and of an
    amount in proportion to the number of samples. A tenth of the memory stays free (``MEMORY_FRACTION``).
    """
    each = max(1, peak_nbytes - persistent_nbytes) / max(1, share)
    return max(share, min(batch, int((MEMORY_FRACTION * usable_nbytes - persistent_nbytes) / each)))
