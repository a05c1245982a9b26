"""Speed of a CPU rank over its number of cores, and of the ranks that share the cores and the memory of a node.

A step on c cores consists of four parts, which scale differently:

- arithmetic: c / (1 + ``SERIAL`` (c - 1)) times as fast as on one core. This is Amdahl's law (1967); the serial
  fraction covers operators without parallel code and threads that wait for the slowest one.
- memory traffic: c times as fast while the memory of the node keeps up, and limited by the ranks' part of the node's
  bandwidth beyond that. This is the roofline of the cores of a socket (Williams et al. 2009).
- the framework's overhead (Python, dispatch): as fast as on one core.
- starting and joining the threads of a parallel region: ``FORK_S`` log2(c) for each region, because a barrier of c
  threads has log2(c) rounds. One core has no such regions.

Fewer than one core is a part of the time of one core, so that all parts are slower by the same factor.
"""

from dataclasses import dataclass
from math import log2

SERIAL = 0.03
"""Fraction of the arithmetic that more cores do not speed up.

An assumption: with 3 %, 16 cores are 11 times and 64 cores 22 times as fast as one.
``benchmarks/perfmodel/core_scaling.py`` compares predictions with ranks of one and two threads."""
FORK_S = 2e-6
"""Seconds for each round of the barrier at the end of a parallel region, typical of GNU OpenMP within a socket."""
REGIONS_PER_LAYER = 6
"""Parallel regions of a layer in a step: one in the forward pass, two in the backward pass (by input and by weights),
and three for activation, gradient and update."""
SATURATING_PART = 0.5
"""Fraction of a node's cores that use its whole memory bandwidth. ``catalogue.cpu`` has the same assumption: 16 of the
32 cores of a socket share 200 GB/s."""
CORES_SPREAD = 0.1
"""Standard deviation of log(measured / predicted) that each doubling of the number of cores adds to a prediction.

The doublings count from the measured number of cores, or from one core without measurements. The value is an
assumption: from 1 to 16 cores, eight of ten predictions are then within a factor of 1.7."""


@dataclass(frozen=True)
class CoreUse:
    """Cores that the ranks of a CPU node compute with: ``ranks`` ranks with ``cores`` cores each.

    ``cores`` is a fraction if the rank may use only a part of a core. ``node_cores``: number of cores of the node; None
    if it is unknown, which assumes that the memory keeps up with all cores. ``serial``: fraction of the arithmetic that
    more cores do not speed up.
    """

    cores: float = 1.0
    ranks: int = 1
    node_cores: float | None = None
    serial: float = SERIAL
    memory_cores: float | None = None
    """Measured number of cores that use the whole memory bandwidth of the node; None: ``SATURATING_PART``."""
    threads: float | None = None
    """Number of cores for which the rank starts threads, if other processes take a part of them; None: ``cores``."""

    @property
    def arithmetic(self) -> float:
        """Return the speed of arithmetic, relative to one core."""
        return self.cores if self.cores <= 1 else self.cores / (1 + self.serial * (self.cores - 1))

    @property
    def traffic(self) -> float:
        """Return the speed of memory traffic of one rank, relative to one core that has the memory for itself."""
        return self.cores * self.memory_part

    @property
    def memory_part(self) -> float:
        """Return the memory bandwidth that a rank's cores get, divided by what they could use; 1 if they get all."""
        saturating = self.memory_cores
        if saturating is None and self.node_cores is None:
            return 1.0
        if saturating is None:
            saturating = max(2.0, SATURATING_PART * (self.node_cores or 0.0))
        return min(1.0, saturating / (self.cores * self.ranks))

    @property
    def fork_s(self) -> float:
        """Return the seconds that starting and joining threads adds to each layer of a step."""
        threads = self.threads or self.cores
        return REGIONS_PER_LAYER * FORK_S * log2(threads) if threads > 1 else 0.0


ONE_CORE = CoreUse()
