"""The specification of a cluster and its nodes, parsed from the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

DEVICE_LABEL = "dljob.dev/device"
MACHINE_LABEL, MACHINE_CPU_LABEL = "dljob.dev/machine", "dljob.dev/machine-cpu"
MACHINE = "development-machine"
"""Value of ``MACHINE_LABEL``: all nodes of a development cluster run on one machine."""
SYSTEM_CPU = 0.15
"""Cores that the control plane and the daemons of three nodes use. On an embedded cluster they used 0.12 cores during
110 s in which a job trained, and 0.15 in the 93 s before, in which a job started and ended."""
SLOW = 0.25
"""Part of its CPUs that a slow node has."""
GPU_RESOURCE = "nvidia.com/gpu"
DEFAULT_DEVICE = "cpu"
DEFAULT_NODES = 3
MAX_NODES = 50  # the last byte of a node's address is 10 + its number, and three kubelets already fill two cores

_LABEL_VALUE = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$")
_SWITCH = re.compile(r"^[A-Za-z0-9][A-Za-z0-9./-]*=(true|false)$")
_MEMORY = re.compile(r"^(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?$")
_MEMORY_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


@dataclass(frozen=True)
class NodeSpec:
    """One node of a cluster.

    `cpus`: CPU limit of the whole node, in cores. `memory_nbytes`: memory limit of the whole node. None means no limit.
    `gpu_product` and `gpus`: product name and number of the node's simulated GPUs; None and 0 for a node without GPUs.
    """

    name: str
    device: str = DEFAULT_DEVICE
    cpus: float | None = None
    memory_nbytes: int | None = None
    gpu_product: str | None = None
    gpus: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """Return the Kubernetes labels of the node.

        They name the node's type of device, and say that the node shares the cores of this machine with all others. A
        node with GPUs also has labels as NVIDIA's GPU feature discovery sets them.
        """
        labels = {
            DEVICE_LABEL: self.device,
            MACHINE_LABEL: MACHINE,
            MACHINE_CPU_LABEL: f"{len(os.sched_getaffinity(0)) - SYSTEM_CPU:g}",
        }
        if self.gpu_product:
            labels["nvidia.com/gpu.product"] = self.gpu_product
            labels["nvidia.com/gpu.count"] = str(self.gpus)
        return labels

    @property
    def option(self) -> str:
        """Return the node as a value of the option `--node`."""
        mib, rest = divmod(self.memory_nbytes or 0, 1 << 20)
        parts = {
            "name": self.name,
            "device": self.device,
            "cpu": self.cpus,
            "memory": self.memory_nbytes and (self.memory_nbytes if rest else f"{mib}Mi"),
            "gpu": self.gpu_product and f"{self.gpu_product}:{self.gpus}",
        }
        return ",".join(f"{key}={value}" for key, value in parts.items() if value is not None)


@dataclass(frozen=True)
class ClusterSpec:
    """The name of a cluster and its nodes, in order."""

    name: str
    nodes: tuple[NodeSpec, ...] = field(default_factory=tuple)
    kubernetes: str = ""
    """A release such as 1.36.3, the absolute path of a folder with its programs, or empty for the default release."""
    feature_gates: str = ""
    """Value of the option --feature-gates of all components, such as A=true,B=false."""
    runtime_config: str = ""
    """Value of the API server's option --runtime-config, such as scheduling.k8s.io/v1beta1=true."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ClusterSpec:
        return ClusterSpec(**{**data, "nodes": tuple(NodeSpec(**node) for node in data["nodes"])})


def parse_memory(text: str) -> int:
    """Convert a Kubernetes memory quantity such as `4Gi` or `512M` to bytes. Raise ValueError if it is invalid."""
    match = _MEMORY.match(text)
    if not match:
        raise ValueError(f"memory: found {text!r}; expected a quantity such as 4Gi or 512M")
    return int(float(match[1]) * _MEMORY_UNITS[match[2] or ""])


def parse_node(text: str, name: str) -> NodeSpec:
    """Parse a value of the option `--node`, such as device=a100,cpu=4,memory=8Gi,gpu=PRODUCT:COUNT,name=NAME.

    Every key is optional. `name`: name of the node if the value contains none. Raise ValueError for an invalid value.
    """
    values: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, found, value = part.partition("=")
        if not found or not value or key not in ("name", "device", "cpu", "memory", "gpu"):
            raise ValueError(
                f"--node {text!r}: found {part!r}; expected KEY=VALUE pairs, separated by commas, with the keys name, "
                "device, cpu, memory and gpu (gpu=PRODUCT:COUNT)"
            )
        if key in values:
            raise ValueError(f"--node {text!r}: found the key {key} twice; expected it once")
        values[key] = value
    product, gpus = _parse_gpu(values["gpu"]) if "gpu" in values else (None, 0)
    return NodeSpec(
        name=_checked(values.get("name", name), _NAME, "a node's name"),
        device=_checked(values.get("device", DEFAULT_DEVICE), _LABEL_VALUE, "a device label"),
        cpus=_parse_cpus(values["cpu"]) if "cpu" in values else None,
        memory_nbytes=parse_memory(values["memory"]) if "memory" in values else None,
        gpu_product=product,
        gpus=gpus,
    )


def parse_switches(option: str, text: str) -> str:
    """Return `text` unchanged if it has the form NAME=true|false,…; otherwise raise ValueError.

    `option`: name of the option whose value is `text`, for the error message.
    """
    for part in filter(None, text.split(",")):
        if not _SWITCH.match(part):
            raise ValueError(f"{option}: found {part!r}; expected NAME=true or NAME=false, separated by commas")
    return text


def parse_cluster(name: str, nodes: Sequence[str], count: int | None) -> ClusterSpec:
    """Return the cluster for the values of `--name`, `--node` (repeated) and `--nodes`.

    `count`: number of nodes; None for as many as `nodes` has, or for 3 if `nodes` is empty. If `nodes` has fewer than
    `count` elements, nodes with default values are added. Raise ValueError for invalid values.
    """
    _checked(name, _NAME, "a cluster's name")
    total = count if count is not None else max(DEFAULT_NODES if not nodes else 0, len(nodes))
    if total < max(1, len(nodes)) or total > MAX_NODES:
        raise ValueError(
            f"--nodes: found {total}; expected a number of nodes from {max(1, len(nodes))} (the number of --node "
            f"options, at least 1) to {MAX_NODES}"
        )
    texts = [*nodes, *[""] * (total - len(nodes))]
    parsed = tuple(parse_node(text, f"n{number}") for number, text in enumerate(texts, start=1))
    _unique(node.name for node in parsed)
    return ClusterSpec(name, parsed)


def _parse_cpus(text: str) -> float:
    try:
        cpus = float(text)
    except ValueError:
        cpus = 0.0
    if not 0.01 <= cpus <= 1024:
        raise ValueError(f"cpu: found {text!r}; expected a number of cores from 0.01 to 1024, such as 0.8")
    return cpus


def _parse_gpu(text: str) -> tuple[str, int]:
    product, _, count = text.rpartition(":")
    if not product or not count.isdigit() or not 1 <= int(count) <= 64:
        raise ValueError(
            f"gpu: found {text!r}; expected PRODUCT:COUNT with a count from 1 to 64, such as NVIDIA-A100-SXM4-40GB:2"
        )
    return _checked(product, _LABEL_VALUE, "a GPU product label"), int(count)


def _checked(text: str, pattern: re.Pattern[str], what: str) -> str:
    if not pattern.match(text):
        raise ValueError(
            f"{what}: found {text!r}; expected a text that matches the regular expression {pattern.pattern}"
        )
    return text


def _unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"--node: found two nodes with the name {name!r}; expected unique names. Change one of them"
            )
        seen.add(name)
