"""Data movement: what bringing a rank its samples adds to a step.

A sample comes from disk if the node's page cache does not hold it, is made (decoded, augmented, or made up), is read
and written in main memory as it becomes part of a batch, and goes to a GPU over its link. The trainer does so for the
steps to come while a step computes, so that a step feels only what that takes longer. A program that loads its data
otherwise is measured by its own steps.
"""

from dataclasses import dataclass

from dljob.cluster.catalogue import Device
from dljob.perf.fit.curve import Curve
from dljob.perf.workload.workload import Workload

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
class Fetching:
    """Seconds a sample, by what they go to; and who spends them."""

    disk_s: float
    making_s: float
    memory_s: float
    device_s: float
    workers: int
    """Processes, or the one thread, that make batches while steps compute; 0: the rank does, between steps."""
    busy_s: float = 0.0
    """Of making and copying a sample, what is taken from the cores that compute, when workers do it."""

    processes: bool = False
    """Whether workers are processes."""

    @property
    def total_s(self) -> float:
        return self.disk_s + self.host_s + self.device_s

    @property
    def host_s(self) -> float:
        """What takes a core."""
        return self.making_s + self.memory_s

    @property
    def pace_s(self) -> float:
        """Between one sample and the next, when there is nothing else to wait for: the slowest stage of a pipeline of
        a disk, workers and a link (as in Kuchnik et al., Plumber, MLSys 2022).
        """
        if not self.workers:
            return self.total_s
        return max(self.disk_s, (self.disk_s + self.host_s) / self.workers, self.device_s)

    @property
    def mostly(self) -> str:
        """What most of it goes to, for people."""
        parts = {
            "reading from disk": self.disk_s,
            "preparing samples": self.making_s,
            "copying in main memory": self.memory_s,
            "copying to the device": self.device_s,
        }
        return max(parts, key=lambda name: parts[name])

    def over(self, computing: Curve) -> Curve:
        """A rank's step over its samples b: without workers compute(b) + b total, each after the other. With them

            max(compute(b) + b busy, b pace)

        so that max(0, b pace - compute(b)) is felt, or what workers take from the cores that compute.
        """
        if not self.workers:
            return computing.plus(self.total_s)
        return computing.plus(self.busy_s).at_least(self.pace_s)

    def felt_s(self, compute_s: float, samples: float) -> float:
        """Of a step that computes for so long on so many samples."""
        if not self.workers:
            return samples * self.total_s
        return max(samples * self.busy_s, samples * self.pace_s - compute_s)

    def first_s(self, samples: float) -> float:
        """The first batch, which no step hides; without workers it is felt like any other."""
        return samples * self.total_s if self.workers else 0.0


def workers_of(cores: float) -> int:
    """Processes that make a program's batches in a rank with so many cores: one for each but the rank's own, as the
    trainer's default is. Built-in models have a thread.
    """
    return max(0, int(cores) - 1)


def cold_part(stored: Stored, cache_nbytes: float) -> float:
    """Of all reads of a training, those that go to disk: each sample once, and what the page cache never holds.

    max(1 / epochs, 1 - cache / dataset), random reads: a lower bound, since each node of several reads another part in
    every epoch.
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
    """disk = nbytes cold ranks / 500 MB/s (a node's ranks share its disk); memory = 2 nbytes / 10 GB/s; to a GPU nbytes
    over its link. Making and copying take a core, less of one the longer; where the rank computes on the same cores,
    they take 1/cores of what it does.

    ``cache_nbytes``: main memory of the node that is left for the page cache; ``stored``: None for what is in memory.
    ``by_program``: a script makes samples, in processes; else a thread does.
    ``measured_s``: of a run before, making a sample and its part of a batch, whoever did; in the place of all formulas
    but the link's.
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
