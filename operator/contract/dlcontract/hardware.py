"""The document of the hardware probe (``dltrain.hardware_probe``), and the small networks that the probe trains.

The operator knows the cost of the networks from their layers, and compares it with the measured times. The document is
untrusted input for the operator: parse it with ``HardwareMeasure.parse``. Its JSON is shorter than ``MAX_NBYTES``, the
limit of a container's termination message.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field

from dlcontract.plan_parts import Precision
from dlcontract.record import Text, UntrustedRecord

MAX_NBYTES = 4096
MAX_TIMED = 48
Rate = Annotated[float, Field(gt=0, le=1e18)]
StepSeconds = Annotated[float, Field(gt=0, le=1e5)]
Cores = Annotated[int, Field(ge=1, le=10_000)]
Label = Annotated[str, Field(max_length=96)]
LayerSizes: TypeAlias = tuple[str, *tuple[int, ...]]
"""Name and sizes of a layer (``ReferenceNet.layers``)."""
MAX_STRUCTURES = 96
"""Maximum number of random networks (``dlcontract.structures``), so that their measurements fit into the document."""
MAX_RANK_COUNTS = 3
"""Maximum number of different numbers of ranks on which random networks are measured."""
SEQUENCE = 1
"""Number of the sequence of random networks. Another sequence gets another number."""


@dataclass(frozen=True)
class ReferenceNet:
    """A small network that the probe trains.

    ``shape``: shape of one sample. ``layers``: name and sizes of each layer: ``conv`` (3 x 3, same image size; number
    of filters), ``pool`` (maximum of 2 x 2), ``linear`` (number of outputs), and ``relu``, ``gelu``, ``flatten`` and
    ``layer_norm`` without sizes. ``batches``: local batch sizes to measure on a CPU. ``scales``: True to measure the
    last of these also on several cores. ``gpu_batches``: local batch sizes to measure on a GPU, as far as they are
    needed and fit. ``half``: True to measure in 16 bits, too.
    """

    shape: tuple[int, ...]
    layers: tuple[tuple[str, *tuple[int, ...]], ...]
    batches: tuple[int, ...]
    gpu_batches: tuple[int, ...]
    scales: bool = False
    half: bool = False


_TOKEN_BLOCK = (("layer_norm",), ("linear", 512), ("gelu",), ("linear", 128))

REFERENCE_NETS: Mapping[str, ReferenceNet] = {
    "small-dense": ReferenceNet(
        (48,),
        (("linear", 96), ("relu",), ("linear", 96), ("relu",), ("linear", 10)),
        (4, 64),
        (64,),
    ),
    "wide-dense": ReferenceNet(
        (512,),
        (("linear", 2048), ("relu",), ("linear", 2048), ("relu",), ("linear", 10)),
        (8, 128),
        (64, 4096, 65536),
        scales=True,
        half=True,
    ),
    "small-conv": ReferenceNet(
        (3, 12, 12),
        (
            ("conv", 12), ("relu",), ("pool",), ("conv", 24), ("relu",),
            ("flatten",), ("linear", 32), ("relu",), ("linear", 10),
        ),
        (4, 48),
        (48,),
    ),
    "conv": ReferenceNet(
        (3, 32, 32),
        (
            ("conv", 32), ("relu",), ("conv", 32), ("relu",), ("pool",), ("conv", 64), ("relu",),
            ("flatten",), ("linear", 10),
        ),
        (4, 24),
        (32, 1024, 16384),
        scales=True,
        half=True,
    ),
    "deep-conv": ReferenceNet(
        (3, 16, 16),
        (*(("conv", 64), ("relu",)) * 8, ("flatten",), ("linear", 10)),
        (2, 8),
        (16, 512, 8192),
        scales=True,
    ),
    "tokens": ReferenceNet(
        (64, 128),
        (*_TOKEN_BLOCK * 2, ("flatten",), ("linear", 10)),
        (2, 16),
        (16, 1024, 16384),
        scales=True,
        half=True,
    ),
}  # fmt: skip
"""The networks by name.

None of them is a built-in model, so that the operator predicts the times of built-in models instead of knowing them
from a measurement. The networks cover what the operator's regression estimates: the overhead of few and of many layers,
matrix products, convolutions, activations, and weights that fit into the cache or not.
"""


class TimedStep(UntrustedRecord):
    """Time of one training step (forward, backward, SGD with momentum) of a reference network."""

    net: Label
    batch: Annotated[int, Field(ge=1, le=2**20)]
    cores: Cores = 1
    s: StepSeconds
    precision: Precision = "FP32"


class MemoryRate(UntrustedRecord):
    """Bytes per second that ``cores`` cores together, or a GPU, read and write while they copy."""

    cores: Cores = 1
    Bps: Rate


class DiskRate(UntrustedRecord):
    """Bytes per second of a scratch file. ``direct``: True if reads did not go through the page cache."""

    read_Bps: Rate | None = None
    write_Bps: Rate | None = None
    direct: bool = False


class LinkRate(UntrustedRecord):
    """Latency and bandwidth of messages to another process: on the same node by MPI, to another pod by TCP.

    ``Bps``: bytes per second. ``peer``: the address of the other pod, or "this node".
    """

    latency_s: Annotated[float, Field(gt=0, le=10)]
    Bps: Rate
    peer: Label = ""


StructureSeconds = Annotated[tuple[Annotated[float, Field(ge=0, le=1e5)], ...], Field(max_length=MAX_STRUCTURES)]
StructureWatts = Annotated[tuple[Annotated[float, Field(ge=0, le=1e6)], ...], Field(max_length=MAX_STRUCTURES)]


class StructuresOnRanks(UntrustedRecord):
    """Measurements of some random networks (``dlcontract.structures.on_ranks``) on several ranks of one node.

    Each rank computes on one core, with the whole batch of the network, and the ranks all-reduce the gradients. A
    network without a measurement has the values 0.
    """

    ranks: Annotated[int, Field(ge=2, le=10_000)]
    s: StructureSeconds
    """Elapsed seconds of a training step, of the slowest rank."""
    watts: StructureWatts = ()
    """Mean power of the node's CPU packages due to all ranks; see ``MeasuredStructures.watts``."""


class MeasuredStructures(UntrustedRecord):
    """Measurements of random networks, in the order of their sequence (``dlcontract.structures``), on one core.

    A network without a measurement has the values 0.
    """

    sequence: int = SEQUENCE
    s: StructureSeconds
    """CPU seconds of a training step."""
    grown_KiB: Annotated[tuple[Annotated[int, Field(ge=0, le=2**40)], ...], Field(max_length=MAX_STRUCTURES)]
    """Peak memory of the process in KiB, minus its memory before the network was built."""
    watts: StructureWatts = ()
    """Mean power of the node's CPU packages due to the probe while the network trained. Empty: no readable counter."""
    several: Annotated[tuple[StructuresOnRanks, ...], Field(max_length=MAX_RANK_COUNTS)] = ()
    """The same networks on several ranks, for each number of ranks."""


class HardwareMeasure(UntrustedRecord):
    """The measurements of the probe on one node."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    device: Label
    """Product name of the GPU, or of the processor."""
    kind: Literal["cpu", "gpu"] = "cpu"
    cores: Annotated[float, Field(gt=0, le=10_000)]
    """CPUs that the probe could use."""
    node_cores: Cores
    kernel: Label = ""
    driver: Label = ""
    torch: Label = ""
    steps: Annotated[tuple[TimedStep, ...], Field(max_length=MAX_TIMED)] = ()
    structures: MeasuredStructures | None = None
    memory: Annotated[tuple[MemoryRate, ...], Field(max_length=16)] = ()
    disk: DiskRate | None = None
    near: LinkRate | None = None
    far: LinkRate | None = None
    crowded: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    """Median of (elapsed time / CPU time) of steps on one core.

    A value well above 1 means that other processes used the cores too.
    """
    background_cores: Annotated[float, Field(ge=0, le=10_000)] | None = None
    """Median number of CPUs that other processes of the machine used meanwhile. None: not measured."""
    took_s: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    notes: Annotated[tuple[Text, ...], Field(max_length=8)] = ()
    """Measurements that are missing, each with the reason."""

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Parse the probe's JSON. Raise ValueError with the field, the value and what is expected."""
        return cls.model_validate_json(text)

    def to_json(self) -> str:
        """Return the document as JSON with at most ``MAX_NBYTES`` bytes.

        If it would be longer, leave out notes, and then steps.
        """
        notes, steps = list(self.notes), list(self.steps)
        while True:
            cut = self.model_copy(update={"notes": tuple(notes), "steps": tuple(steps)})
            text = cut.model_dump_json(by_alias=True, exclude_defaults=True)
            if len(text.encode()) <= MAX_NBYTES:
                return text
            (notes or steps).pop()

    def manifest(self) -> dict[str, Any]:
        """Return the document as a JSON object, without values that equal the defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
