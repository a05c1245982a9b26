"""Data movement: what bringing a rank its samples adds to a step. Users: ``planner``.

The trainer fetches a step's samples between two steps, from memory or by computing them, so all of it is felt.
"""

from dljob.hardware import Device
from dljob.perf.workload import Workload

HOST_BANDWIDTH_Bps = 10e9
"""Copying within main memory, one thread."""


def sample_s(workload: Workload, device: Device, cores: float = 1.0) -> float:
    """Seconds a sample: making it (synthetic data), reading and writing it, and moving it to a GPU."""
    nbytes = workload.sample_nbytes
    moved_s = nbytes / device.host_bandwidth_Bps if device.kind == "gpu" else 0.0
    return (workload.making_s + 2 * nbytes / HOST_BANDWIDTH_Bps) / min(1.0, cores) + moved_s
