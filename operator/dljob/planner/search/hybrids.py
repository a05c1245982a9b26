"""Hybrids: data parallelism combined with pipelines or tensor parallelism, on equal ranks of one type of device.

The search is small: for each group of nodes, a few numbers of ranks per replica, and the fewest micro-batches that fit.
"""

from collections.abc import Iterator
from typing import Literal

from dljob.perf.step import model_split as split
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate
from dljob.planner.types import CollectiveName, Request

MICRO_BATCHES_PER_STAGE = 4
"""Default number of micro-batches for each stage of a pipeline. With p stages, the pipeline bubble is then the fraction
(p - 1) / (5 p - 1) of the step, which is less than a fifth."""
STAGES, GROUPS = (2, 4, 8, 16, 32), (2, 4, 8)
"""Numbers of pipeline stages, and of ranks of a tensor-parallel group."""


def node_counts(most: int) -> list[int]:
    """Return the numbers of nodes to try, in falling order: ``most``, and the powers of two up to it."""
    return sorted({most, *(1 << i for i in range(most.bit_length()))}, reverse=True)


def reducing(part: Part) -> CollectiveName:
    """Return the collective with which ranks that hold the same part of a model sum its gradients."""
    return "Torch" if part.option.pool.is_gpu else "Ring"


def hybrids(
    kind: Literal["Pipeline", "Tensor"], part: Part, request: Request, model: split.Model, *, anywhere: bool = False
) -> Iterator[SplitCandidate]:
    """Yield the hybrids on the ranks of ``part``, with at least two replicas.

    Pipelines have ``MICRO_BATCHES_PER_STAGE`` micro-batches per stage. Tensor-parallel groups have one micro-batch and,
    on GPUs, lie within a node. ``anywhere``: see ``SplitCandidate``.
    """
    units = model.pairs.units if model.pairs is not None else 0
    most = len(model.stages) if kind == "Pipeline" else units
    if kind == "Tensor" and part.option.pool.is_gpu:
        most = min(most, part.option.ranks_per_node)
    for size in STAGES if kind == "Pipeline" else GROUPS:
        replicas, rest = divmod(part.ranks, size)
        if rest or size > most or not 2 <= replicas <= request.global_batch:
            continue
        batch = -(-request.global_batch // replicas)
        micro_batches = 1 if kind == "Tensor" else min(MICRO_BATCHES_PER_STAGE * size, batch)
        yield SplitCandidate(part, kind, request.collective or reducing(part), micro_batches, replicas, anywhere)
