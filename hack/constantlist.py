"""List the constants of the performance model: what measures each, where it is stored, and its value without it."""

from collections.abc import Iterator, Mapping
from typing import Any

from dljob.api import crd
from dljob.cluster import catalogue
from dljob.perf.step import backends
from dljob.perf.step.communication import SHARED_MEMORY_LATENCY_S, TCP_LATENCY_S, ETHERNET_BANDWIDTH_Bps
from dljob.perf.step.compute import BANDWIDTH_EFFICIENCY, PRODUCT_EFFICIENCY_16
from dljob.perf.step.input_data import DISK_BANDWIDTH_Bps

GB = 1e9
FRAMEWORKS: Mapping[backends.BackendName, str] = {
    "MPI": "dltrain over MPI",
    "Gloo": "torchrun with gloo",
    "ParameterServer": "dltrain's parameter server",
}

CONSTANTS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    (
        "`c_p`: processing of a sample",
        "each run (three batch sizes, and the steps of training); before the first run, `dljob probe`",
        ("compute[].seconds", "hardware.factors.product"),
        "operations and bytes of each layer by the data sheet, of which matrix products in 16 bits reach "
        f"{PRODUCT_EFFICIENCY_16:g} (`perf/step/compute.py`); on CPUs the regression in `perf/workload/structure.py`",
    ),
    (
        "`c_b`: the server's handling of one update",
        "`dljob probe`, as the factor of parameter traffic; "
        "`benchmarks/papers/asynchronous_rounds.py` checks the prediction",
        ("hardware.factors.weight",),
        "gradient norm and optimizer step: (4 + 2 s) 4 bytes per parameter over the memory bandwidth, with s values "
        "of optimizer state per parameter (`update_s` in `perf/step/compute.py`)",
    ),
    (
        "`c_u`: the server's synchronization",
        "each run on several machines and `dljob probe`, as the latency of a message; "
        "`benchmarks/papers/framework_constants.py`, as its ratio for the server",
        ("linkLatencySeconds", "hardware.networkLink.latencySeconds"),
        "synchronous: 2 ceil(log2 n) latencies per tensor of a layered server. Asynchronous: the queue of n workers "
        "(`perf/step/synchronization.py`)",
    ),
    (
        "`r_d`: reads from disk",
        "`dljob probe`, past the page cache",
        ("hardware.diskReadBytesPerSecond",),
        f"{DISK_BANDWIDTH_Bps / GB:g} GB/s",
    ),
    (
        "`w_d`: writes to disk",
        "`dljob probe`. Only the time to fetch data depends on it. Each run measures how long its checkpoints take",
        ("hardware.diskWriteBytesPerSecond",),
        f"{DISK_BANDWIDTH_Bps / GB:g} GB/s",
    ),
    (
        "`r_m`, `w_m`: reads from and writes to memory",
        "`dljob probe`, as one rate: a copy reads and writes as many bytes. Factors of measured steps correct "
        "activations and parameters",
        ("hardware.memoryBytesPerSecond", "hardware.factors.activation", "hardware.factors.weight"),
        f"{BANDWIDTH_EFFICIENCY:g} of the bandwidth in the data sheet",
    ),
    (
        "`r_net`: network",
        "each run on several machines and `dljob probe --link`; all steps on several devices together",
        ("linkBandwidthBytesPerSecond", "hardware.networkLink.bandwidthBytesPerSecond", "scaling[].seconds"),
        f"the node's annotation, else {ETHERNET_BANDWIDTH_Bps / GB:g} GB/s and {1e6 * TCP_LATENCY_S:g} us; within a "
        f"CPU node {1e6 * SHARED_MEMORY_LATENCY_S:g} us",
    ),
)
"""(constant, what measures it, fields of ``DLProfile.status`` that store it, value without a measurement)."""


def page() -> str:
    """Return docs/reference/constants.md. Raise KeyError if a field that it names does not exist."""
    schema = _status()
    lines = [
        "<!-- made by hack/generate from hack/constantlist.py, devices.json and backends.json; change those. -->",
        "# Constants of the performance model",
        "",
        "This page is for engineers who check a prediction. It says what measures each constant of the model, where",
        "it is stored, and what counts without a measurement. `kubectl get dlprofiles -o yaml` shows stored values:",
        "one object for each model and device, and one of the model `hardware` for each device.",
        "",
        "| Constant | Measured by | Stored in DLProfile `status` | Without a measurement |",
        "|---|---|---|---|",
    ]
    for name, by, fields, otherwise in CONSTANTS:
        for field in fields:
            _find(schema, field)
        lines.append(f"| {name} | {by} | {', '.join(f'`{field}`' for field in fields)} | {otherwise} |")
    source = backends.source()
    lines += [
        "",
        "## For each framework",
        "",
        "Frameworks differ in how they use a link. Latency and bandwidth are divided by those of an exchange of",
        f"messages on the same link. `{source.command}` measured them on {source.date}",
        f"({source.machine}; {source.links})",
        "and stored them in `operator/dljob/perf/step/backends.json`. `dljob plan --compare frameworks` uses them.",
        "No GPU was measured: NCCL has the link's own figures.",
        "",
        "| Framework | Latency, nodes | Bandwidth, nodes | Latency, one node | Bandwidth, one node | Reduced at once |",
        "|---|---|---|---|---|---|",
        *_frameworks(),
        "",
        "## For each device",
        "",
        "Figures of data sheets (`operator/dljob/cluster/devices.json`), which count until a run or a probe has",
        "measured the device. CPU nodes have the catalogue's generic core.",
        "",
        "| Device | float32, TFLOP/s (`c_p`) | Memory for ranks, GiB | Memory, GB/s (`r_m`, `w_m`, `c_b`) | "
        "Neighbour, GB/s | Host, GB/s |",
        "|---|---|---|---|---|---|",
        *_devices(),
    ]
    return "\n".join(lines) + "\n"


def _status() -> Mapping[str, Any]:
    (profile,) = [each for each in crd.definitions() if each["spec"]["names"]["kind"] == "DLProfile"]
    found: Mapping[str, Any] = profile["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    return found


def _find(schema: Mapping[str, Any], path: str) -> None:
    for name in path.split("."):
        schema = schema["properties"][name.removesuffix("[]")]
        schema = schema["items"] if name.endswith("[]") else schema


def _frameworks() -> Iterator[str]:
    for name, title in FRAMEWORKS.items():
        found = backends.backend(name)
        cells = (found.between.latency, found.between.bandwidth, found.within.latency, found.within.bandwidth)
        yield f"| {title} | {' | '.join(f'{cell:g}' for cell in cells)} | {found.bucket_nbytes >> 20} MiB |"


def _devices() -> Iterator[str]:
    devices = [device for name in catalogue.gpu_names() if (device := catalogue.gpu(name)) is not None]
    for device in (*devices, catalogue.cpu("cpu", 1.0)):
        rates = (device.memory_bandwidth_Bps, device.peer_bandwidth_Bps, device.host_bandwidth_Bps)
        name = "one CPU core" if device.kind == "cpu" else device.name
        nbytes = device.memory_nbytes
        room = "that of the node" if nbytes is None else f"{nbytes / 2**30:.1f}"
        yield f"| {name} | {device.fp32_FLOPs / 1e12:.3g} | {room} | {' | '.join(f'{r / GB:.4g}' for r in rates)} |"
