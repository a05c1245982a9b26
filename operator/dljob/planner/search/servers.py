"""Approximate evaluation of the parameter server of many candidates at once, for ``Screen``.

The server is one rank: the first one with collective LayeredServer, otherwise the last one, on the slowest device.
Without a barrier, the server bounds the updates of all workers together (``perf.step.asynchronous``).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.accumulation import update_part_s
from dljob.planner.candidates.cost.links import Between
from dljob.planner.candidates.options import Option, link_of, message_link_of
from dljob.planner.search.rows import Integers, Rows, Types
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
        alone = [message_link_of([o], [1])[0] for o in options]
        networks = [link_of([o], [2]) for o in options]
        self._alone_s = np.array([link.latency_s for link in alone])
        self._alone_Bps = np.array([link.bandwidth_Bps for link in alone])
        self._latency_s = np.array([link.latency_s for link, _ in networks])
        self._bandwidth_Bps = np.array([link.bandwidth_Bps for link, _ in networks])
        self._spread = np.array([spread for _, spread in networks])
        self._between = Between([options[members[0]].end for members in Types(options).members], None)
        # As ``message_link_of``: on GPUs, messages also go through main memory.
        self._host_Bps = np.array([o.device.host_bandwidth_Bps if o.pool.is_gpu else np.inf for o in options])

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
        own = rows.of(self._latency_s, 0.0), rows.of(self._bandwidth_Bps, np.inf), rows.of(self._spread, 0.0)
        latency_s, bandwidth_Bps, _ = self._between.slowest(rows.nodes, *own)
        bandwidth_Bps = 1 / (1 / bandwidth_Bps + 2 / rows.smallest(self._host_Bps))
        alone = rows.total_nodes == 1
        latency_s = np.where(alone, rows.largest(self._alone_s), latency_s)
        bandwidth_Bps = np.where(alone, rows.smallest(self._alone_Bps), bandwidth_Bps)
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
