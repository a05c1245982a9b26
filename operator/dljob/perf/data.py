"""Data movement: what bringing a rank its samples adds to a step. Users: ``planner``.

A sample comes from disk if the node's page cache does not hold it, is made if it is synthetic, is read and written in
main memory as it becomes part of a batch, and goes to a GPU over its link. The trainer fetches a step's samples between
two steps, from memory or a memory map, so nothing overlaps and all of it is felt: the sum, not the longest part.
"""

from dataclasses import dataclass

from dljob.hardware import Device
from dljob.perf.workload import Workload

HOST_BANDWIDTH_Bps = 10e9
"""Copying within main memory, one thread."""
DISK_BANDWIDTH_Bps = 5e8
"""Of a node: an SSD behind SATA, whose limit is 600 MB/s (Serial ATA 3.0). Assumed; no node says it."""


@dataclass(frozen=True)
class Stored:
    """Samples in files that are read as they are needed."""

    samples: int
    nbytes: int
    """Of one, on storage."""
    epochs: float


@dataclass(frozen=True)
class PerSample:
    """Seconds a sample, by what they go to."""

    disk_s: float
    making_s: float
    memory_s: float
    device_s: float

    @property
    def total_s(self) -> float:
        return self.disk_s + self.making_s + self.memory_s + self.device_s

    @property
    def mostly(self) -> str:
        """What most of it goes to, for people."""
        parts = {
            "reading from disk": self.disk_s,
            "making samples": self.making_s,
            "copying in main memory": self.memory_s,
            "copying to the device": self.device_s,
        }
        return max(parts, key=lambda name: parts[name])


def cold_part(stored: Stored, cache_nbytes: float) -> float:
    """Of all reads of a training, those that go to disk: each sample once, and what the page cache never holds.

    max(1 / epochs, 1 - cache / dataset), random reads: a lower bound, since each node of several reads another part in
    every epoch.
    """
    dataset_nbytes = stored.samples * stored.nbytes
    return min(1.0, max(1 / max(stored.epochs, 1.0), 1 - max(cache_nbytes, 0.0) / dataset_nbytes))


def per_sample(
    workload: Workload,
    device: Device,
    cores: float = 1.0,
    stored: Stored | None = None,
    cache_nbytes: float = 0.0,
    ranks_per_node: int = 1,
) -> PerSample:
    """disk = nbytes cold ranks / 500 MB/s (a node's ranks share its disk); memory = 2 nbytes / 10 GB/s; to a GPU nbytes
    over its link. Making and copying take a core, less of one the longer.

    ``cache_nbytes``: main memory of the node that is left for the page cache; ``stored``: None for what is in memory.
    """
    nbytes, core = workload.sample_nbytes, min(1.0, cores)
    disk_s = 0.0
    if stored is not None:
        disk_s = stored.nbytes * cold_part(stored, cache_nbytes) * ranks_per_node / DISK_BANDWIDTH_Bps
    return PerSample(
        disk_s=disk_s,
        making_s=workload.making_s / core,
        memory_s=2 * nbytes / HOST_BANDWIDTH_Bps / core,
        device_s=nbytes / device.host_bandwidth_Bps if device.kind == "gpu" else 0.0,
    )
