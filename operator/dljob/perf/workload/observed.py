"""The workload of a script whose structure was observed in an earlier run (``Structure``)."""

from dataclasses import dataclass, replace
from functools import lru_cache

from dljob.perf.workload.layer import Layer
from dljob.perf.workload.workload import HINTED_RATIO, OBSERVED, REAL_NBYTES, LEAST_FLOPs, Workload, hinted

MAX_LAYERS = 2000
"""Largest number of layers of a workload. Scripts with more operations in a step are limited by their arithmetic."""
_KINDS = {"convolution": "conv", "product": "linear", "pool": "pool"}


@dataclass(frozen=True)
class Work:
    """The operations of one kind in a step: their number, and what they compute and move for one sample.

    ``kind``: convolution, product, pool, or anything else. ``moved_nbytes``: bytes of activations that forward and
    backward pass read and write.
    """

    kind: str
    count: int
    forward_FLOPs: float
    moved_nbytes: float


@dataclass(frozen=True)
class Collectives:
    """The collectives of one kind in a step, and the bytes of all their buffers.

    ``kind``: all_reduce, all_gather, reduce_scatter, reduce, broadcast, barrier, gather (also scatter), all_to_all,
    message (send and receive), or anything else. A buffer has the parts of all ranks.
    """

    kind: str
    count: int
    nbytes: int = 0


@dataclass(frozen=True)
class Structure:
    """The costs of a script's step, as an observed rank of an earlier run had them, and the place of this run.

    All figures are for one sample, unless stated. ``flops`` are those of forward and backward pass together.
    """

    parameters: int
    flops: float
    activation_nbytes: float
    sample_nbytes: float
    batch: int
    """Samples of the observed rank in a step."""
    optimizer_slots: int
    work: tuple[Work, ...] = ()
    host_calls: tuple[tuple[str, float], ...] | None = None
    """Number of calls of the host in a step by kind (``structure.CALL_S``); None if they were not counted."""
    collectives: tuple[Collectives, ...] | None = None
    """Collectives of torch.distributed in a step by kind; None if they were not counted."""
    device: str = ""
    """Type of the device on which the run was observed."""
    nodes: int = 1
    ranks_per_node: int = 1
    cores: int | None = None
    """CPUs of each rank of the run; None on GPUs."""
    step_s: float | None = None
    """Measured seconds of a step of this run; None if they were not measured, or if its ranks were not all alike."""
    steps: int = 0
    """Steps of the whole training; 0 if the run did not complete it."""
    frozen_nbytes: int = 0
    """Bytes of the parameters that are not trained."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@lru_cache(maxsize=64)
def observed(structure: Structure) -> Workload:
    """Return the workload of a script with this structure.

    Operations of the same kind become equal layers. Convolutions and products hold the parameters.
    """
    momentum, optimizer = (0.9, "Adam") if structure.optimizer_slots > 1 else (0.9 * structure.optimizer_slots, "SGD")
    same = replace(
        hinted(
            structure.parameters,
            structure.flops,
            structure.activation_nbytes,
            structure.sample_nbytes,
            "Adam" if optimizer == "Adam" else "SGD",
            momentum,
            frozen_nbytes=structure.frozen_nbytes,
        ),
        host_calls=structure.host_calls,
    )
    total = sum(work.count for work in structure.work)
    forward_FLOPs = sum(work.forward_FLOPs for work in structure.work)
    weighted = sum(work.count for work in structure.work if work.kind in ("convolution", "product"))
    if not weighted or not forward_FLOPs:
        return same
    scale = min(1.0, MAX_LAYERS / total)
    layers: list[Layer] = []
    held = weighed = 0  # Rounded so that the sum is right, also for scripts with few parameters.
    for work in structure.work:
        n = max(1, round(scale * work.count))
        holds = work.kind in ("convolution", "product")
        weighed += work.count * holds
        parameters = structure.parameters * weighed // weighted - held if holds else 0
        held += parameters
        forward, moved = work.forward_FLOPs / n, work.moved_nbytes / REAL_NBYTES / n
        layers += [
            Layer(
                kind=_KINDS.get(work.kind, "activation"),
                parameters=parameters // n + (i < parameters % n),
                tensors=2 * holds,
                forward_FLOPs=max(forward, LEAST_FLOPs / len(structure.work) / n),
                backward_FLOPs=forward * max(0.0, structure.flops / forward_FLOPs - 1),
                moved_elements=moved,
                moved_16_nbytes=moved * REAL_NBYTES * HINTED_RATIO,
                output_elements=0.2 * moved,
                is_conv=work.kind == "convolution",
                forward_elements=0.4 * moved,
                forward_16_nbytes=0.4 * moved * REAL_NBYTES * HINTED_RATIO,
            )
            for i in range(n)
        ]
    return Workload(
        name=OBSERVED,
        layers=tuple(layers),
        activation_nbytes=structure.activation_nbytes,
        transient_nbytes=2 * structure.activation_nbytes / min(len(layers), 10),
        sample_nbytes=structure.sample_nbytes,
        optimizer_slots=same.optimizer_slots,
        host_calls=structure.host_calls,
        activation_16_nbytes=same.activation_16_nbytes,
        frozen_nbytes=structure.frozen_nbytes,
    )
