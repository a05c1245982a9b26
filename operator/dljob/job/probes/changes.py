"""Notice that the kernel or the GPU driver of a measured node has changed since. No I/O."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dljob.cluster.hardware import KEY
from dljob.job.identity import profile_name

MAX_VERSION = 96
"""Largest number of characters of a version in a DLProfile."""
DRIVER_LABELS = ("nvidia.com/cuda.driver-version.full", "amd.com/gpu.driver-version")
"""Labels of a node that have the version of its GPUs' driver: of NVIDIA's GPU feature discovery, and AMD's labeller."""


@dataclass(frozen=True)
class Software:
    """What a node says about the software on which its speed depends. Empty: it does not say."""

    kernel: str = ""
    driver: str = ""

    @classmethod
    def of(cls, kernel: str, labels: Mapping[str, str]) -> "Software":
        """Return the software of a node with this ``kernel`` and these ``labels``, cut to what a profile can hold."""
        driver = next((labels[label] for label in DRIVER_LABELS if label in labels), "")
        return cls(kernel[:MAX_VERSION], driver[:MAX_VERSION])


def own_statuses(profiles: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (device type, status) of each profile of hardware that the operator itself writes.

    ``profiles``: DLProfile objects. Another measurement by the operator would not change profiles of a namespace or
    with another name.
    """
    for profile in profiles:
        device = str(profile["spec"]["device"])
        if profile["metadata"]["name"] == profile_name(KEY, device):
            yield device, profile.get("status") or {}


def changed_classes(profiles: Iterable[Mapping[str, Any]], nodes: Mapping[str, Software]) -> dict[str, str]:
    """Return device type → what has changed on the node on which the type was measured, for the log.

    ``profiles``: DLProfile objects. Only those that the operator itself writes count. ``nodes``: name → software. A
    type whose measured node is gone, or says nothing, counts as unchanged.
    """
    found = {}
    for device, status in own_statuses(profiles):
        hardware = status.get("hardware")
        if not isinstance(hardware, Mapping):
            continue
        name = str(hardware.get("node") or "")
        now = nodes.get(name, Software())
        for what, new in (("kernel", now.kernel), ("driver", now.driver)):
            old = str(hardware.get(what) or "")
            if old and new and old != new:
                found[device] = f"the {what} of node {name} was {old} and is {new}"
    return found
