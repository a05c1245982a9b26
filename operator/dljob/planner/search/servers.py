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
from dljob.planner.search.rows import Integers, Rows
from dljob.planner.types import Request

Floats = NDArray[np.float64]


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

    def workers(self, rows: Rows) -> Integers:
        """Return the number of ranks with samples on each type of device; shape (types of device, candidates).

        A candidate with one rank has no server.
        """
        found = rows.nodes * self._per_node[rows.option]
        at = np.flatnonzero(found.sum(axis=0) > 1)
        found[self._server(rows)[at], at] -= 1
        return found

    def round_s(self, rows: Rows, compute_s: Floats) -> tuple[Floats, Floats]:
        """Return (computing time of a worker, time in which each worker makes one update) without a barrier.

        ``compute_s``: computing time of the slowest worker in a synchronous step, with its update. The updates of all
        workers are those of the queue without variation; the rest of its delay is small beside other errors.
        Candidates without workers beside the server get infinity.
        """
        workers, everyone = self.workers(rows).sum(axis=0), np.arange(len(rows))
        across = (rows.total_nodes > 1).astype(int)
        latency_s = np.where(rows.used, self._latency_s[rows.option, across], 0.0).max(axis=0)
        bandwidth_Bps = np.where(rows.used, self._bandwidth_Bps[rows.option, across], np.inf).min(axis=0)
        server_s = self._update_s[rows.option[self._server(rows), everyone]]
        service_s = 2 * latency_s + 2 * self._nbytes / bandwidth_Bps + server_s
        own_s = rows.smallest(self._own_update_s)
        think_s = np.maximum(compute_s - np.where(np.isfinite(own_s), own_s, 0.0), 0.0)
        whole_s = np.maximum(think_s + service_s, workers * service_s)
        possible = (rows.summed(self._per_node) > 1) & np.isfinite(compute_s)
        return np.where(possible, think_s, np.inf), np.where(possible, whole_s, np.inf)

    def _server(self, rows: Rows) -> NDArray[np.intp]:
        """Return the type of device of each candidate on which the server is."""
        if self._first:
            found: NDArray[np.intp] = rows.of(self._place, np.inf).argmin(axis=0)
            return found
        last: NDArray[np.intp] = rows.of(self._place, -1.0).argmax(axis=0)
        return last
