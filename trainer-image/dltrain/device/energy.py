"""Energy used by a rank's device, read from hardware counters for the run's report.

A GPU's counter is NVML's total energy in mJ since its driver was loaded (Volta and later, whole GPUs only). CPU
packages have RAPL counters, which include everything that runs on the node. Only one rank of a pod reads them, and
counts the pod's part: its part of the CPU time in which the node's CPUs were busy. Only root can read RAPL counters,
unless the node's administrator allows it (CVE-2020-8694). A missing counter is reported as missing, not replaced by an
estimate, because the plan has an estimate.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from dltrain.host import cgroup
from dltrain.protocol.rank_messages import Energy

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


class Meter:
    """A meter of the energy that a device has used since the meter was created."""

    def __init__(self, source: Literal["NVML", "RAPL"], read_J: Callable[[], float]) -> None:
        """Store the counter's present value, from which ``used`` counts. ``source``: the kind of the counter.

        ``read_J``: a function that returns the counter's value in J, which never falls. Raise OSError if the counter is
        unreadable.
        """
        self._source, self._read_J = source, read_J
        self._first_J = read_J()

    def used(self) -> Energy | None:
        """Return the energy (in joules) used since the meter was created; None if the counter can no longer be read."""
        try:
            return Energy(joules=max(0.0, self._read_J() - self._first_J), source=self._source)
        except (OSError, ValueError):
            return None


def meter(device: torch.device, local_rank: int) -> Meter | None:
    """Return an energy meter for this rank's device, or None if no counter is readable or another rank reads it.

    Ranks can share a counter: those on one GPU, and all CPU ranks of a pod. ``local_rank``: this rank's number in its
    pod.
    """
    try:
        if device.type == "cuda":
            if local_rank >= torch.cuda.device_count():
                return None  # This rank shares its GPU with a rank that reads the counter.
            return Meter("NVML", _gpu(str(torch.cuda.get_device_properties(device).uuid)))
        return Meter("RAPL", Packages(POWERCAP, PodPart())) if local_rank == 0 else None
    except (OSError, ValueError, AttributeError):  # no library or file, no number in it, a library without the function
        return None


class PodPart:
    """The part of the node's CPU time that this pod has used since the last call. Call the object to get it."""

    def __init__(
        self,
        pod_s: Callable[[], float | None] = cgroup.cpu_time_s,
        node_s: Callable[[], float | None] = cgroup.node_cpu_time_s,
    ) -> None:
        """Store the present CPU times. ``pod_s``, ``node_s``: functions that return CPU seconds of pod and node."""
        self._pod_s, self._node_s = pod_s, node_s
        self._last = pod_s(), node_s()

    def __call__(self) -> float:
        """Return the part, from 0 to 1. If a CPU time is unreadable, or the node's has not changed, return 1."""
        (pod_s, node_s), last = (self._pod_s(), self._node_s()), self._last
        self._last = pod_s, node_s
        if pod_s is None or node_s is None or last[0] is None or last[1] is None or node_s <= last[1]:
            return 1.0
        return min(1.0, max(0.0, pod_s - last[0]) / (node_s - last[1]))


class Packages:
    """The energy of a node's CPU packages that a pod has used, in joules. Call the object to read it.

    Each package's counter starts again at 0 when it reaches the end of its range. The total includes such restarts.
    """

    def __init__(self, powercap: Path, part: Callable[[], float]) -> None:
        """Find the CPU packages and read their counters. Raises OSError if there are none, or if they are unreadable.

        ``powercap``: the folder of the kernel's energy counters. ``part``: returns the part of the energy since its
        last call that the pod has used.
        """
        self._part = part
        self._folders = sorted(
            folder
            for folder in powercap.glob("intel-rapl:*")  # AMD CPUs use this name, too.
            if folder.name.count(":") == 1 and (folder / "name").read_text().startswith("package")
        )
        if not self._folders:
            raise FileNotFoundError(
                f"{powercap}: found no CPU package with an energy counter (RAPL); expected at least the folder "
                "intel-rapl:0"
            )
        self._ranges = [int((folder / "max_energy_range_uj").read_text()) for folder in self._folders]
        self._last = self._read()
        self._total_uJ = 0.0

    def __call__(self) -> float:
        """Return the joules since the object was created.

        A counter may wrap around at most once between two calls, so call the object often enough.
        """
        now, part = self._read(), self._part()
        for new, old, span in zip(now, self._last, self._ranges, strict=True):
            self._total_uJ += part * (new - old if new >= old else new - old + span)
        self._last = now
        return self._total_uJ / 1e6

    def _read(self) -> list[int]:
        return [int((folder / "energy_uj").read_text()) for folder in self._folders]


def _gpu(identity: str, library: str = NVML) -> Callable[[], float]:
    """Return a function that reads the energy counter, in J, of the GPU with the UUID ``identity``.

    Raise OSError if NVML is missing or the GPU has no such counter.
    """
    nvml, handle = ctypes.CDLL(library), ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        if code := getattr(nvml, name)(*arguments):
            raise OSError(f"{name}: NVML error {code}")

    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", f"GPU-{identity.removeprefix('GPU-')}".encode(), ctypes.byref(handle))

    def read() -> float:
        counted_mJ = ctypes.c_ulonglong()
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(counted_mJ))
        return counted_mJ.value / 1e3

    return read
