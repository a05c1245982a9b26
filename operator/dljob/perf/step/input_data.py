"""Exposed input time: the time per step for reading, preparing and copying samples that prefetching does not hide.

A sample is read from disk (unless the node's page cache holds it), prepared (decoded, augmented, or generated), copied
into a batch in main memory, and copied to the GPU, if any. The trainer does this for later steps while a step computes,
so only the excess over the compute time is exposed. Scripts that load data differently are predicted from their
measured steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from dlcontract import RankMeasure
from dljob.cluster.catalogue import Device
from dljob.perf.fit.curve import Curve
from dljob.perf.workload.workload import Workload

HOST_BANDWIDTH_Bps = 10e9
"""Bandwidth of one thread that copies within main memory."""
DISK_BANDWIDTH_Bps = 5e8
"""Disk bandwidth of a node in bytes per second, assumed to be that of a SATA SSD (limit: 600 MB/s, Serial ATA 3.0)."""
MADE_BY_RANK = 0.9
"""Minimum part of the time to make a batch that a step waits if the rank itself makes its batches between steps."""
LEAST_COMPUTING = 0.1
"""Minimum part of a measured computing time that counts as computing, however long its batch took to make. The time to
make a batch in a thread of the rank includes the time in which the rank had the core."""


@dataclass(frozen=True)
class Stored:
    """A dataset in files that the job reads during training, and the number of epochs for which it is read."""

    samples: int
    nbytes: int
    """Bytes of one sample on disk."""
    epochs: float


@dataclass(frozen=True)
class Fetching:
    """Input pipeline of one rank: the seconds per sample in each stage, and the number of data-loading workers.

    A sample is read from disk (``disk_s``), generated or decoded (``making_s``), copied within main memory
    (``memory_s``), and copied to the GPU (``device_s``). A stage that the rank does not need takes 0 seconds.
    """

    disk_s: float
    making_s: float
    memory_s: float
    device_s: float
    workers: int
    """Number of processes (or 1 for a thread) that prepare batches while steps compute. 0: the rank itself prepares its
    batches between steps."""
    busy_s: float = 0.0
    """Seconds per sample by which the workers delay the rank's computing, because they run on the same cores; 0 on a
    GPU."""

    processes: bool = False
    """True if workers are processes."""
    readers: int = 1
    """Number of ranks that share the disk of the node, which ``disk_s`` includes."""

    @property
    def total_s(self) -> float:
        return self.disk_s + self.host_s + self.device_s

    @property
    def host_s(self) -> float:
        """Return the seconds per sample of work on the CPU: preparing the sample, and copying it within main memory."""
        return self.making_s + self.memory_s

    @property
    def pace_s(self) -> float:
        """Return the seconds per sample at which the pipeline can deliver input to the device.

        These are the seconds of the slowest of three stages: disk, workers, and link to the device. The model is that
        of Plumber (Kuchnik et al., MLSys 2022). Without workers, the stages run one after another, so return the sum of
        their times.
        """
        if not self.workers:
            return self.total_s
        return max(self.disk_s, (self.disk_s + self.host_s) / self.workers, self.device_s)

    @property
    def mostly(self) -> str:
        """Return a text for the stage that takes most time, such as 'reading from disk'."""
        parts = {
            "reading from disk": self.disk_s,
            "preparing samples": self.making_s,
            "copying in main memory": self.memory_s,
            "copying to the device": self.device_s,
        }
        return max(parts, key=lambda name: parts[name])

    @property
    def alone(self) -> "Fetching":
        """Return the input pipeline of a rank that has the disk of its node for itself."""
        return replace(self, disk_s=self.disk_s / self.readers, readers=1)

    def over(self, computing: Curve) -> Curve:
        """Return a rank's step time including input, as a curve over its local batch size b.

        ``computing``: the rank's computing time over b. Without workers, the rank loads its batch between steps. A step
        then takes computing(b) + b total_s, where total_s is the sum of all stages in seconds per sample. With workers,
        it takes

            max(computing(b) + b busy_s, b pace_s)

        where busy_s is the delay per sample because the workers use the rank's cores, and pace_s is the time per sample
        of the slowest stage. The exposed input time is the larger of b busy_s and b pace_s - computing(b).
        """
        return _over(self, computing)

    def exposed_input_s(self, compute_s: float, samples: float) -> float:
        """Return the exposed input time: the seconds by which a step takes longer than ``compute_s`` due to its input.

        ``compute_s``: seconds in which the step computes ``samples`` samples, without input.
        """
        if not self.workers:
            return samples * self.total_s
        return max(samples * self.busy_s, samples * self.pace_s - compute_s)

    def sets_pace(self, compute_s: float, samples: float) -> bool:
        """Return True if workers need longer for the input of ``samples`` samples than ``exposed_input_s`` allows.

        The step then takes as long as its input, however fast it computes. ``compute_s``: as in ``exposed_input_s``.
        """
        return self.workers > 0 and samples * self.pace_s > compute_s + samples * self.busy_s

    def first_s(self, samples: float) -> float:
        """Return the input seconds of the first batch of ``samples`` samples, which no earlier step hides.

        Return 0 without workers, because the input time of every batch is then part of its step.
        """
        return samples * self.total_s if self.workers else 0.0


@lru_cache(maxsize=1024)
def _over(fetching: Fetching, computing: Curve) -> Curve:
    if not fetching.workers:
        return computing.plus(fetching.total_s)
    return computing.plus(fetching.busy_s).at_least(fetching.pace_s)


def workers_of(cores: float) -> int:
    """Return the default number of data-loading processes of a training script, for a rank with ``cores`` CPUs.

    The rank itself uses one CPU, and each other whole CPU gets a process. Built-in models load data in a thread
    instead.
    """
    return max(0, int(cores) - 1)


def cold_part(stored: Stored, cache_nbytes: float) -> float:
    """Return the fraction of all reads of a training that go to disk, because the page cache does not hold the sample.

    The formula for random reads is max(1 / epochs, 1 - cache / dataset). ``cache_nbytes``: size of the page cache. The
    first epoch reads every sample from disk. Later epochs read from disk what the page cache does not hold. The result
    is a lower bound: with several nodes, each node reads different samples in every epoch.
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
    disk_Bps: float = DISK_BANDWIDTH_Bps,
    threads: float | None = None,
) -> Fetching:
    """Return the input times per sample of one rank.

    Disk: stored bytes x ``cold_part`` x ranks / ``disk_Bps`` (a node's ranks share its disk). Main memory: 2 x bytes /
    10 GB/s. GPU: bytes / bandwidth of the GPU's link to the host. Preparing and copying use one core, and take longer
    if the rank has less than one. If the rank computes on the same cores, preparing and copying delay the computing by
    1/``cores`` of their time.

    ``stored``: the dataset in files; None for data in memory. ``cache_nbytes``: main memory that is left for the page
    cache. ``by_program``: True if data-loading processes of a training script prepare samples; False if a thread of the
    built-in trainer does. ``disk_Bps``: bandwidth at which a node reads from its disk. ``measured_s``: seconds to
    prepare a sample and copy it into a batch, measured in an earlier run. These seconds replace the formulas for disk,
    preparing and main memory, but not the formula for the GPU's link. ``threads``: CPUs for which a rank starts threads
    and data-loading processes, if other ranks use a part of these ``cores``; None: ``cores``.
    """
    nbytes, core, gpu = workload.sample_nbytes, min(1.0, cores), device.kind == "gpu"
    disk_s = 0.0
    if stored is not None:
        disk_s = stored.nbytes * cold_part(stored, cache_nbytes) * ranks_per_node / disk_Bps
    making_s, memory_s = workload.making_s / core, 2 * nbytes / HOST_BANDWIDTH_Bps / core
    if measured_s is not None:
        disk_s, making_s, memory_s = 0.0, measured_s, 0.0
    return Fetching(
        disk_s=disk_s,
        making_s=making_s,
        memory_s=memory_s,
        device_s=nbytes / device.host_bandwidth_Bps if gpu else 0.0,
        workers=workers_of(threads or cores) if by_program else 1,
        processes=by_program,
        busy_s=0.0 if gpu else delay_s(making_s + memory_s, cores),
        readers=ranks_per_node,
    )


def delay_s(fetch_s: float, cores: float) -> float:
    """Return the seconds by which ``fetch_s`` seconds of preparing input delay the computing on the same ``cores``."""
    return fetch_s / max(1.0, cores)


def undelayed_s(compute_s: float, data_s: float, fetch_s: float, cores: float) -> float:
    """Return the seconds of a measured step that predictions count as computing, on the CPUs of a rank.

    ``compute_s``, ``data_s``: measured seconds of computing, and of waiting for input. ``fetch_s``: seconds to make a
    batch, in the rank itself or beside it. Predictions add ``delay_s`` to the computing. If workers made the batch, the
    measured computing includes their delay. If the rank did (``data_s`` is as long as ``fetch_s``), the input took all
    of this time. In both cases, the result plus the delay is the measured time, so that the delay does not count twice.
    """
    shown_s = data_s if data_s >= MADE_BY_RANK * fetch_s else min(data_s, delay_s(fetch_s, cores))
    return max(compute_s + shown_s - delay_s(fetch_s, cores), LEAST_COMPUTING * compute_s)


def step_without_input_s(step_s: float, ranks: Iterable[RankMeasure], cores: int | None) -> float:
    """Return the seconds of a measured step without those that predictions count as waiting for input.

    ``ranks``: what the ranks have measured of this step, if they have. ``cores``: CPUs of each rank; None on GPUs.
    """

    def input_s(measure: RankMeasure) -> float:
        return measure.data_s if cores is None or not measure.fetch_s else delay_s(measure.fetch_s, cores)

    return max(step_s - max(map(input_s, ranks), default=0.0), LEAST_COMPUTING * step_s)
