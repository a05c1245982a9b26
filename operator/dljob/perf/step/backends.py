"""Measured constants of communication backends: MPI, gloo and a parameter server.

The formulas of ``communication`` describe algorithms. Two implementations of one algorithm on one link still differ, in
their latency per message and in the part of the bandwidth that they use. ``backends.json`` has these constants, with
the machine and the command that measured them. They are ratios to the latency and bandwidth of an exchange of messages,
as in dltrain's probe of the link, because ratios carry over to other links better than times. ``bucket_nbytes`` is not
measured: it is the default of the implementation.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import hypot
from typing import Literal

from dljob.perf.step.communication import Link

BackendName = Literal["MPI", "Gloo", "ParameterServer"]


@dataclass(frozen=True)
class Ratios:
    """Constants of a backend on one kind of link.

    ``latency``: latency of a message, divided by the link's. ``bandwidth``: bandwidth, divided by the link's.
    ``spread``: standard deviation of log(measured / predicted) with these ratios.
    """

    latency: float
    bandwidth: float
    spread: float


@dataclass(frozen=True)
class Backend:
    """The measured constants of one backend.

    ``between``, ``within``: ratios on links between nodes and within one node. ``bucket_nbytes``: size of the parts of
    the gradients that are reduced one after another.
    """

    name: BackendName
    between: Ratios
    within: Ratios
    bucket_nbytes: int

    def over(self, link: Link, spread: float, nodes: int) -> tuple[Link, float]:
        """Return (``link`` with latency and bandwidth multiplied by this backend's ratios, spread of predictions).

        A spread is a standard deviation of log(measured / predicted). ``spread``: that of predictions with ``link``
        itself; the result combines it with that of the ratios. ``nodes``: number of nodes on which the ranks run.
        """
        ratios = self.between if nodes > 1 else self.within
        used = replace(
            link,
            latency_s=link.latency_s * ratios.latency,
            bandwidth_Bps=link.bandwidth_Bps * ratios.bandwidth,
            near_latency_s=None if link.near_latency_s is None else link.near_latency_s * self.within.latency,
            near_bandwidth_Bps=None
            if link.near_bandwidth_Bps is None
            else link.near_bandwidth_Bps * self.within.bandwidth,
        )
        return used, hypot(spread, ratios.spread)

    def undone(self, link: Link, nodes: int) -> Link:
        """Undo ``over``: return the link whose latency and bandwidth ``over`` multiplied by ratios to get ``link``.

        ``nodes``: number of nodes on which the ranks run.
        """
        ratios = self.between if nodes > 1 else self.within
        return replace(
            link,
            latency_s=link.latency_s / ratios.latency,
            bandwidth_Bps=link.bandwidth_Bps / ratios.bandwidth,
            near_latency_s=None if link.near_latency_s is None else link.near_latency_s / self.within.latency,
            near_bandwidth_Bps=None
            if link.near_bandwidth_Bps is None
            else link.near_bandwidth_Bps / self.within.bandwidth,
        )


@dataclass(frozen=True)
class Source:
    """Where the constants come from: the benchmark's command, the machine, its links, and the date."""

    command: str
    machine: str
    links: str
    date: str


@cache
def _table() -> tuple[dict[str, Backend], Source]:
    found = json.loads(files("dljob.perf.step").joinpath("backends.json").read_text(encoding="utf-8"))
    backends = {
        row["name"]: Backend(row["name"], Ratios(**row["between"]), Ratios(**row["within"]), row["bucket_nbytes"])
        for row in found["backends"]
    }
    return backends, Source(**found["source"])


def backend(name: BackendName) -> Backend:
    """Return the measured constants of a backend."""
    return _table()[0][name]


def source() -> Source:
    """Return where the constants of all backends come from."""
    return _table()[1]
