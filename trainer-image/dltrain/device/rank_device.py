"""The device of a rank: which it is, whether it is what was planned, and waiting for what it was given to do.

Nothing here runs before a rank is a process of its own: CUDA must not be touched in what is forked afterwards.
"""

import re
import sys

import torch

from dlcontract import Plan, Rank
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import DeviceMissingError

MISMATCH = "cpu"
"""Name of the device of a rank that was promised a GPU and found none."""
MEMORY_PART = 0.9
"""Of a GPU's memory, what shares may grow into: allocators round up and fragment."""


def find_device(rank: Rank) -> tuple[torch.device, str]:
    """The torch device for a rank, and what it really is, in the plan's words where it matches.

    A rank planned on a class of CPU nodes computes on the CPU, and cannot tell more than that it is one. A GPU becomes
    the current one, so that whatever names none (a script's ``"cuda"``, pinned memory, a library) means this rank's.
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
    """A GPU's name as node label ``nvidia.com/gpu.product`` has it: 'NVIDIA A100-SXM4-40GB' with dashes for spaces."""
    return "-".join(name.split())


def same_product(found: str, label: str) -> bool:
    """Whether a node's label means the GPU ``found``: labels have other punctuation, and those of GPUs that the device
    plugin shares out by time end with SHARED.
    """
    plain = [re.sub(r"[^a-z0-9]", "", re.sub(r"-shared$", "", text.lower())) for text in (found, label)]
    return plain[0] == plain[1]


def check(world: ProcessGroup, plan: Plan, device: torch.device) -> None:
    """Whether ranks that were promised GPUs have them; all ranks call it together.

    If none has, they train on their CPUs, slowly, and the log says why (a pretended GPU, an image for CPUs). Raises
    DeviceMissingError, on all of them, where only some have: those could not sum anything together.
    """
    if not any(rank.gpu for rank in plan.ranks):
        return
    lacking = [number for number, (has,) in enumerate(world.gather([float(device.type == "cuda")])) if not has]
    if len(lacking) == world.size and world.local_rank == 0:
        planned = plan.ranks[world.rank].device
        print(  # noqa: T201
            f"dltrain: rank {world.rank} trains on the CPU: found no GPU, planned {planned}: {gpu_missing_reason()}",
            file=sys.stderr,
            flush=True,
        )
    if 0 < len(lacking) < world.size:
        names = ", ".join(f"{number} (pod {plan.ranks[number].pod})" for number in lacking[:8])
        why = f": {gpu_missing_reason()}" if world.rank in lacking else ""
        raise DeviceMissingError(f"found no GPU on rank {names} of {world.size}, expected one on each{why}")


def gpu_missing_reason() -> str:
    """Why torch sees no GPU, in its own words."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0]
    else:
        said = "the driver shows none"
    return f"{said} (torch {torch.__version__}); see docs/how-to/gpus.md"


def finish(device: torch.device) -> None:
    """Wait until all is done that this thread's stream of a GPU was given; on a CPU it is. The thread sleeps, for CPUs
    of a pod are few.
    """
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def peak_nbytes(device: torch.device) -> int | None:
    """The most memory of a GPU that tensors took so far; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def most_samples(device: torch.device, share: int, batch: int) -> int:
    """How many samples of a step the device holds, by what steps of ``share`` took at most; of a CPU the ``batch``.

    Between two steps, when what is allocated is what stays.
    """
    if device.type != "cuda":
        return batch
    free, _ = torch.cuda.mem_get_info(device)
    kept, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return samples_within(free + torch.cuda.memory_reserved(device), kept, peak, share, batch)


def samples_within(usable_nbytes: int, kept_nbytes: int, peak_nbytes: int, share: int, batch: int) -> int:
    """Samples that fit: a step takes what is kept anyhow, and the rest of its peak in proportion to its ``share``."""
    each = max(1, peak_nbytes - kept_nbytes) / max(1, share)
    return max(share, min(batch, int((MEMORY_PART * usable_nbytes - kept_nbytes) / each)))
