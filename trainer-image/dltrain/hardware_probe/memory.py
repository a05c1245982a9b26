"""Measure the bandwidth of main memory, or of a GPU's memory, by copies."""

import time

import torch

from dlcontract.hardware import MemoryRate
from dltrain.hardware_probe.networks import core_counts

COPIED_NBYTES = 128 * 2**20
"""Bytes of the copied buffer. It exceeds the part of a last-level cache that a few cores have, but not all caches."""
GPU_NBYTES = 2**30
REPEATS = 5


def memory_rates(device: torch.device, cores: float, free_nbytes: int | None) -> list[MemoryRate]:
    """Return the bytes per second, read and written, of copies with each of several core counts up to ``cores``.

    On one core, the CPU time counts, which excludes other processes.
    ``free_nbytes``: free memory of the container. The two buffers use at most half of it.
    """
    nbytes = GPU_NBYTES if device.type == "cuda" else COPIED_NBYTES
    if free_nbytes is not None and device.type == "cpu":
        nbytes = min(nbytes, free_nbytes // 4)
    source = torch.ones(max(2**20, nbytes) // 4, device=device)
    target = torch.zeros_like(source)
    found = []
    for count in core_counts(cores) if device.type == "cpu" else [1]:
        torch.set_num_threads(count)
        times, clock = [], time.process_time if device.type == "cpu" and count == 1 else time.perf_counter
        for _ in range(1 + REPEATS):
            begin = clock()
            target.copy_(source)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(clock() - begin)
        found.append(MemoryRate(cores=count, Bps=float(f"{2 * source.nbytes / max(min(times[1:]), 1e-9):.4g}")))
    return found
