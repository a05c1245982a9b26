"""Measured hardware of a device type. It replaces data sheets in predictions for models that were never measured.

The hardware probe measures it (``dljob probe``), and ``calibrate.hardware`` compares the measurements with data sheets.
"""

from dataclasses import dataclass, field, replace
from typing import Self

from dljob.cluster.catalogue import NOMINAL, Device, TermFactors, TimeFactors

KEY = "hardware"
"""Model key of profiles with measured hardware. No job has it: the keys of jobs are names of built-in models, or begin
with ``program-``."""
MAX_FACTOR = 10.0
"""Largest believable ratio between a measured time and the time by the data sheet, in both directions. Processors in
use differ from the catalogue's generic core by less than a factor of 4."""
MAX_ASSUMED_FACTOR = 100.0
"""``MAX_FACTOR`` of a GPU that is not in the catalogue, and therefore has the data sheet of another GPU."""
IMPOSSIBLE = 3.0
"""Multiple of the largest believable ratio beyond which no machine can be. Nearer values count as the bound."""
MAX_GROWTH_FACTOR = 4.0
"""Largest believable ratio between the measured and the predicted memory of a term, in both directions. Memory depends
on PyTorch and its kernels, and hardly on the processor, but terms can compensate for each other."""
MAY_BE_ZERO = ("padding_FLOP", "narrow_FLOP", "function_FLOP", "convolution_weight_B", "convolution")
"""Terms whose factors have no lower bound, because some kernels do not need this work or this memory."""
DISK_LIMITS_Bps = (1e6, 3e10)
LINK_LIMITS_Bps = (1e5, 1e12)
LATENCY_LIMITS_s = (1e-8, 1.0)
MEMORY_LIMITS_Bps = (1e8, 1e14)
MAX_BACKGROUND = 0.5
"""Largest part of the CPUs of a node or machine that plans leave to other processes because a probe has measured their
load. A larger load was probably that of a moment."""


@dataclass(frozen=True)
class LinkSpeed:
    latency_s: float
    bandwidth_Bps: float


@dataclass(frozen=True)
class Hardware:
    """Measured constants of one device type. None: not measured."""

    factors: TimeFactors = NOMINAL
    deviation: float = 0.0
    """Standard deviation of log(measured / predicted) of the probe's own steps, with these factors."""
    term_factors: TermFactors = ()
    """Factors of the terms of the regression for CPUs, from random networks; empty: ``factors`` count."""
    growth_factors: TermFactors = ()
    """Factors of the terms of a rank's memory, from random networks; empty: not measured, or no better than before."""
    serial: float | None = None
    """Fraction of the arithmetic that more cores do not speed up (``perf.step.core_scaling``)."""
    memory_cores: float | None = None
    """Number of cores that use the whole memory bandwidth of the node."""
    memory_Bps: float | None = None
    """Memory bandwidth in copies by one core, or by a GPU."""
    disk_Bps: float | None = None
    """Bandwidth of reads from the node's disk."""
    disk_write_Bps: float | None = None
    near: LinkSpeed | None = None
    """Latency and bandwidth of messages between two ranks of a node."""
    far: LinkSpeed | None = None
    """Latency and bandwidth of messages between two pods on different nodes."""
    between: tuple[tuple[str, LinkSpeed], ...] = ()
    """(other device type, latency and bandwidth of messages to a pod on one of its nodes)."""
    background_cpu: float = 0.0
    """CPUs that other processes used while the probe ran; 0 if this was not measured."""
    node_cpu: float = 0.0
    """CPUs of the measured node's kernel; 0 if unknown. For a node in a container, these are all of its machine."""
    doubts: tuple[str, ...] = field(default=())
    """Texts for users. Each names an implausible value and says what plans use instead."""

    def device(self, device: Device, cores: float = 1.0) -> Device:
        """Return ``device`` with measured values in place of those of its data sheet.

        ``cores``: number of CPUs that ``device`` stands for (those of one rank); not used for GPUs.
        """
        changed = replace(
            device, factors=self.factors, term_factors=self.term_factors, growth_factors=self.growth_factors
        )
        if device.kind == "cpu" and self.memory_Bps is not None:
            changed = replace(changed, memory_bandwidth_Bps=self.memory_Bps * cores)
        if device.kind == "cpu" and self.near is not None:
            changed = replace(changed, peer_bandwidth_Bps=self.near.bandwidth_Bps)
        return changed

    def link_to(self, device: str) -> LinkSpeed | None:
        """Return the measured link to nodes of another device type; None if it was not measured."""
        return dict(self.between).get(device)

    def left(self, cpu: float, nodes: int = 1) -> float:
        """Return how many of ``cpu`` CPUs other processes leave to the ranks of ``nodes`` nodes that share these CPUs.

        CPUs of the measured node beyond ``cpu`` serve the other processes first, such as those that the node reserves
        for its daemons. If ``cpu`` exceeds the measured node, as on the host of virtual machines, each of the nodes has
        such a load. The result is at least ``cpu`` (1 - ``MAX_BACKGROUND``).
        """
        load = self.background_cpu * (nodes if cpu > self.node_cpu else 1)
        return max(cpu - max(0.0, load - max(0.0, self.node_cpu - cpu)), cpu * (1 - MAX_BACKGROUND))

    def believed(self, assumed: bool = False, core: Device | None = None) -> Self:
        """Return a copy without values that are implausible compared with data sheets, which ``doubts`` then lists.

        A factor beyond its bound, as on a busy node, gets the value of the bound. If one factor is impossible
        (``IMPOSSIBLE``), nothing counts that the same steps measured: the factors, their deviation, and the use of
        several cores. The same holds for the factors of terms, of times and of memory separately. The memory bandwidth
        of a core has bounds of the same kind. Any other implausible value counts as not measured. ``assumed``: True if
        the catalogue does not have the device. ``core``: the data sheet of one core, whose memory bandwidth the
        measured one must resemble; None for a GPU.
        """
        doubts: list[str] = []
        fitted = self._believed_fit(MAX_ASSUMED_FACTOR if assumed else MAX_FACTOR, doubts)
        background_cpu = min(self.background_cpu, MAX_BACKGROUND * self.node_cpu)
        if background_cpu < self.background_cpu:
            doubts.append(
                f"other processes: found {self.background_cpu:.3g} CPUs in use; expected at most {background_cpu:.3g} "
                f"of {self.node_cpu:.3g}. The plan leaves {background_cpu:.3g} CPUs to them"
            )
        memory = MEMORY_LIMITS_Bps
        if core is not None:
            memory = core.memory_bandwidth_Bps / MAX_FACTOR, core.memory_bandwidth_Bps * MAX_FACTOR
        return replace(
            fitted,
            term_factors=_believed_terms("term factors", fitted.term_factors, MAX_FACTOR, doubts),
            growth_factors=_believed_terms("memory factors", self.growth_factors, MAX_GROWTH_FACTOR, doubts),
            memory_Bps=_believed_rate("memory", self.memory_Bps, memory, doubts, 1.0 if core is None else IMPOSSIBLE),
            disk_Bps=_believed_rate("disk", self.disk_Bps, DISK_LIMITS_Bps, doubts),
            disk_write_Bps=_believed_rate("writes to disk", self.disk_write_Bps, DISK_LIMITS_Bps, doubts),
            near=_believed_link("link within the node", self.near, doubts),
            far=_believed_link("link between nodes", self.far, doubts),
            between=tuple(
                (to, link)
                for to, found in self.between
                if (link := _believed_link(f"link to nodes of {to}", found, doubts)) is not None
            ),
            background_cpu=background_cpu,
            doubts=tuple(doubts),
        )

    def _believed_fit(self, most: float, doubts: list[str]) -> Self:
        """Return a copy with factors from 1 / ``most`` to ``most``, and without the fit if a factor is impossible."""
        wrong = {name: value for name, value in vars(self.factors).items() if not 1 / most <= value <= most}
        if not wrong:
            return self
        bounded = {name: min(max(value, 1 / most), most) for name, value in wrong.items()}
        limit = most * IMPOSSIBLE
        possible = all(1 / limit <= value <= limit for value in wrong.values())
        found = ", ".join(f"{name} {value:.3g}" for name, value in wrong.items())
        used = ", ".join(f"{name} {value:g}" for name, value in bounded.items()) if possible else "the data sheet"
        doubts.append(
            f"factors: found {found} times the time of the data sheet; expected {1 / most:g} to {most:g} times. "
            f"The plan uses {used}"
        )
        if possible:
            return replace(self, factors=replace(self.factors, **bounded))
        return replace(self, factors=NOMINAL, deviation=0.0, term_factors=(), serial=None, memory_cores=None)


def _believed_terms(name: str, factors: TermFactors, most: float, doubts: list[str]) -> TermFactors:
    """Return ``factors`` within 1 / ``most`` to ``most``, or none if one is beyond ``IMPOSSIBLE`` times this bound."""
    wrong = {term: value for term, value in factors if value > most or (value < 1 / most and term not in MAY_BE_ZERO)}
    if not wrong:
        return factors
    limit = most * IMPOSSIBLE
    possible = all(1 / limit <= value <= limit for value in wrong.values())
    found = ", ".join(f"{term} {value:.3g}" for term, value in wrong.items())
    used = "the nearest of these bounds" if possible else "none of these factors"
    doubts.append(
        f"{name}: found {found} times the prediction; expected {1 / most:g} to {most:g} times. The plan uses {used}"
    )
    bounded = ((term, min(max(value, 1 / most), most) if term in wrong else value) for term, value in factors)
    return tuple(bounded) if possible else ()


def _believed_rate(
    name: str, value: float | None, limits: tuple[float, float], doubts: list[str], margin: float = 1.0
) -> float | None:
    """Return ``value``, the nearest of ``limits`` if ``value`` exceeds it by at most a factor ``margin``, or None."""
    low, high = limits
    if value is None or low <= value <= high:
        return value
    bound = min(max(value, low), high)
    possible = margin > 1 and low / margin <= value <= high * margin
    used = f"uses {bound:g} B/s" if possible else "does not use this value"
    doubts.append(f"{name}: found {value:.3g} B/s; expected {low:g} to {high:g} B/s. The plan {used}")
    return bound if possible else None


def _believed_link(name: str, link: LinkSpeed | None, doubts: list[str]) -> LinkSpeed | None:
    if link is None:
        return None
    (short, long), (slow, fast) = LATENCY_LIMITS_s, LINK_LIMITS_Bps
    if short <= link.latency_s <= long and slow <= link.bandwidth_Bps <= fast:
        return link
    doubts.append(
        f"{name}: found {link.latency_s:.3g} s and {link.bandwidth_Bps:.3g} B/s; expected {short:g} to {long:g} s and "
        f"{slow:g} to {fast:g} B/s. The plan does not use this value"
    )
    return None
