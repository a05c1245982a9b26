"""A step on many devices from the time on one: contention on the busiest node, communication, their overlap.

Every term is a formula with a few constants that ``calibrate`` learns; they are relative to the one-device time, so
that the same priors hold for a step of 10 ms and of 10 s.
"""

from dataclasses import dataclass, field, fields
from math import exp, log

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Runs:
    """Ways to run one workload, an array element each: where, with which batch, and what that costs on one device."""

    nodes: Floats
    busiest: Floats
    """Devices on the node that holds most of them."""
    devices: Floats
    batch: Floats
    """Samples on each device."""
    one_s: Floats
    """Seconds of a step of that batch on one device alone."""
    talk: Floats = field(default_factory=lambda: np.ones(1))
    """Communication by the run's collective over that by a ring at the same place; 1 for all unless it is said."""

    def __post_init__(self) -> None:
        if len(self.talk) == 1 != len(self.nodes):
            object.__setattr__(self, "talk", np.broadcast_to(self.talk, self.nodes.shape))
        assert len({len(getattr(self, f.name)) for f in fields(self)}) == 1, "an element of each for every run"
        possible = (self.nodes >= 1) & (self.busiest >= 1) & (self.devices >= self.busiest + self.nodes - 1)
        if not np.all(possible & (self.devices <= self.nodes * self.busiest) & (self.one_s > 0) & (self.batch > 0)):
            raise ValueError("runs: expected 1 or more devices on every node, and a batch and its time above 0")

    def __len__(self) -> int:
        return len(self.nodes)

    def take(self, which: NDArray[np.int64]) -> "Runs":
        return Runs(*(getattr(self, f.name)[which] for f in fields(self)))


@dataclass(frozen=True)
class Contention:
    """How devices on one node slow each other's computing down; nothing learned: not at all."""

    sharing: float = 0.0
    crowding: float = 0.0

    def slowdown(self, node_devices: int) -> float:
        """Computing time with so many devices busy on the node over that of one alone: as in ``steps``."""
        return exp(2 * (1 - 1 / node_devices) * self.sharing + self.crowding * log(node_devices))


@dataclass(frozen=True)
class Constants:
    """What is learned of a workload on a kind of cluster. Logarithms and exponents: any real value is meaningful."""

    log_inter: float
    """Of the time of moving the gradients once between nodes, over the reference time."""
    busiest_power: float
    """Communication between nodes grows with the busiest node's devices to this power: they share its network."""
    mean_power: float
    """And with the mean number of devices on a node to this one."""
    log_latency: float
    """Of alpha over the time of moving the gradients once: what each further device adds."""
    log_gamma: float
    """Of gamma - 1: overlap. gamma 1 is none (times add), infinity a perfect one (the longer time counts)."""
    spread: float
    """Logarithm of what computing slows down by when a job spans nodes at all."""
    sharing: float
    """Half the logarithm of what it slows down by when very many devices share a node ..."""
    crowding: float
    """... and the power of the number of devices that it grows with besides."""
    log_intra: float
    """Of the time of summing the gradients of two devices of one node, over the reference time."""
    intra_power: float
    """It grows with the number of further devices to this power."""

    def vector(self) -> Floats:
        return np.array([getattr(self, f.name) for f in fields(self)])


@dataclass(frozen=True)
class Steps:
    """Step times, the part of communication in them, and their derivatives."""

    log_s: Floats
    """Logarithm of the seconds of a step, of each run."""
    share: Floats
    """d log(step) / d log(communication), from 0 to 1; the rest is d log(step) / d log(computing)."""
    jacobian: Floats
    """d log(step) / d constant: (runs, constants)."""


def steps(c: Constants, runs: Runs, reference_s: float) -> Steps:
    """Step times of ``runs``.

    computing = one_s exp(spread [nodes > 1] + sharing 2 (1 - 1/k) + crowding ln k), k the busiest node's devices
    between nodes = reference_s inter (2 (N-1)/N k^busiest_power (n/N)^mean_power + latency (n - 1)): a ring's volume
    (Patarasuk, Yuan 2009) through a network that a node's devices share, and its latency
    within a node = reference_s intra (k - 1)^intra_power
    step = (computing^gamma + communication^gamma)^(1/gamma): a soft maximum, as in Pollux (OSDI 2021), section 3.2
    communication is that of a ring, times ``runs.talk`` where another collective sums
    """
    far, near = runs.nodes > 1, (runs.nodes == 1) & (runs.busiest > 1)
    log_k, log_mean, others = np.log(runs.busiest), np.log(runs.devices / runs.nodes), runs.devices - 1
    shared = 2 * (1 - 1 / runs.busiest)
    log_compute = np.log(runs.one_s) + c.spread * far + c.sharing * shared + c.crowding * log_k
    volume = 2 * (1 - 1 / runs.nodes) * np.exp(c.busiest_power * log_k + c.mean_power * log_mean)
    latency = np.exp(c.log_latency) * others
    log_further = np.log(np.maximum(runs.busiest - 1, 1))
    scale = np.log(reference_s)
    log_inter = scale + c.log_inter + np.log(np.where(far, volume + latency, 1.0))
    log_communication = np.where(far, log_inter, scale + c.log_intra + c.intra_power * log_further) + np.log(runs.talk)
    gamma = 1 + np.exp(c.log_gamma)
    # One device sends nothing: its share is 0 and its time exactly that of computing.
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
        ],
        axis=1,
    )
    return Steps(log_s, share, jacobian)
