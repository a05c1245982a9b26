"""Identify the node: processor or GPU, kernel, driver and PyTorch."""

import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

from dltrain.device.rank_device import product_label
from dltrain.host import cgroup


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor, or that of its architecture if the kernel gives none."""
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())[:96]
    return platform.machine()


def gpu_name(device: torch.device) -> str:
    """Return the GPU's product name as in node labels."""
    return product_label(torch.cuda.get_device_name(device))[:96]


def driver(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's driver, or of ROCm, or an empty text."""
    with suppress(OSError):
        for word in version.read_text(encoding="utf-8", errors="replace").split():
            if word[:1].isdigit() and "." in word:
                return word[:96]
    return str(getattr(torch.version, "hip", None) or "")[:96]


def facts() -> dict[str, str | float | int]:
    """Return the fields of the document that describe the node and its software."""
    return {
        "cores": round(cgroup.cpu_quota(), 3),
        "node_cores": os.cpu_count() or 1,
        "kernel": platform.release()[:96],
        "torch": torch.__version__[:96],
    }
