"""Number of CPUs of a rank on a GPU, so that loading data does not hold up the GPU."""

from collections.abc import Callable

from dljob.perf.fit.curve import Curve
from dljob.perf.step.input_data import Fetching
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.pools import Pool, room_cpu
from dljob.planner.types import Request

OWN_PART = 0.9
"""Part of a node's CPUs per GPU that a rank may have. The rest is for daemons and for other pods of the node."""
UNMEASURED = 4.0
"""CPUs of a rank, if its GPU's part has as many, for a script whose time to load a sample no run has measured.

PyTorch's example for ImageNet has four loader workers by default."""
LITTLE = 0.02
"""Fraction of a step that more CPUs must save. With less, they would be better used by other pods."""


def loader_cpus(
    layout: Layout,
    pool: Pool,
    request: Request,
    largest_batch: int,
    fetching: Callable[..., Fetching],
    computing: Curve,
    *,
    measured: bool,
) -> float:
    """Return how many CPUs a rank needs so that its GPU does not wait for input: 1, 2, 4, … or its part of the node's.

    A training script loads data in processes of its own if the rank has more than one CPU, and otherwise between steps.
    The result is the smallest number with which a step is at most ``LITTLE`` slower than with the GPU's part of the
    node's CPUs, and at least ``UNMEASURED`` for a script of which no run has measured (``measured``) how long loading a
    sample takes, but never more than ``most_cpus``.

    ``largest_batch``: largest local batch in samples; of all, it needs most input per second. ``fetching``: function
    from a number of ``cores`` to the rank's input times. ``computing``: the rank's computing time over the local batch.
    """
    most = most_cpus(layout, pool, request)
    if largest_batch < 1 or most <= layout.cores:
        return layout.cores
    share = float(max(1, min(largest_batch, -(-request.global_batch // layout.ranks))))

    def step_s(cores: float) -> float:
        return fetching(cores=cores).over(computing).seconds(share)

    enough_s = (1 + LITTLE) * step_s(most)
    cores = layout.cores if measured or request.model is not None else max(layout.cores, min(UNMEASURED, most))
    while cores < most and step_s(cores) > enough_s:
        cores = min(2 * cores, most)
    return cores


def most_cpus(layout: Layout, pool: Pool, request: Request) -> float:
    """Return the largest number of CPUs that a rank on a GPU may have: the GPU's part of the node, if so many are free.

    It is ``layout.cores`` if the spec sets the CPUs of pods, or if a quota limits them (``request.cpus_max``).
    """
    if request.cpu_per_pod is not None or request.cpus_max is not None:
        return layout.cores
    ranks, cpus = layout.ranks, layout.cpus
    rooms = [room for free, room in zip(pool.free, pool.room_cpu, strict=True) if free >= ranks and room >= cpus]
    room = room_cpu(pool.cpu_with(cpus), min(rooms, default=0.0))
    room = min(room, request.cpu_limit_per_pod or room)
    return max(layout.cores, float(int(min(OWN_PART * pool.cpu_per_gpu, room / layout.ranks))))
