"""Data movement: bringing a rank its samples. Users: ``step``.

The trainer holds the dataset in memory and prepares the next batch while this one trains, so only what is longer than
computing is felt.
"""

from dljob.hardware import Device
from dljob.perf.workload import Workload


def gather_s(workload: Workload, device: Device, batch: int) -> float:
    """Reading ``batch`` samples from memory, writing them as one batch and, for a GPU, moving them there."""
    nbytes = workload.sample_nbytes * batch
    copies = 2 * nbytes / (device.memory_bandwidth_Bps if device.kind == "cpu" else 10e9)
    return copies + (nbytes / device.host_bandwidth_Bps if device.kind == "gpu" else 0.0)


def exposed_s(data_s: float, compute_s: float) -> float:
    """What a step waits for data that is fetched while the step before computes."""
    return max(0.0, data_s - compute_s)
