"""The device catalogue: figures from data sheets and price lists. Predictions use them until a device was measured.

``devices.json`` has one row per device. Its column names contain the units, and each row names its source.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal

from dlcontract import Precision
from dlcontract.pods import without_limits

CORE_PRICE_USD_PER_H = 0.04
"""Price of a CPU in US dollars per hour, if the administrator has set none.

It is the on-demand price of a virtual CPU with 4 GiB of memory in general-purpose instances of large clouds, 2025.
"""
DRIVER_NBYTES = 640 * 2**20
"""GPU memory that NVIDIA's driver keeps: the total that nvidia-smi reports minus the capacity that PyTorch reports.

In public logs, it is 0.44 GiB on T4, L4 and A10G, 0.47 on H100, 0.6 on A100-40GB, A40 and L40S, 0.7 on B200, and 0.86
on A100-80GB, where the margin of predictions covers the rest. Parts of GPUs (MIG) have all that nvidia-smi reports."""
MEMORY_LABEL = "nvidia.com/gpu.memory"
"""Label of nodes with the memory of each GPU in MiB, or of each part of one, which GPU feature discovery sets."""
PLAUSIBLE_MIB = range(2**10, 2**21)
"""Values of ``MEMORY_LABEL`` that are believed. A smaller one has another unit."""
_WHOLE = re.compile(r"[1-9][0-9]{0,7}")


@dataclass(frozen=True)
class TimeFactors:
    """Measured time divided by the time that data sheets predict, for each part of a step; 1 without a measurement."""

    host: float = 1.0
    """Measured / predicted time of the framework's overhead."""
    convolution: float = 1.0
    """Measured / predicted time of the arithmetic of convolutions."""
    product: float = 1.0
    """Measured / predicted time of the arithmetic of matrix products and all other layers."""
    half: float = 1.0
    """Measured / predicted time of matrix products and convolutions in 16 bits, on GPUs with units for them."""
    activation: float = 1.0
    """Measured / predicted time of the memory traffic of activations."""
    weight: float = 1.0
    """Measured / predicted time of the memory traffic of parameters, gradients and optimizer state."""


NOMINAL = TimeFactors()
TermFactors = tuple[tuple[str, float], ...]
"""(Name of a term of the regression for CPUs in ``perf.workload.structure``, measured / predicted amount of it)."""


@dataclass(frozen=True)
class Device:
    """The performance, power and price of one GPU, or of those CPUs of a CPU node that one rank uses together."""

    name: str
    kind: Literal["gpu", "cpu"]
    fp32_FLOPs: float
    """Peak single-precision operations per second."""
    conv_FLOPs: float
    """Peak operations per second in convolutions. By default, PyTorch lets cuDNN use TF32 for them."""
    memory_nbytes: int | None
    """Memory of the GPU that its processes can use; None for CPUs, which use the node's main memory."""
    memory_bandwidth_Bps: float
    peer_bandwidth_Bps: float
    """Bandwidth to another device on the same node, in one direction."""
    host_bandwidth_Bps: float
    """Bandwidth from main memory to the device, in one direction."""
    peak_power_W: float
    idle_power_W: float
    usd_per_h: float
    source: str
    bf16_FLOPs: float = 0.0
    """Peak operations per second in matrix products of bfloat16 numbers with float32 sums; 0 without units for them."""
    fp16_FLOPs: float = 0.0
    """Peak operations per second in matrix products of float16 numbers with float32 sums; 0 without units for them."""
    assumed: bool = False
    """True if the device is not in the catalogue and its figures come from another device."""
    power_limit_W: float | None = None
    """Power limit that an administrator has set; None: the peak power. Speed and peak power are those without it."""
    max_clock_MHz: float = 0.0
    """Highest clock that the driver offers; 0 for CPUs and GPUs that are not in the catalogue."""
    clock_limit_MHz: float | None = None
    """Highest clock that an administrator allows; None: ``max_clock_MHz``. Speed and power are those without it."""
    computing_power_W: float | None = None
    """Measured power while computing, with the device's pauses; None: ``perf.resources.energy`` assumes it."""
    active_power_W: float | None = None
    """Power while the device itself works; None: a fraction of the peak power (``perf.resources.energy``)."""
    host_power_W: float | None = None
    """Power of the rest of a GPU node for each of its GPUs; None: ``perf.resources.energy.HOST_POWER_W``."""
    pue: float | None = None
    """Power of the data centre divided by that of its computers; None: ``perf.resources.energy.PUE``."""
    factors: TimeFactors = NOMINAL
    """Measured times, relative to the data sheet."""
    term_factors: TermFactors = ()
    """Measured times of the terms of a CPU's regression. They take precedence over ``factors``."""
    growth_factors: TermFactors = ()
    """Measured memory of the terms of a rank's growth on a CPU."""

    def matrix_FLOPs(self, precision: Precision) -> float:  # noqa: N802 - the unit is part of the name
        """Return the peak operations per second in matrix products; 0 without units for this precision."""
        return {"FP32": self.fp32_FLOPs, "BF16": self.bf16_FLOPs, "FP16": self.fp16_FLOPs}[precision]


VENDORS = ("nvidia", "amd", "geforce", "tesla", "quadro", "instinct", "rtx")
"""Words that ``canonical`` removes from the beginning of product names, because they do not distinguish devices."""


GPU_RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""Vendor → name of the Kubernetes resource under which its device plugin offers GPUs.

Taints of GPU nodes often have this name as their key.
"""


AMD = re.compile(r"\b(amd|instinct|radeon|mi\d{2,3}[a-z]?)\b")


def vendor(label: str) -> str:
    """Return the vendor of the GPU with this product name: ``amd`` or ``nvidia``.

    A name without a word of AMD's products is taken for one of NVIDIA, because such names often omit the vendor.
    """
    return "amd" if AMD.search(re.sub(r"[-_ ]+", " ", label.lower())) else "nvidia"


@lru_cache(maxsize=1024)
def canonical(label: str) -> str:
    """Return a product name in a form that is equal for different spellings of the name of one GPU.

    The form is in lower case, without vendor, punctuation, the suffix GB and the suffix -shared (which time-sliced GPUs
    have): ``NVIDIA-A100-SXM4-40GB`` becomes ``a100sxm440``.
    """
    text = re.sub(rf"^({'|'.join(VENDORS)}|[-_ ])+", "", label.lower())
    text = re.sub(r"-?shared$", "", text)  # the NVIDIA device plugin adds this suffix to labels of time-sliced GPUs
    return re.sub(r"[^a-z0-9]", "", text).removesuffix("gb")


@cache
def _rows() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(files("dljob.cluster").joinpath("devices.json").read_text(encoding="utf-8"))["devices"])


@cache
def _catalogue() -> dict[str, Device]:
    devices: dict[str, Device] = {}
    for row in _rows():
        row, aliases = {**row}, row["aliases"]
        row["memory_nbytes"] = usable_nbytes(row["memory_nbytes"], aliases[0])
        device = Device(kind="gpu", **{key: value for key, value in row.items() if key not in ("aliases", "parts_MiB")})
        for alias in (device.name, *aliases):
            known = devices.setdefault(canonical(alias), device)
            assert known is device, f"devices.json: {alias!r} names both {known.name} and {device.name}"
    return devices


def usable_nbytes(total_nbytes: int, label: str) -> int:
    """Return how much of the memory that nvidia-smi or rocm-smi reports of a GPU is left for its processes.

    ``label``: its product label. The amount that the driver keeps of a GPU of NVIDIA is ``DRIVER_NBYTES``.
    """
    return total_nbytes if vendor(label) == "amd" or MIG.match(label) else total_nbytes - DRIVER_NBYTES


def gpu_nbytes(label: str, *labels: Mapping[str, str]) -> int:
    """Return the memory that processes can use of each GPU of some nodes, in bytes, of the node where it is smallest.

    ``label``: the device type of the nodes. ``labels``: those of each node. If they state the memory
    (``MEMORY_LABEL``), they take precedence over the catalogue, also for nodes that lack the label, such as those that
    an autoscaler may add. A value that is not a whole number of MiB, or is implausible, does not count.
    """
    stated = [text for each in labels if _WHOLE.fullmatch(text := each.get(MEMORY_LABEL, ""))]
    if believed := [int(text) for text in stated if int(text) in PLAUSIBLE_MIB]:
        return usable_nbytes(min(believed) * 2**20, label)
    return gpu_or_assumed(label).memory_nbytes or 0


def gpu(label: str) -> Device | None:
    """Return the GPU with this product name or node label, or None if it is not in the catalogue.

    The name may end with limits (``dlcontract.pods.with_limits``).
    """
    product, limit_W, clock_MHz = without_limits(label)
    known = _catalogue().get(canonical(product))
    return known if known is None or limit_W is clock_MHz is None else _limited(known, limit_W, clock_MHz)


@cache
def _limited(device: Device, limit_W: float | None, clock_MHz: float | None) -> Device:
    return replace(device, power_limit_W=limit_W, clock_limit_MHz=clock_MHz)


def gpu_names() -> tuple[str, ...]:
    """Return the sorted names of all GPUs in the catalogue."""
    return tuple(sorted({device.name for device in _catalogue().values()}))


_GPU_WORDS = {"nvidia", "geforce", "tesla", "quadro", "rtx", "gtx", "instinct", "radeon", "gpu"}
"""Words in the names of GPUs, and hardly in those of CPUs, unlike AMD."""
_ALIKE, _TYPING_ERROR = 0.6, 0.8
"""Least similarity (``difflib.SequenceMatcher.ratio``) of names to list, and of one that is probably misspelt.

``A10O`` and ``a10`` have 0.86; names of other products, such as ``c100`` and ``v100``, at most 0.75."""
_SHORTEST = 4
"""Names with fewer characters may be those of CPUs, such as ``a1`` beside ``a10``."""


def similar_gpus(label: str) -> tuple[str, ...]:
    """Return the names of at most 3 GPUs of the catalogue that are spelt like ``label``, the most similar first."""
    found = get_close_matches(canonical(label), _catalogue(), n=9, cutoff=_ALIKE)
    return tuple(dict.fromkeys(_catalogue()[alias].name for alias in found))[:3]


def is_known_gpu(label: str) -> bool:
    """Return True if the catalogue has the GPU of a device type, or if it is the label of a part of a GPU."""
    return gpu(label) is not None or is_part(label)


@lru_cache(maxsize=1024)
def names_gpu(label: str) -> bool:
    """Return True if a device type is probably that of a GPU: by a word such as Tesla, or a misspelt product name."""
    if _GPU_WORDS & set(re.split(r"[-_ ]+", label.lower())):
        return True
    product = canonical(label)
    return len(product) >= _SHORTEST and bool(get_close_matches(product, _catalogue(), n=1, cutoff=_TYPING_ERROR))


def gpu_or_assumed(label: str) -> Device:
    """Return the GPU with this product name or node label, also if the catalogue does not contain it.

    If the label is that of a MIG instance (a part of a GPU), return this part. A GPU that is not in the catalogue has
    the figures of a T4, the slowest common GPU, but no units for 16-bit numbers, which it may lack. ``assumed`` is True
    for both.
    """
    known = gpu(label) or _slice(label)
    if known is not None:
        return known
    stand_in = _catalogue()["t4"]
    return Device(
        **{
            **vars(stand_in),
            "name": label,
            "assumed": True,
            "bf16_FLOPs": 0.0,
            "fp16_FLOPs": 0.0,
            "max_clock_MHz": 0.0,
            "source": f"not in the catalogue: figures of {stand_in.name}",
        }
    )


MIG = re.compile(r"(.*)-MIG-(\d)g\.(\d+)gb", re.IGNORECASE)
"""Pattern of the node label of a MIG instance, which is a part of a GPU.

Its groups are the GPU's product name, the number of compute slices, and the memory in GiB."""


def part_error(label: str) -> str | None:
    """Return what is wrong with the label of a part of a GPU: the GPU has no such MIG profile, or no MIG.

    Return None if the profile exists, and for all other labels. The suffixes of profiles with media engines
    (``1g.5gb.me``) may follow.
    """
    if (found := MIG.match(without_limits(label).product)) is None or (whole := gpu(found[1])) is None:
        return None
    names = profiles(whole.name)
    if (profile := f"{found[2]}g.{found[3]}gb") in names:
        return None
    if not names:
        return f"{whole.name} has no MIG profiles; expected the label of the whole GPU, such as {found[1]}"
    return f"{whole.name} has no MIG profile {profile}; expected one of {', '.join(names)}"


def profiles(name: str) -> dict[str, int]:
    """Return the MIG profiles of a GPU of the catalogue with their memory in MiB; empty if it has none."""
    return next(row.get("parts_MiB", {}) for row in _rows() if row["name"] == name)


def is_part(label: str) -> bool:
    """Return True if the label is that of a MIG instance (a part of a GPU) of a GPU in the catalogue."""
    return _slice(label) is not None


def _slice(label: str) -> Device | None:
    """Return the MIG instance (part of a GPU) with this label, such as NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.

    Return None if the label has another form or if the GPU is not in the catalogue. The figures are proportional to
    those of the whole GPU, and so is a power limit; the clock is that of the whole GPU. An A30 has four compute slices,
    other GPUs have seven (NVIDIA's MIG user guide). Parts cannot access each other's memory, neither over NVLink nor
    over PCIe (RAPIDS, deployment guide: Multi-Instance GPU). NCCL copies through main memory, so each part has its part
    of the GPU's link to the host. The memory is that of the profile. A profile that the catalogue lacks is assumed to
    have as much as its name says. The memory consists of eight slices, each with an eighth of the bandwidth.
    """
    product, limit_W, clock_MHz = without_limits(label)
    if (found := MIG.match(product)) is None or (whole := gpu(found[1])) is None:
        return None
    assert whole.memory_nbytes is not None, "a GPU has memory of its own"
    named_MiB = int(found[3]) * 2**10
    MiB = profiles(whole.name).get(f"{found[2]}g.{found[3]}gb", named_MiB)
    part = int(found[2]) / (4 if whole.name == "a30" else 7)
    memory = min(8, max(1, round(8 * named_MiB * 2**20 / whole.memory_nbytes))) / 8
    return replace(
        whole,
        name=label,
        fp32_FLOPs=part * whole.fp32_FLOPs,
        conv_FLOPs=part * whole.conv_FLOPs,
        bf16_FLOPs=part * whole.bf16_FLOPs,
        fp16_FLOPs=part * whole.fp16_FLOPs,
        memory_nbytes=min(MiB * 2**20, whole.memory_nbytes),
        memory_bandwidth_Bps=memory * whole.memory_bandwidth_Bps,
        peer_bandwidth_Bps=part * whole.host_bandwidth_Bps,
        peak_power_W=part * whole.peak_power_W,
        idle_power_W=part * whole.idle_power_W,
        power_limit_W=None if limit_W is None else part * limit_W,
        clock_limit_MHz=clock_MHz,
        usd_per_h=part * whole.usd_per_h,
        source=f"a part of {whole.name}, in proportion",
        assumed=True,
    )


def cpu(label: str, cores: float) -> Device:
    """Return ``cores`` CPUs of a node as one device, with the figures of a generic server CPU.

    ``cores`` may be a fraction, such as 0.5 for a pod that may use half of a CPU. ``label``: the node's CPU type. It
    becomes the device's name.

    A core has 2 AVX2 units x 8 lanes x 2 operations (multiply, add) x 3 GHz = 96 GFLOP/s. Its memory bandwidth is
    12 GB/s, because 16 cores share a socket's 200 GB/s. Its power is 8 W, because 32 cores share a socket's 280 W; an
    idle core draws 2 W. Raise ValueError if ``cores`` is not above 0.
    """
    if not cores > 0:
        raise ValueError(f"device {label}: found {cores} CPUs; expected more than 0")
    return Device(
        name=label,
        kind="cpu",
        fp32_FLOPs=96e9 * cores,
        conv_FLOPs=96e9 * cores,
        memory_nbytes=None,
        memory_bandwidth_Bps=12e9 * cores,
        peer_bandwidth_Bps=5e9,
        host_bandwidth_Bps=12e9 * cores,
        peak_power_W=8.0 * cores,
        idle_power_W=2.0 * cores,
        usd_per_h=CORE_PRICE_USD_PER_H * cores,
        source="a generic x86-64 server core",
    )
