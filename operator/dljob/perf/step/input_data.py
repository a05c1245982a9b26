"""Input data: exposed time per step of reading, preparing and copying samples.

A sample is read from disk if the node's page cache does not hold it, prepared (decoded, augmented, or generated),
copied in main memory into a batch, and copied to a GPU over its link. The trainer prefetches: it does this for later
steps while a step computes, so only the excess over the compute time is exposed. A script that loads its data in
another way is predicted from its measured steps.
"""

from dataclasses import dataclass

from dljob.cluster.catalogue import Device
from dljob.perf.fit.curve import Curve
from dljob.perf.workload.workload import Workload

HOST_BANDWIDTH_Bps = 10e9
"""Bandwidth of copying within main memory with one thread."""
DISK_BANDWIDTH_Bps = 5e8
"""Disk bandwidth of a node. Assumed, because nodes do not publish it: a SATA SSD, limit 600 MB/s (Serial ATA 3.0)."""


@dataclass(frozen=True)
class Stored:
    """Samples in files that are read during training."""

    samples: int
    nbytes: int
    """Bytes of one sample on storage."""
    epochs: float


@dataclass(frozen=True)
class Fetching:
    """Seconds per sample by stage of the input pipeline, and the workers that spend them."""

    disk_s: float
    making_s: float
    memory_s: float
    device_s: float
    workers: int
    """Worker processes, or 1 thread, that prepare batches while steps compute; 0: the rank does it between steps."""
    busy_s: float = 0.0
    """Seconds per sample that workers take from the cores that compute."""

    processes: bool = False
    """True if workers are processes."""

    @property
    def total_s(self) -> float:
        return self.disk_s + self.host_s + self.device_s

    @property
    def host_s(self) -> float:
        """Return the CPU seconds per sample."""
        return self.making_s + self.memory_s

    @property
    def pace_s(self) -> float:
        """Return the seconds per sample of the slowest stage of the input pipeline of disk, workers and link.

        The model is that of Kuchnik et al., Plumber, MLSys 2022.
        """
        if not self.workers:
            return self.total_s
        return max(self.disk_s, (self.disk_s + self.host_s) / self.workers, self.device_s)

    @property
    def mostly(self) -> str:
        """Return the text for the dominant stage."""
        parts = {
            "reading from disk": self.disk_s,
            "preparing samples": self.making_s,
            "copying in main memory": self.memory_s,
            "copying to the device": self.device_s,
        }
        return max(parts, key=lambda name: parts[name])

    def over(self, computing: Curve) -> Curve:
        """Return the time of a rank's step over its samples b, with input.

        Without workers it is compute(b) + b total. With workers it is

            max(compute(b) + b busy, b pace)

        so the larger of b busy and b pace - compute(b) is exposed.
        """
        if not self.workers:
            return computing.plus(self.total_s)
        return computing.plus(self.busy_s).at_least(self.pace_s)

    def exposed_input_s(self, compute_s: float, samples: float) -> float:
        """Return the exposed input time of a step that computes for ``compute_s`` on ``samples`` samples."""
        if not self.workers:
            return samples * self.total_s
        return max(samples * self.busy_s, samples * self.pace_s - compute_s)

    def first_s(self, samples: float) -> float:
        """Return the time of the first batch, which no step hides; 0 without workers, where every batch is exposed."""
        return samples * self.total_s if self.workers else 0.0


def workers_of(cores: float) -> int:
    """Return the default number of worker processes of a training script: one per core, except the rank's own.

    Built-in models use a thread instead.
    """
    return max(0, int(cores) - 1)


def cold_part(stored: Stored, cache_nbytes: float) -> float:
    """Return the fraction of all reads that go to disk: max(1 / epochs, 1 - cache / dataset) for random reads.

    Each sample is read once, and the part beyond the page cache every time. This is a lower bound: with several nodes,
    each node reads another part in every epoch.
    """
    dataset_nbytes = stored.samples * stored.nbytes
    return min(1.0, max(1 / max(stored.epochs, 1.0), 1 - max(cache_nbytes, 0.0) / dataset_nbytes))


def fetching(
    workload: Workload,
    device: Device,
    cores: float = 1.0,
    stored: Stored | None = None,
    cache_nbytes: float = 0.0,
    ranks_per_node: int = 1,
    by_program: bool = False,
    measured_s: float | None = None,
) -> Fetching:
    """Return the input times per sample.

    Disk: nbytes x cold part x ranks / 500 MB/s (a node's ranks share its disk). Memory: 2 nbytes / 10 GB/s. GPU: nbytes
    over its link. Preparing and copying take one core, and longer on less than a core. If the rank computes on the same
    cores, they take 1/cores of its time.

    ``cache_nbytes``: main memory of the node that is left for the page cache. ``stored``: None for data in memory.
    ``by_program``: a training script prepares samples in processes; else a thread does. ``measured_s``: seconds to
    prepare one sample and its part of a batch in an earlier run; it replaces all formulas except the link's.
    """
    nbytes, core, gpu = workload.sample_nbytes, min(1.0, cores), device.kind == "gpu"
    disk_s = 0.0
    if stored is not None:
        disk_s = stored.nbytes * cold_part(stored, cache_nbytes) * ranks_per_node / DISK_BANDWIDTH_Bps
    making_s, memory_s = workload.making_s / core, 2 * nbytes / HOST_BANDWIDTH_Bps / core
    if measured_s is not None:
        disk_s, making_s, memory_s = 0.0, measured_s, 0.0
    return Fetching(
        disk_s=disk_s,
        making_s=making_s,
        memory_s=memory_s,
        device_s=nbytes / device.host_bandwidth_Bps if gpu else 0.0,
        workers=workers_of(cores) if by_program else 1,
        processes=by_program,
        busy_s=0.0 if gpu else (making_s + memory_s) / max(1.0, cores),
    )
