"""Step time on many devices, from the step time on one device, contention, communication and overlap.

``calibrate`` fits the constants of the formulas to measurements. Constants express times relative to a step time on one
device, so that the same prior distribution suits steps of 10 ms and steps of 10 s.
"""

from dataclasses import dataclass, field, fields
from math import exp, log

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LARGEST_RATIO = 20.0
"""Factor between ``one_s`` and the reference time from which on communication does not grow further (``log_growth``).

The factor is at most 5 in the public measurements from which the prior was chosen."""


@dataclass(frozen=True)
class Runs:
    """Runs of one workload, as arrays with one element per run: placement, batch, and time on one device.

    ``nodes``: number of nodes of the run. ``devices``: number of devices on all its nodes together.
    """

    nodes: Floats
    busiest: Floats
    """Number of devices on the node that has the most devices."""
    devices: Floats
    batch: Floats
    """Samples on each device."""
    one_s: Floats
    """Seconds of a step with ``batch`` samples if one device trains alone."""
    communication_ratio: Floats = field(default_factory=lambda: np.ones(1))
    """Communication time of the run's collective divided by that of a ring at the same placement."""

    def __post_init__(self) -> None:
        if len(self.communication_ratio) == 1 != len(self.nodes):
            object.__setattr__(self, "communication_ratio", np.broadcast_to(self.communication_ratio, self.nodes.shape))
        assert len({len(getattr(self, f.name)) for f in fields(self)}) == 1, "an element of each for every run"
        possible = (self.nodes >= 1) & (self.busiest >= 1) & (self.devices >= self.busiest + self.nodes - 1)
        if not np.all(possible & (self.devices <= self.nodes * self.busiest) & (self.one_s > 0) & (self.batch > 0)):
            raise ValueError(
                "runs: found a run with impossible values; expected 1 or more devices on every node, at most the "
                "number in `busiest` on each node, and a batch size and a step time on one device above 0"
            )

    def __len__(self) -> int:
        return len(self.nodes)

    def take(self, which: NDArray[np.int64]) -> "Runs":
        return Runs(*(getattr(self, f.name)[which] for f in fields(self)))


@dataclass(frozen=True)
class Contention:
    """Slowdown of computing that the other devices on a node cause. The default is no slowdown.

    With k busy devices on a node, ``sharing`` causes a slowdown that soon stops growing with k. ``crowding`` causes the
    slowdown k^``crowding``. The values come from the fields of ``Constants`` with the same names.
    """

    sharing: float = 0.0
    crowding: float = 0.0

    def slowdown(self, node_devices: int) -> float:
        """Return the computing time with ``node_devices`` busy devices on a node, divided by that with one busy device.

        It is 1 for one device. ``steps`` multiplies the computing time by the same factor.
        """
        return exp(2 * (1 - 1 / node_devices) * self.sharing + self.crowding * log(node_devices))


@dataclass(frozen=True)
class Constants:
    """Fitted constants of a workload on a type of cluster. They are logarithms and exponents, so any value is valid.

    The function ``steps`` has the formulas. The first four constants and ``log_growth`` describe communication between
    nodes. ``log_intra`` and ``intra_power`` describe communication within a node. ``log_gamma`` describes the overlap
    of computing and communication. ``spread``, ``sharing`` and ``crowding`` describe how much other nodes and other
    devices slow down computing.
    """

    log_inter: float
    """log(time to move the gradients once between nodes / typical step time on one device)."""
    busiest_power: float
    """Exponent p in the factor k^p on the time to move gradients between nodes.

    k is the number of devices on the node with the most devices. They share this node's network.
    """
    mean_power: float
    """Exponent p in the factor m^p on the time to move gradients between nodes. m is the mean of devices per node."""
    log_latency: float
    """log(latency that each device after the first adds / time to move the gradients once between nodes)."""
    log_gamma: float
    """log(gamma - 1), where gamma describes the overlap of computing and communication.

    If gamma is 1, nothing overlaps (the times add up). If gamma is infinite, all overlaps (the longer time counts).
    """
    spread: float
    """log(slowdown of computing if a job runs on several nodes)."""
    sharing: float
    """Half of log(slowdown of computing if very many devices share a node), without the slowdown by ``crowding``."""
    crowding: float
    """Exponent p in the factor k^p by which k devices on a node slow down computing, besides ``sharing``."""
    log_intra: float
    """log(time of an all-reduce between two devices of one node / typical step time on one device)."""
    intra_power: float
    """Exponent p in the time of an all-reduce within a node of k devices, which is proportional to (k - 1)^p."""
    log_growth: float = -3.0
    """log(exponent p in the factor t^p on communication between nodes).

    t is the step time on one device with the run's batch, divided by its typical value.
    """

    def vector(self) -> Floats:
        return np.array([getattr(self, f.name) for f in fields(self)])


@dataclass(frozen=True)
class Steps:
    """Predicted step times of runs, and their derivatives by the fitted ``Constants``, which a fit needs."""

    log_s: Floats
    """Logarithm of the step seconds, for each run."""
    share: Floats
    """Derivative d log(step time) / d log(communication time) of each run, from 0 to 1.

    1 - ``share`` is the derivative by log(computing time).
    """
    jacobian: Floats
    """Derivatives d log(step time) / d constant, of shape (runs, constants)."""


def steps(c: Constants, runs: Runs, reference_s: float) -> Steps:
    """Predict the step times of ``runs`` (as logarithms) with the constants ``c``, and their derivatives by ``c``.

    A run has n devices on N nodes, and k devices on the node with the most devices. The lines below give times in
    seconds. Most names in them are fields of ``runs`` or ``c``, but ``inter``, ``latency``, ``intra`` and ``growth``
    are the exponentials of the constants ``log_inter``, ``log_latency``, ``log_intra`` and ``log_growth``. gamma is 1
    plus the exponential of ``log_gamma``. [N > 1] is 1 if N > 1, else 0. ``reference_s``: a typical value of ``one_s``.

    computing = one_s exp(spread [N > 1] + sharing 2 (1 - 1/k) + crowding ln k)
    between nodes = reference_s inter (2 (N-1)/N k^busiest_power (n/N)^mean_power + latency (n - 1)): a ring's volume
    (Patarasuk, Yuan 2009) through a network that a node's devices share, and the ring's latency; all this times
    (one_s / reference_s)^growth, because measured communication between nodes takes longer beside larger batches
    within a node = reference_s intra (k - 1)^intra_power
    communication = (between nodes, or within a node if N = 1) times ``runs.communication_ratio``
    step = (computing^gamma + communication^gamma)^(1/gamma): a soft maximum, as in Pollux (OSDI 2021), section 3.2
    """
    far, near = runs.nodes > 1, (runs.nodes == 1) & (runs.busiest > 1)
    log_k, log_mean, others = np.log(runs.busiest), np.log(runs.devices / runs.nodes), runs.devices - 1
    shared = 2 * (1 - 1 / runs.busiest)
    log_compute = np.log(runs.one_s) + c.spread * far + c.sharing * shared + c.crowding * log_k
    volume = 2 * (1 - 1 / runs.nodes) * np.exp(c.busiest_power * log_k + c.mean_power * log_mean)
    latency = np.exp(c.log_latency) * others
    log_further = np.log(np.maximum(runs.busiest - 1, 1))
    scale = np.log(reference_s)
    growth = np.exp(c.log_growth)
    log_ratio = np.clip(np.log(runs.one_s) - scale, -log(LARGEST_RATIO), log(LARGEST_RATIO))
    log_inter = scale + c.log_inter + np.log(np.where(far, volume + latency, 1.0)) + growth * log_ratio
    log_communication = np.where(far, log_inter, scale + c.log_intra + c.intra_power * log_further) + np.log(
        runs.communication_ratio
    )
    gamma = 1 + np.exp(c.log_gamma)
    # One device does not communicate, so its share is 0 and its time is exactly the computing time.
    log_communication = np.where(far | near, log_communication, -np.inf)
    log_s = np.logaddexp(gamma * log_compute, gamma * log_communication) / gamma
    share = np.exp(gamma * (log_communication - log_s))
    of_volume = np.where(far, volume / np.maximum(volume + latency, 1e-300), 0.0)
    entropy = (1 - share) * log_compute + share * np.where(far | near, log_communication, 0.0)
    jacobian = np.stack(
        [
            share * far,
            share * of_volume * log_k,
            share * of_volume * log_mean,
            share * far * (1 - of_volume),
            (entropy - log_s) * (gamma - 1) / gamma,
            (1 - share) * far,
            (1 - share) * shared,
            (1 - share) * log_k,
            share * near,
            share * near * log_further,
            share * far * log_ratio * growth,
        ],
        axis=1,
    )
    return Steps(log_s, share, jacobian)
