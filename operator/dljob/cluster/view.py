"""ClusterView: an immutable snapshot of the cluster's nodes and their free resources.

``kube`` creates a ClusterView from nodes and pods. ``cluster_view`` creates it from a mapping, which ``dljob plan
--cluster FILE`` and the service read.
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from dljob.cluster.catalogue import is_known_gpu, names_gpu, part_error, similar_gpus
from dljob.cluster.gpu_limits import CLOCK_LIMIT_LABEL, POWER_LIMIT_LABEL, device_type, limit_error, wrong_limits
from dljob.cluster.platforms import platform_error


@dataclass(frozen=True)
class Node:
    """A schedulable node. A CPU node has one device."""

    name: str
    device: str
    """Device type: the GPU's product name, or the node's CPU type (label ``dljob.dev/device``, default ``cpu``).

    That of GPUs under a power or clock limit also has the limit (``gpu_limits.device_type``)."""
    devices: int = 1
    """Number of devices on the node."""
    free_devices: int = 1
    """Number of devices that no pod uses."""
    cpu: float = 1.0
    """Allocatable CPUs."""
    free_cpu: float = 1.0
    """CPUs that no pod requests."""
    free_memory_nbytes: int = 2**33
    """Memory in bytes that no pod requests."""
    link_bandwidth_Bps: float | None = None
    """Network bandwidth in bytes/s from the annotation ``dljob.dev/network-bandwidth``; None without the annotation."""
    is_gpu: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str, str], ...] = ()
    """(key, value, effect) of each taint that keeps pods without a matching toleration away from the node."""
    storage_nbytes: int | None = None
    """Allocatable ephemeral storage in bytes, whatever pods have requested of it; None if it is unknown."""
    memory_nbytes: int | None = None
    """Allocatable memory in bytes; None if it is unknown."""
    left_out: str | None = None
    """Reason why new plans must not use the node, such as repeated faults; None if they may use it."""
    free_pods: int | None = None
    """Number of pods for which the node has room, whatever they request; None if it is unknown."""
    wrong_platform: bool = False
    """True if no pod of a job can run on the node, because of its operating system or architecture (``left_out``)."""
    exists: bool = True
    """False for a node that an autoscaler can add. It may get labels that ``labels`` lacks."""


def nodes_left(own: Iterable[Hashable], others: Iterable[tuple[Iterable[Hashable], int]]) -> int:
    """Return the largest number of nodes that a group of pods can have while other groups of the job have all theirs.

    A node runs at most one pod of a job. ``own``: the nodes on which a pod of the group fits. ``others``: for each
    other group, the nodes on which its pods fit, and their number; there must be room for all of these groups together.
    By Hall's theorem (1935), the result is the minimum, over all subsets of ``others``, of the number of nodes on which
    a pod of the group or of the subset fits, minus the number of pods of the subset.
    """
    pods = {frozenset(own): 0}
    """Nodes of a subset together with ``own`` → the most pods of such a subset. Subsets are few if nodes are alike."""
    for nodes, count in others:
        for union, before in list(pods.items()):
            larger = union.union(nodes)
            pods[larger] = max(pods.get(larger, 0), before + count)
    return min(len(union) - count for union, count in pods.items())


@dataclass(frozen=True)
class ClusterView:
    nodes: tuple[Node, ...] = ()

    def without(self, left_out: Mapping[str, object]) -> "ClusterView":
        """Return a view in which some nodes are marked with the reason why plans must not use them.

        ``left_out``: name of such a node → description of its faults.
        """
        if not left_out:
            return self
        texts = {name: f"left out because of repeated faults: {left_out[name]}" for name in left_out}
        return ClusterView(
            tuple(replace(node, left_out=texts[node.name]) if node.name in texts else node for node in self.nodes)
        )

    def on_platforms(self, architectures: Collection[str]) -> "ClusterView":
        """Return a view in which nodes of other architectures are marked, so that plans do not use them.

        ``architectures``: those for which the trainer image is built; empty: any.
        """
        return ClusterView(on_platforms(self.nodes, architectures))

    @property
    def device_types(self) -> tuple[str, ...]:
        """Return the sorted device types of all nodes."""
        return tuple(sorted({node.device for node in self.nodes}))


def on_platforms(nodes: Iterable[Node], architectures: Collection[str]) -> tuple[Node, ...]:
    """Return the nodes. Those on which no pod of a job can run are marked (``platforms.platform_error``)."""
    found = [(node, platform_error(node.labels, architectures)) for node in nodes]
    return tuple(replace(node, left_out=error, wrong_platform=True) if error else node for node, error in found)


_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGTPE]|[KMGTPE]i)?")
_SCALE = {"": Decimal(1), "m": Decimal("0.001")}
_SCALE |= {suffix: Decimal(1000) ** n for n, suffix in enumerate("kMGTPE", 1)}
_SCALE |= {f"{suffix}i": Decimal(1024) ** n for n, suffix in enumerate("KMGTPE", 1)}


def quantity(value: object) -> Decimal:
    """Return the value of a number or a Kubernetes quantity such as ``500m`` or ``4Gi``. Raise ValueError otherwise.

    The Kubernetes client library has a similar function, but only packages that do I/O may import that library.
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None or isinstance(value, bool):
        raise ValueError(f"found {value!r}; expected a quantity such as 2, 500m or 4Gi")
    return Decimal(match[1]) * _SCALE[match[2] or ""]


_FIELDS = (
    "name",
    "count",
    "device",
    "devices",
    "free",
    "cpu",
    "memory",
    "storage",
    "bandwidth",
    "labels",
    "taints",
    "gpu",
    "zone",
    "rack",
    "machine",
    "machineCpu",
    "powerLimit",
    "clockLimit",
)
MACHINE_LABEL = "dljob.dev/machine"
"""Label of nodes with the name of the physical machine on which they run."""
MACHINE_CPU_LABEL = "dljob.dev/machine-cpu"
"""Label of nodes with the number of CPUs that all nodes of their machine can use together."""
MAX_NODES = 100_000
_UNITS = {
    "memory": ("bytes", "1Mi", "bytes with a unit, such as 4Gi"),
    "storage": ("bytes", "1Mi", "bytes with a unit, such as 100Gi"),
    "bandwidth": ("bytes/s", "1k", "bytes per second, such as 1.25G for a network of 10 Gbit/s"),
}
"""Field → unit, least value, and a description with an example. A lower value has no unit, or the wrong one."""


_LIMITS = {"powerLimit": POWER_LIMIT_LABEL, "clockLimit": CLOCK_LIMIT_LABEL}
"""Field with a limit of GPUs → the label for which it is short."""
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
"""Effects of taints that Kubernetes knows. Any other one would have no effect on plans."""
_EXAMPLE = "[{count: 3, cpu: 2, memory: 4Gi}]"


def cluster_view(document: object) -> ClusterView:
    """Return a cluster from a mapping, as read from YAML::

        nodes:
        - {name: gpu, count: 4, device: NVIDIA-A100-SXM4-40GB, devices: 8, cpu: 64, memory: 512Gi, bandwidth: 12.5G}
        - {name: spare, count: 10, device: cpu, cpu: 4, memory: 16Gi}

    Fields: ``name`` (default node<i>; with ``count``: name-0, name-1, …), ``device`` (default cpu), ``devices``
    (default 1), ``free`` devices (default all), ``cpu`` (default 1), ``memory`` (default 8Gi, or 16Gi for each GPU),
    ``storage`` on disk (ephemeral storage; default unknown), network ``bandwidth`` in bytes/s, ``labels``, ``zone`` and
    ``rack`` (short for the labels topology.kubernetes.io/zone and rack), ``machine`` and ``machineCpu`` (short for the
    labels dljob.dev/machine and machine-cpu), ``powerLimit`` and ``clockLimit`` of each GPU in watts and MHz (short for
    the labels dljob.dev/power-limit and clock-limit), and ``taints`` as in a node's spec. A device that is not in the
    catalogue is a CPU type, unless the entry has ``gpu: true``. One that seems to be a GPU, by its name or the number
    of devices, needs the field ``gpu``. Raise ValueError with the entry, the found and the expected value.
    """
    entries = document.get("nodes") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or not isinstance(document, Mapping) or set(document) != {"nodes"}:
        found = ", ".join(sorted(map(str, document))) if isinstance(document, Mapping) else type(document).__name__
        if isinstance(document, Mapping) and set(document) == {"nodes"}:
            raise ValueError(f"cluster: nodes: found {entries!r:.100}; expected a list of nodes, such as {_EXAMPLE}")
        raise ValueError(
            f"cluster: found {found}; expected a mapping with the single key nodes and a list of nodes, such as "
            f"nodes: {_EXAMPLE}"
        )
    nodes: list[Node] = []
    for i, entry in enumerate(entries):
        try:
            nodes += _nodes(i, entry)
        except ValueError as error:
            raise ValueError(f"cluster: nodes[{i}]{error}") from None
        if len(nodes) > MAX_NODES:
            raise ValueError(f"cluster: found more than {MAX_NODES} nodes; expected at most {MAX_NODES}")
    if twice := [name for name, n in Counter(node.name for node in nodes).items() if n > 1]:
        raise ValueError(f"cluster: found two nodes named {twice[0]!r}; expected unique names")
    return ClusterView(tuple(nodes)).on_platforms(())


def _nodes(index: int, entry: object) -> Iterator[Node]:
    if not isinstance(entry, Mapping):
        raise ValueError(f": found {entry!r}; expected a mapping such as {{device: cpu, cpu: 4}}")  # noqa: TRY004
    if unknown := sorted(set(map(str, entry)) - set(_FIELDS)):
        raise ValueError(f".{unknown[0]}: no such field; expected one of {', '.join(_FIELDS)}")
    device = entry.get("device", "cpu")
    if not isinstance(device, str) or not 1 <= len(device) <= 63:
        raise ValueError(f".device: found {device!r}; expected the name of a device type, of at most 63 characters")
    if "devices" in entry and "device" not in entry:
        raise ValueError(
            f".devices: found {entry['devices']!r} without a device; expected also its type, such as device: "
            "NVIDIA-A100-SXM4-40GB"
        )
    count = _whole(entry, "count", 1, least=1, most=MAX_NODES)
    if entry.get("devices") == 0:
        raise ValueError(".devices: found 0; expected 1 to 64. For a node without GPUs, remove device and devices")
    devices = _whole(entry, "devices", 1, least=1, most=64)
    is_gpu = entry.get("gpu", is_known_gpu(device))
    if "gpu" not in entry and not is_gpu and (devices > 1 or names_gpu(device)):
        several = f" with {devices} devices" if devices > 1 else ""
        near = similar_gpus(device)
        raise ValueError(
            f".device: found {device!r}{several}, which is no GPU of the catalogue; expected "
            f"{'one, such as ' + ' or '.join(near) if near else 'the name of one, such as NVIDIA-A100-SXM4-40GB'}. "
            "Correct the name, or set gpu: true for a GPU without a data sheet, or gpu: false for a type of CPUs"
        )
    if "gpu" not in entry and (wrong := part_error(device)) is not None:
        raise ValueError(
            f".device: found {device!r}, but {wrong}. Correct the name, or set gpu: true if nvidia-smi lists this one"
        )
    if not isinstance(is_gpu, bool):
        raise ValueError(f".gpu: found {is_gpu!r}; expected true or false")  # noqa: TRY004 - user input
    if devices > 1 and not is_gpu:
        raise ValueError(
            f".devices: found {devices} with gpu: false; expected 1, because a CPU node is one device. Remove devices, "
            "or set gpu: true"
        )
    cpu, memory, bandwidth, storage = (
        _amount(entry, "cpu", "1"),
        _amount(entry, "memory", f"{16 * devices}Gi" if is_gpu else "8Gi"),
        _amount(entry, "bandwidth", None),
        _amount(entry, "storage", None),
    )
    name = entry.get("name", f"node{index}")
    if not isinstance(name, str | int) or isinstance(name, bool) or not str(name):
        raise ValueError(f".name: found {name!r}; expected a name that is not empty, such as gpu")
    labels = _labels(entry.get("labels", {}))
    labels |= _place(entry, labels)
    _check_limits(entry, device, is_gpu, labels)
    for i in range(count):
        node = f"{name}-{i}" if "count" in entry else str(name)
        yield Node(
            name=node,
            device=device_type(device, is_gpu, labels),
            devices=devices,
            free_devices=_whole(entry, "free", devices, least=0, most=devices),
            cpu=float(cpu or 0),
            free_cpu=float(cpu or 0),
            memory_nbytes=int(memory or 0),
            free_memory_nbytes=int(memory or 0),
            link_bandwidth_Bps=float(bandwidth) if bandwidth is not None else None,
            is_gpu=is_gpu,
            labels=labels,
            taints=_taints(entry.get("taints", [])),
            storage_nbytes=int(storage) if storage is not None else None,
            left_out=limit_error(node, device, is_gpu, labels),
        )


def _whole(entry: Mapping[Any, Any], name: str, default: int, least: int, most: int) -> int:
    value = entry.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f".{name}: found {value!r}; expected a whole number from {least} to {most}")
    return value


def _amount(entry: Mapping[Any, Any], name: str, default: str | None) -> Decimal | None:
    """Return the field ``name`` of an entry of the cluster's mapping as a number, such as 4Gi as 4294967296.

    ``default``: value of an unset field, such as 8Gi; None: return None if the field is unset. Raise ValueError if the
    value is not a quantity, is not above 0, or is so small that its unit is missing.
    """
    value = entry.get(name, default)
    if value is None:
        return None
    unit, least, expected = _UNITS.get(name, ("", None, "a quantity above 0, such as 2 or 500m"))
    try:
        amount = quantity(value)
    except ValueError:
        raise ValueError(f".{name}: found {value!r}; expected {expected}. Correct it") from None
    if amount <= 0:
        more = "" if "above 0" in expected else ", more than 0"
        raise ValueError(f".{name}: found {value!r}; expected {expected}{more}. Correct it")
    if least is not None and amount < quantity(least):
        shown = f"{amount.normalize():f}"
        raise ValueError(
            f".{name}: found {value!r}, which is {shown} {unit}; expected at least {least}: {expected}. Add the unit"
        )
    return amount


def _labels(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError(f".labels: found {value!r}; expected a mapping of names to strings. Put numbers in quotes")
    return {str(k): v for k, v in value.items()}


def _place(entry: Mapping[Any, Any], labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels for which an entry has short fields. ``labels``: those that it has in full."""
    found = {}
    places = {"zone": "topology.kubernetes.io/zone", "rack": "topology.kubernetes.io/rack", "machine": MACHINE_LABEL}
    for name, label in places.items():
        value = entry.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or not 1 <= len(value) <= 63:
            raise ValueError(
                f".{name}: found {value!r}; expected text of at most 63 characters. Put a number in quotes"
            )
        found[label] = value
    if (cpu := _amount(entry, "machineCpu", None)) is not None:
        if MACHINE_LABEL not in found.keys() | labels.keys():
            raise ValueError(
                f".machineCpu: found {entry['machineCpu']!r} without a machine; expected also its name, such as "
                "machine: host-7, which all nodes of the machine have. Add it, or remove machineCpu"
            )
        found[MACHINE_CPU_LABEL] = str(cpu)
    for name, label in _LIMITS.items():
        if (limit := entry.get(name)) is not None:
            found[label] = str(limit)
    return found


def _check_limits(entry: Mapping[Any, Any], device: str, is_gpu: bool, labels: Mapping[str, str]) -> None:
    """Raise ValueError if a field states a limit that the GPUs cannot have.

    A wrong label of an entry is none, because files with the labels of real nodes must show what plans make of them.
    """
    wrong = wrong_limits(device, is_gpu, labels)
    for name, label in _LIMITS.items():
        if (limit := entry.get(name)) is None:
            continue
        if not is_gpu:
            raise ValueError(f".{name}: found {limit!r} for CPUs; expected it for GPUs only. Remove it")
        if label in wrong:
            raise ValueError(
                f".{name}: found {limit!r}; expected {wrong[label]}. Set it to the limit that nvidia-smi shows, or "
                "remove it"
            )


def _taints(value: object) -> tuple[tuple[str, str, str], ...]:
    fields = {"key", "value", "effect", "timeAdded"}
    if not isinstance(value, list) or not all(
        isinstance(t, Mapping) and {"key", "effect"} <= set(t) <= fields for t in value
    ):
        raise ValueError(f".taints: found {value!r}; expected a list of mappings with key, value and effect")
    for i, taint in enumerate(value):
        if taint["effect"] not in EFFECTS:
            expected = f"{', '.join(EFFECTS[:-1])} or {EFFECTS[-1]}"
            raise ValueError(f".taints[{i}].effect: found {taint['effect']!r}; expected {expected}")
    return tuple((str(t["key"]), str(t.get("value", "")), t["effect"]) for t in value)
