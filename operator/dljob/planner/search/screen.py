"""Approximate evaluation of many candidates at once: the formulas of ``evaluate`` on arrays, with fractional samples.

The screen ranks thousands of candidates in milliseconds. ``evaluate`` then evaluates the best of them exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from dlcontract import SERVERS
from dljob.perf.fit.scaling import Runs
from dljob.perf.resources import data_fetch, energy
from dljob.perf.step.communication import Link, Links, Number, allreduce_s, layered_server_s, scatter_gather_s
from dljob.perf.step.compute import active_parts
from dljob.perf.step.exchanges import exchanges_s, over_gloo
from dljob.perf.step.step import P90, buckets, exposed_s
from dljob.perf.step.synchronization import straggler_factor
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.collectives import copied_Bps, hop_s, priced, started_by_script, summing
from dljob.planner.candidates.cost.data_fetch import fetched_nbytes, node_Bps
from dljob.planner.candidates.cost.interrupted import interruptions_of
from dljob.planner.candidates.cost.links import Between
from dljob.planner.candidates.cost.measured import communication_ratio, predicted
from dljob.planner.candidates.options import Option, link_of, near_latency_s, overlap_of
from dljob.planner.candidates.shard_space import largest_share
from dljob.planner.search.rows import Rows, Types
from dljob.planner.search.servers import Servers
from dljob.planner.types import Request

WHOLE = 1e-3
"""Maximum rounding error, in samples, at which a local batch size still counts as a whole number."""
GRID = 160
"""Number of durations in the table of ``Screen``, which has the samples that a node processes within each duration.

``Screen`` interpolates between these durations to find the time in which all ranks process the global batch."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Screened:
    """Approximate predictions as arrays with one element per candidate; infinite for infeasible candidates.

    ``step_s``, ``step_p90_s``: median and 90th percentile of the step time, with its part of the time of interruptions
    and of fetching data. ``collective``: the fastest collective.
    """

    step_s: Floats
    step_p90_s: Floats
    energy_J: Floats
    """Energy of a step in joules."""
    usd: Floats
    """Cost of a step in US dollars."""
    carbon_g: Floats
    """Carbon of a step in grams of CO2 equivalent, as the mean over the whole training."""
    collective: NDArray[np.int64]
    """Index of the collective in ``Screen.collectives``."""


_NO_FIGURES = np.zeros(0)
NOTHING = Screened(
    _NO_FIGURES, _NO_FIGURES, _NO_FIGURES, _NO_FIGURES, _NO_FIGURES, collective=np.zeros(0, dtype=np.int64)
)
"""The predictions of no candidates."""


def _as_arrays(links: Sequence[Link]) -> Links:
    return Links(*(np.array([getattr(link, field.name) for link in links]) for field in fields(Links)))


def joined(parts: Sequence[Screened]) -> Screened:
    """Return the predictions of all ``parts``, of which there is at least one, in their order."""
    return Screened(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Screened)))


class Screen:
    """Approximate evaluation of many candidates for one request.

    For each option (way to use one device type), a table has the samples that a node processes within given durations.
    """

    def __init__(self, options: Sequence[Option], request: Request, workload: Workload) -> None:
        self.options, self.request, self.workload = options, request, workload
        self.types = Types(options)
        batch = request.global_batch
        self._per_node = np.array([o.ranks_per_node for o in options], dtype=np.int64)
        self._first_s = np.array([o.curve.seconds(1) for o in options])
        self._largest = np.array([largest_share(o, batch, request.storage) for o in options], dtype=np.int64)
        longest = max(
            o.curve.seconds(min(batch, most)) for o, most in zip(options, self._largest.tolist(), strict=True)
        )
        self._grid_s = np.geomspace(0.999 * self._first_s.min(), 1.001 * max(longest, self._first_s.max()), GRID)
        self._done = np.stack(
            [
                np.minimum(o.curve.samples_array(self._grid_s), most)
                for o, most in zip(options, self._largest.tolist(), strict=True)
            ]
        )
        self._packing = np.array([o.packing for o in options])
        self._spread = np.array([o.compute_spread for o in options])
        self._overlap = np.array([overlap_of([o]) for o in options])
        links = [link_of([o], [2], request.backend) for o in options]
        self._link_spread = np.array([spread for _, spread in links])
        own = [link_of([o], [1], request.backend)[0] for o in options]
        self._between_nodes, self._within_node = (_as_arrays(each) for each in ([link for link, _ in links], own))
        self._between = Between([options[members[0]].end for members in self.types.members], request.backend)
        self._idle_W = np.array([energy.rank_watts(o.device, 0.0) * o.ranks_per_node for o in options])
        self._busy_W = np.array([energy.rank_watts(o.device, 1.0) * o.ranks_per_node for o in options])
        self._pausing_W = np.array([energy.rank_watts(o.device, 1.0, 0.0) * o.ranks_per_node for o in options])
        self._usd_per_s = np.array([energy.cost_usd(o.device, 1.0, o.ranks_per_node) for o in options])
        self._fetches = bool(request.storage is not None and request.storage.data_nbytes)
        self._fetch_Bps = np.array([node_Bps(o.pool, o.hardware) for o in options])
        self._resting_W = np.array([energy.idle_watts(o.device) * o.ranks_per_node for o in options])
        self._min_ranks = np.array([o.min_ranks for o in options])
        self._sharded = options[0].strategy == "Optimizer"
        self._update_s = np.array([o.update_s if self._sharded else 0.0 for o in options])
        self._micro_batches = options[0].micro_batches
        self._exchanges = started_by_script(request, workload, is_gpu=options[0].pool.is_gpu)
        self._hop_s, self._copied_Bps = (np.array([found(o) for o in options]) for found in (hop_s, copied_Bps))
        self._cores = np.array([o.cores for o in options])
        self._overlapping_s = np.array([o.overlapping_s for o in options])
        self._has_steps = np.array([o.steps is not None for o in options])
        by_type = [[options[i].steps for i in members.tolist()] for members in self.types.members]
        firsts = [next(filter(None, steps), None) for steps in by_type]
        self._known = [(steps, number) for number, steps in enumerate(firsts) if steps is not None]
        self.collectives = (request.collective,) if request.collective else summing(options[0])[:4]
        self._servers = Servers(options, request, workload) if request.collective in SERVERS else None

    def screen(self, rows: Rows) -> Screened:
        """Predict candidates, each of which has at least one node."""
        ranks = rows.summed(self._per_node)
        workers = rows.nodes * self._per_node[rows.option]
        workers = workers if self._servers is None else self._servers.workers(rows)
        compute_s = self._compute_s(rows, ranks, workers)
        compute_s = compute_s - rows.smallest(self._update_s) * (1 - 1 / np.maximum(ranks, 1))
        best, choice = self._communication_s(rows, ranks, compute_s)
        numbers, number_of = np.unique(ranks, return_inverse=True)
        stragglers = np.array([straggler_factor(n) for n in numbers.tolist()])[number_of]
        finite_s = np.where(np.isfinite(compute_s), compute_s, 0.0)
        packing = rows.largest(self._packing, 1.0) if self._servers is None else np.ones(len(rows))
        waiting_s = finite_s * (stragglers * packing - 1)
        latency_s, _, link_spread = self._network_of(rows)
        waiting_s += 2 * np.ceil(np.log2(np.maximum(ranks, 1))) * latency_s
        step_s = compute_s + best + waiting_s
        apart = self._servers is not None and self.request.synchronization != "Synchronous"
        if self._servers is not None and apart:
            compute_s, step_s = self._servers.round_s(rows, compute_s)
        compute_spread = rows.largest(self._spread)
        with np.errstate(invalid="ignore"):
            spread = np.hypot(compute_s * compute_spread, (step_s - compute_s) * link_spread) / step_s
            if not apart:
                step_s, spread, best_known = self._as_measured(rows, ranks, compute_s, step_s, spread)
                choice = np.where(best_known >= 0, best_known, choice)
            p90 = step_s * np.exp(P90 * np.nan_to_num(spread))
            busy_s = np.minimum(compute_s, step_s)
            above_W, idle_W = self._above_idle_watts(rows, numbers, number_of), rows.summed(self._idle_W)
            if self._servers is None:
                busy_W = idle_W + (rows.nodes * above_W).sum(axis=0)
            else:
                busy_W = idle_W + (workers * above_W / self._per_node[rows.option]).sum(axis=0)
            energy_J = busy_s * busy_W + (step_s - busy_s) * idle_W
        if self.request.domain.interruptions_per_h:
            work_s, nodes = step_s * self.request.total_steps, np.maximum(rows.total_nodes, 1)
            finite = np.isfinite(work_s)
            longer = np.ones(len(rows))
            expected_s = interruptions_of(self.request, self.workload).expected_s(work_s[finite], nodes[finite])
            longer[finite] = expected_s / work_s[finite]
            step_s, p90, energy_J = step_s * longer, p90 * longer, energy_J * longer
        if self._fetches:
            count = np.maximum(rows.total_nodes, 1).astype(float)
            nbytes = fetched_nbytes(self.request, count, 1 / count)
            fetch_s = data_fetch.fetch_s(*nbytes, rows.smallest(self._fetch_Bps), self.request.data_source_Bps)
            fetch_s = fetch_s / max(1, self.request.total_steps)
            with np.errstate(invalid="ignore"):
                step_s, p90 = step_s + fetch_s, p90 * (1 + fetch_s / step_s)
            energy_J = energy_J + fetch_s * rows.summed(self._resting_W)
        usd = self.request.prices.with_energy_usd(step_s * rows.summed(self._usd_per_s), energy_J)
        total_s = np.where(np.isfinite(step_s), step_s * self.request.total_steps, 0.0)
        carbon_g = self.request.energy.carbon.grams(energy_J, self.request.begin_s, total_s)
        return Screened(step_s, p90, energy_J, usd, carbon_g, choice)

    def _above_idle_watts(self, rows: Rows, numbers: NDArray[np.int64], number_of: NDArray[np.intp]) -> Floats:
        """Return the power in watts by which computing ranks of a node exceed waiting ones, with equal local batches.

        Shape: (types of device, candidates). ``numbers``: all numbers of ranks of candidates. ``number_of``: for each
        candidate, the index of its number of ranks.
        """
        whole = self.request.global_batch / self._micro_batches
        active = np.ones((len(self.types.members), len(rows)))
        if self.options[0].pool.is_gpu:
            for number, members in enumerate(self.types.members):
                device = self.options[members[0]].device
                active[number] = active_parts(self.workload, device, whole / np.maximum(numbers, 1))[number_of]
        pausing_W, busy_W = self._pausing_W[rows.option], self._busy_W[rows.option]
        found: Floats = pausing_W + active * (busy_W - pausing_W) - self._idle_W[rows.option]
        return found

    def _compute_s(self, rows: Rows, ranks: NDArray[np.int64], workers: NDArray[np.int64]) -> Floats:
        """Return the seconds in which the slowest rank processes its batch, for each candidate; infinite if infeasible.

        With uneven local batch sizes, this is the time by which all ranks can process the global batch together.
        ``workers``: number of ranks with samples on each type of device; shape (types of device, candidates).
        """
        batch = self.request.global_batch
        working = rows
        if self._servers is not None:
            working, ranks = Rows(rows.option, workers), workers.sum(axis=0)
        floor_s = working.largest(self._first_s)
        if not self.request.uneven:
            share = -(-batch // np.maximum(ranks, 1))
            times = np.stack([o.curve.seconds_array(share.astype(float)) for o in self.options])
            result = np.where(working.used, times[rows.option, np.arange(len(rows))], 0.0).max(axis=0)
            fits = np.where(working.used, share <= self._largest[rows.option], True).all(axis=0)
        else:
            result, fits = self._all_done_s(rows.option, workers)
            result = np.maximum(result, floor_s)
        fits &= ranks >= working.largest(self._min_ranks, 0)
        return np.where(fits & (ranks <= batch) & (ranks > 0), result, np.inf)

    def _all_done_s(self, option: NDArray[np.int64], workers: NDArray[np.int64]) -> tuple[Floats, NDArray[np.bool_]]:
        """Return (seconds in which all ranks together process the global batch, True where they ever do)."""
        batch, first = self.request.global_batch, option * GRID

        def done(at: NDArray[np.int64] | int) -> Floats:
            found: Floats = (self._done.ravel()[first + at] * workers).sum(axis=0)
            return found

        low = np.zeros(workers.shape[1], dtype=np.int64)
        at = np.full_like(low, GRID - 1)
        for _ in range((GRID - 1).bit_length()):  # a bisection: the samples that are done rise with the time
            middle = (low + at) // 2
            enough = done(middle) >= batch
            low, at = np.where(enough, low, middle), np.where(enough, middle, at)
        at = np.maximum(at, 1)
        d0, d1, t0, t1 = done(at - 1), done(at), self._grid_s[at - 1], self._grid_s[at]
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.clip(np.nan_to_num((batch - d0) / (d1 - d0)), 0.0, 1.0)
        return t0 + part * (t1 - t0), done(GRID - 1) >= batch

    def _communication_s(
        self, rows: Rows, ranks: NDArray[np.int64], compute_s: Floats
    ) -> tuple[Floats, NDArray[np.int64]]:
        """Return (exposed communication seconds with the best collective, index of the collective) per candidate."""
        overlaps = rows.smallest(self._overlap, 1.0)
        wire_nbytes = self.request.wire_nbytes(self.workload.gradient_nbytes)
        nbytes, parts = float(wire_nbytes), buckets(wire_nbytes, self.request.bucket_nbytes)
        n, nodes = np.maximum(ranks, 1).astype(float), np.maximum(rows.total_nodes, 1).astype(float)
        is_gpu = self.options[0].pool.is_gpu
        links = self._links_of(rows)
        best = np.full(len(rows), np.inf)
        choice = np.zeros(len(rows), dtype=np.int64)
        hiding_s = np.where(np.isfinite(compute_s), compute_s, 0.0) / self._micro_batches
        hiding_s = np.minimum(hiding_s, rows.largest(self._overlapping_s))
        if self._exchanges is not None:
            hop_s, copied = rows.largest(self._hop_s), rows.smallest(self._copied_Bps)
            over, cores = over_gloo(links, nodes, hop_s), rows.smallest(self._cores)
            felt = exchanges_s(self._exchanges, hiding_s, n, over, nodes, overlaps, cores, copied)
            return np.asarray(felt), choice
        for i, collective in enumerate(self.collectives):
            total: Number
            after_s: Number = 0.0
            name = priced(collective, is_gpu, self.request.reduced_by_script)
            tensors = self.workload.tensors
            if self._sharded:
                total, after_s = scatter_gather_s(nbytes, n, links, parts, nodes)
            elif collective == "LayeredServer":
                both_s = np.stack([np.asarray(s) for s in layered_server_s(nbytes, n, links, tensors)])
                total, after_s = np.where(n > 1, both_s, 0.0)
            else:
                total = allreduce_s(name, nbytes, n, links, parts, nodes=nodes, tensors=tensors)
            pieces = tensors if collective == "LayeredServer" else parts
            felt = np.asarray(exposed_s(total, hiding_s, pieces, overlaps)) + after_s
            better = felt < best
            best, choice = np.where(better, felt, best), np.where(better, i, choice)
        return best, choice

    def _as_measured(
        self, rows: Rows, ranks: NDArray[np.int64], compute_s: Floats, step_s: Floats, spread: Floats
    ) -> tuple[Floats, Floats, NDArray[np.int64]]:
        """Return (step times, spreads, indices of the best collectives), predicted from measured multi-device steps.

        ``step_s``, ``spread``: the predictions without these measurements (seconds, and the standard deviation of the
        logarithm). They remain for candidates with one rank, or with a device that lacks such measurements. The index
        of these candidates is -1.
        """
        choice = np.full(len(rows), -1)
        if not self._known:
            return step_s, spread, choice
        at = np.flatnonzero((ranks > 1) & np.isfinite(compute_s) & rows.of(self._has_steps, True).all(axis=0))
        if not len(at):
            return step_s, spread, choice
        measured = rows[at]
        links = self._links(measured)
        n, nodes = ranks[at].astype(float), measured.total_nodes.astype(float)
        best_s, best_spread = np.full(len(at), np.inf), np.zeros(len(at))
        for c, collective in enumerate(self.collectives):
            ratio = np.ones(len(at))
            for link, on_it in links:
                ratio[on_it] = communication_ratio(
                    collective,
                    self.workload.gradient_nbytes,
                    n[on_it],
                    nodes[on_it],
                    link,
                    self.workload.tensors,
                    self.request.backend,
                )
            found_s, of_it = self._slowest(measured, n, nodes, compute_s[at], ratio)
            better = found_s < best_s
            best_s, best_spread = np.where(better, found_s, best_s), np.where(better, of_it, best_spread)
            choice[at] = np.where(better, c, choice[at])
        step_s, spread = step_s.copy(), spread.copy()
        step_s[at], spread[at] = best_s, best_spread
        return step_s, spread, choice

    def _slowest(self, rows: Rows, n: Floats, nodes: Floats, compute_s: Floats, ratio: Floats) -> tuple[Floats, Floats]:
        """Return (step time including input, standard deviation of log(step time)) for each candidate.

        The measured steps of each device type in a candidate predict a step time. The longest of these times counts.
        All parameters but ``rows`` have one element for each candidate. ``n``: number of ranks. ``nodes``: number of
        nodes. ``compute_s``: seconds in which the slowest rank processes its batch, including exposed input time.
        ``ratio``: the result of ``communication_ratio``.
        """
        batch = self.request.global_batch
        busiest = rows.largest(self._per_node, 0).astype(float)
        slowest_s, spread = np.zeros(len(n)), np.zeros(len(n))
        for known, number in self._known:
            at = np.flatnonzero(rows.used[number])
            if not len(at):
                continue
            which = rows.option[number, at]
            share, data_s, one_s = np.zeros((3, len(at)))
            for i in np.unique(which).tolist():
                option, mine = self.options[i], which == i
                share[mine] = np.ceil(option.curve.samples_array(compute_s[at[mine]]) - WHOLE)
                # Where the curve is flat, many batches take this time. Most candidates have nearly equal batches.
                even = np.ceil(batch / n[at[mine]])
                flat = np.isclose(option.curve.seconds_array(even), compute_s[at[mine]], rtol=1e-9, atol=0)
                share[mine] = np.clip(np.where(flat, even, share[mine]), 1, min(int(self._largest[i]), batch))
                data_s[mine] = option.curve.seconds_array(share[mine]) - option.computing.seconds_array(share[mine])
                one_s[mine] = compute_s[at[mine]] - data_s[mine]
                one_s[mine] = np.maximum(one_s[mine], option.curve.seconds(0) / 2) / option.slowdown
                one_s[mine] *= option.ratio.at_all(share[mine] / option.micro_batches)
            median_s, deviation = predicted(known, Runs(nodes[at], busiest[at], n[at], share, one_s, ratio[at]))
            whole_s = median_s + data_s
            worse = whole_s > slowest_s[at]
            slowest_s[at] = np.where(worse, whole_s, slowest_s[at])
            spread[at] = np.where(worse, deviation * median_s / whole_s, spread[at])
        return slowest_s, spread

    def _links_of(self, rows: Rows) -> Links:
        """Return the slowest link between the ranks of each candidate."""
        alone, is_alone = self._alone(rows), rows.total_nodes == 1
        far, own = self._between_nodes, self._within_node
        latency_s, bandwidth_Bps, _ = self._network_of(rows)
        near_s = np.minimum(latency_s, near_latency_s(self.options[0].pool.is_gpu))
        between = (
            latency_s,
            bandwidth_Bps,
            rows.smallest(far.reduce_Bps),
            near_s if self.request.backend is None else near_s * self.request.backend.within.latency,
            rows.smallest(far.inside_Bps),
        )
        within = (getattr(own, field.name)[alone] for field in fields(Links))
        return Links(*(np.where(is_alone, one, other) for one, other in zip(within, between, strict=True)))

    def _network_of(self, rows: Rows) -> tuple[Floats, Floats, Floats]:
        """Return (latency, bandwidth, spread) of the slowest link between nodes of each candidate."""
        far = self._between_nodes
        own = rows.of(far.latency_s, 0.0), rows.of(far.bandwidth_Bps, np.inf), rows.of(self._link_spread, 0.0)
        return self._between.slowest(rows.nodes, *own)

    def _alone(self, rows: Rows) -> NDArray[np.int64]:
        """Return the option with the most nodes of each candidate, which is the only one on a single node."""
        found: NDArray[np.int64] = rows.option[rows.nodes.argmax(axis=0), np.arange(len(rows))]
        return found

    def _links(self, rows: Rows) -> list[tuple[Link, NDArray[np.intp]]]:
        """Return (link, indices of the candidates whose ranks communicate over it) for each distinct link.

        Candidates are grouped by link, because the time formulas take arrays of candidates but only one link.
        """
        links, keys = self._links_of(rows), np.zeros(len(rows), dtype=np.int64)
        figures = [getattr(links, field.name) for field in fields(Links)]
        for values in figures:
            distinct, index = np.unique(values, return_inverse=True)
            keys = np.unique(keys * len(distinct) + index, return_inverse=True)[1]
        _, first = np.unique(keys, return_index=True)
        made = [
            Link(latency_s, bandwidth_Bps, reduce_Bps, near_latency_s=near_s, near_bandwidth_Bps=near_Bps)
            for latency_s, bandwidth_Bps, reduce_Bps, near_s, near_Bps in zip(
                *(values[first].tolist() for values in figures), strict=True
            )
        ]
        return [(link, np.flatnonzero(keys == i)) for i, link in enumerate(made)]
