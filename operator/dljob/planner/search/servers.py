"""Approximate evaluation of the parameter server of many candidates at once, for ``Screen``.

The server is one rank: the first one with collective LayeredServer, otherwise the last one, on the slowest device.
Without a barrier, the server bounds the updates of all workers together (``perf.step.asynchronous``).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.accumulation import update_part_s
from dljob.planner.candidates.options import Option, message_link_of
from dljob.planner.types import Request

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class Servers:
    """The parameter servers of candidates whose user requests a collective with a server."""

    def __init__(self, options: Sequence[Option], request: Request, workload: Workload) -> None:
        self._per_node = np.array([o.ranks_per_node for o in options], dtype=np.int64)
        # Ranks are in this order, see ``plan.ordered``.
        order = sorted(range(len(options)), key=lambda i: (options[i].curve.slope_s, options[i].label))
        self._place = np.empty(len(options))
        self._place[order] = np.arange(len(options))
        self._first = request.collective == "LayeredServer"
        self._nbytes = float(workload.gradient_nbytes)
        self._own_update_s = np.array([update_part_s(o) for o in options])
        self._update_s = np.array([o.update_once_s for o in options])
        links = [[message_link_of([o], nodes)[0] for nodes in (1, 2)] for o in options]
        self._latency_s = np.array([[link.latency_s for link in pair] for pair in links])
        self._bandwidth_Bps = np.array([[link.bandwidth_Bps for link in pair] for pair in links])

    def workers(self, counts: Counts) -> Counts:
        """Return the number of ranks with samples on each option; shape (candidates, options).

        ``counts``: number of nodes of each option. A candidate with one rank has no server.
        """
        ranks = counts * self._per_node
        found: Counts = ranks.copy()
        rows = np.flatnonzero(ranks.sum(axis=1) > 1)
        found[rows, self._server(counts)[rows]] -= 1
        return found

    def round_s(self, counts: Counts, compute_s: Floats) -> tuple[Floats, Floats]:
        """Return (computing time of a worker, time in which each worker makes one update) without a barrier.

        ``compute_s``: computing time of the slowest worker in a synchronous step, with its update. The updates of all
        workers are those of the queue without variation; the rest of its delay is small beside other errors.
        Candidates without workers beside the server get infinity.
        """
        used, workers = counts > 0, self.workers(counts).sum(axis=1)
        across = (counts.sum(axis=1) > 1).astype(int)
        latency_s = np.where(used, self._latency_s[:, across].T, 0.0).max(axis=1)
        bandwidth_Bps = np.where(used, self._bandwidth_Bps[:, across].T, np.inf).min(axis=1)
        service_s = 2 * latency_s + 2 * self._nbytes / bandwidth_Bps + self._update_s[self._server(counts)]
        own_s = np.where(used, self._own_update_s, np.inf).min(axis=1, initial=np.inf)
        think_s = np.maximum(compute_s - np.where(np.isfinite(own_s), own_s, 0.0), 0.0)
        whole_s = np.maximum(think_s + service_s, workers * service_s)
        possible = (counts @ self._per_node > 1) & np.isfinite(compute_s)
        return np.where(possible, think_s, np.inf), np.where(possible, whole_s, np.inf)

    def _server(self, counts: Counts) -> NDArray[np.intp]:
        """Return the option of each candidate on which the server is."""
        if self._first:
            found: NDArray[np.intp] = np.where(counts > 0, self._place, np.inf).argmin(axis=1)
            return found
        last: NDArray[np.intp] = np.where(counts > 0, self._place, -1.0).argmax(axis=1)
        return last
