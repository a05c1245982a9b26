"""Approximate evaluation of many candidates at once: the formulas of ``evaluate`` on arrays, with fractional samples.

The screen ranks thousands of candidates in milliseconds. ``evaluate`` then evaluates the best of them exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlcontract import SERVERS
from dljob.perf.fit.scaling import Runs
from dljob.perf.resources import energy
from dljob.perf.step.communication import Link, allreduce_s, scatter_gather_s
from dljob.perf.step.compute import active_part
from dljob.perf.step.step import P90, buckets, exposed_s
from dljob.perf.step.synchronization import straggler_factor
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.collectives import priced, summing
from dljob.planner.candidates.cost.interrupted import interruptions_of
from dljob.planner.candidates.cost.measured import communication_ratio, predicted
from dljob.planner.candidates.options import Option, link_of, near_latency_s, overlap_of
from dljob.planner.candidates.shard_space import largest_share
from dljob.planner.search.servers import Servers
from dljob.planner.types import CollectiveName, Request

WHOLE = 1e-3
"""Maximum rounding error, in samples, at which a local batch size still counts as a whole number."""
GRID = 160
"""Number of durations in the table of ``Screen``, which has the samples that a node processes within each duration.

``Screen`` interpolates between these durations to find the time in which all ranks process the global batch."""

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
"""Number of nodes on which each candidate uses each option; shape (candidates, options)."""


@dataclass(frozen=True)
class Screened:
    """Approximate predictions as arrays with one element per candidate; infinite for infeasible candidates.

    ``step_s``, ``step_p90_s``: median and 90th percentile of the step time. ``collective``: the fastest collective.
    """

    step_s: Floats
    step_p90_s: Floats
    energy_J: Floats
    """Energy of a step in joules."""
    usd: Floats
    """Cost of a step in US dollars."""
    carbon_g: Floats
    """Carbon of a step in grams of CO2 equivalent, as the mean over the whole training."""
    collective: list[CollectiveName]

    def joined(self, other: "Screened") -> "Screened":
        """Return the predictions of ``self``, followed by those of ``other``."""
        return Screened(
            np.concatenate([self.step_s, other.step_s]),
            np.concatenate([self.step_p90_s, other.step_p90_s]),
            np.concatenate([self.energy_J, other.energy_J]),
            np.concatenate([self.usd, other.usd]),
            np.concatenate([self.carbon_g, other.carbon_g]),
            [*self.collective, *other.collective],
        )


class Screen:
    """Approximate evaluation of many candidates for one request.

    For each option (way to use one device type), a table has the samples that a node processes within given durations.
    """

    def __init__(self, options: Sequence[Option], request: Request, workload: Workload) -> None:
        self.options, self.request, self.workload = options, request, workload
        batch = request.global_batch
        self._per_node = np.array([o.ranks_per_node for o in options], dtype=np.int64)
        self._first_s = np.array([o.curve.seconds(1) for o in options])
        self._largest = [largest_share(o, batch, request.storage) for o in options]
        longest = max(o.curve.seconds(min(batch, most)) for o, most in zip(options, self._largest, strict=True))
        self._grid_s = np.geomspace(0.999 * self._first_s.min(), 1.001 * max(longest, self._first_s.max()), GRID)
        self._done = np.stack(
            [
                np.minimum(o.curve.samples_array(self._grid_s), most) * o.ranks_per_node
                for o, most in zip(options, self._largest, strict=True)
            ]
        )
        self._packing = np.array([o.packing for o in options])
        self._spread = np.array([o.compute_spread for o in options])
        links = [link_of([o], 2, request.backend) for o in options]
        self._latency_s = np.array([link.latency_s for link, _ in links])
        self._bandwidth_Bps = np.array([link.bandwidth_Bps for link, _ in links])
        self._reduce_Bps = np.array([link.reduce_Bps for link, _ in links])
        self._near_Bps = np.array([link.inside_Bps for link, _ in links])
        self._link_spread = np.array([spread for _, spread in links])
        self._own = [link_of([o], 1, request.backend)[0] for o in options]
        self._idle_W = np.array([energy.rank_watts(o.device, 0.0) * o.ranks_per_node for o in options])
        self._busy_W = np.array([energy.rank_watts(o.device, 1.0) * o.ranks_per_node for o in options])
        self._pausing_W = np.array([energy.rank_watts(o.device, 1.0, 0.0) * o.ranks_per_node for o in options])
        self._usd_per_s = np.array([energy.cost_usd(o.device, 1.0, o.ranks_per_node) for o in options])
        self._min_ranks = np.array([o.min_ranks for o in options])
        self._sharded = options[0].strategy == "Optimizer"
        self._update_s = np.array([o.update_s if self._sharded else 0.0 for o in options])
        self._micro_batches = options[0].micro_batches
        self._overlapping_s = np.array([o.overlapping_s for o in options])
        self._has_steps = np.array([o.steps is not None for o in options])
        by_device: dict[str, list[int]] = {}
        for i, option in enumerate(options):
            if option.steps is not None:
                by_device.setdefault(option.label, []).append(i)
        self._known = [(o.steps, m) for m in by_device.values() if (o := options[m[0]]).steps is not None]
        self._collectives = (request.collective,) if request.collective else summing(options[0])[:4]
        self._servers = Servers(options, request, workload) if request.collective in SERVERS else None

    def screen(self, counts: Counts) -> Screened:
        """Predict the candidates in the rows of ``counts`` (number of nodes for each option, at least one in a row)."""
        used = counts > 0
        ranks = counts @ self._per_node
        workers = counts * self._per_node if self._servers is None else self._servers.workers(counts)
        compute_s = self._compute_s(counts, used, ranks, workers)
        compute_s = compute_s - np.where(used, self._update_s, np.inf).min(axis=1) * (1 - 1 / np.maximum(ranks, 1))
        best, choice = self._communication_s(counts, used, ranks, compute_s)
        latency_s = np.where(used, self._latency_s, 0.0).max(axis=1)
        stragglers = {n: straggler_factor(n) for n in set(ranks.tolist())}
        finite_s = np.where(np.isfinite(compute_s), compute_s, 0.0)
        packing = np.where(used, self._packing, 1.0).max(axis=1)
        waiting_s = finite_s * (np.array([stragglers[n] for n in ranks.tolist()]) * packing - 1)
        waiting_s += 2 * np.ceil(np.log2(np.maximum(ranks, 1))) * latency_s
        step_s = compute_s + best + waiting_s
        apart = self._servers is not None and self.request.synchronization != "Synchronous"
        if self._servers is not None and apart:
            compute_s, step_s = self._servers.round_s(counts, compute_s)
        compute_spread = np.where(used, self._spread, 0.0).max(axis=1)
        link_spread = np.where(used, self._link_spread, 0.0).max(axis=1)
        with np.errstate(invalid="ignore"):
            spread = np.hypot(compute_s * compute_spread, (step_s - compute_s) * link_spread) / step_s
            if not apart:
                step_s, spread, best_known = self._as_measured(counts, used, ranks, compute_s, step_s, spread)
                choice = np.where(best_known >= 0, best_known, choice)
            p90 = step_s * np.exp(P90 * np.nan_to_num(spread))
            busy_s = np.minimum(compute_s, step_s)
            computing_W, idle_W = self._computing_watts(ranks), counts @ self._idle_W
            if self._servers is None:
                busy_W = (counts * computing_W).sum(axis=1)
            else:
                busy_W = idle_W + (workers * (computing_W - self._idle_W) / self._per_node).sum(axis=1)
            energy_J = busy_s * busy_W + (step_s - busy_s) * idle_W
        if self.request.domain.interruptions_per_h:
            work_s, nodes = step_s * self.request.total_steps, np.maximum(counts.sum(axis=1), 1)
            finite = np.isfinite(work_s)
            longer = np.ones(len(counts))
            expected_s = interruptions_of(self.request, self.workload).expected_s(work_s[finite], nodes[finite])
            longer[finite] = expected_s / work_s[finite]
            step_s, p90, energy_J = step_s * longer, p90 * longer, energy_J * longer
        usd = self.request.prices.with_energy_usd(step_s * (counts @ self._usd_per_s), energy_J)
        total_s = np.where(np.isfinite(step_s), step_s * self.request.total_steps, 0.0)
        carbon_g = self.request.energy.carbon.grams(energy_J, self.request.begin_s, total_s)
        return Screened(step_s, p90, energy_J, usd, carbon_g, [self._collectives[i] for i in choice])

    def _computing_watts(self, ranks: NDArray[np.int64]) -> Floats:
        """Return the power in watts of the ranks on a node of each option while they compute, with equal local batches.

        Shape: (candidates, options). ``ranks``: number of ranks of each candidate.
        """
        whole = self.request.global_batch / self._micro_batches
        numbers, at = np.unique(ranks, return_inverse=True)
        active = np.ones((len(numbers), len(self.options)))
        for i, option in enumerate(self.options):
            if option.pool.is_gpu:
                active[:, i] = [active_part(self.workload, option.device, whole / max(n, 1)) for n in numbers.tolist()]
        found: Floats = self._pausing_W + active[at] * (self._busy_W - self._pausing_W)
        return found

    def _compute_s(
        self, counts: Counts, used: NDArray[np.bool_], ranks: NDArray[np.int64], workers: NDArray[np.int64]
    ) -> Floats:
        """Return the seconds in which the slowest rank processes its batch, for each candidate; infinite if infeasible.

        With uneven local batch sizes, this is the time by which all ranks can process the global batch together.
        ``workers``: number of ranks with samples on each option; shape (candidates, options).
        """
        batch = self.request.global_batch
        if self._servers is not None:
            used, ranks = workers > 0, workers.sum(axis=1)
        floor_s = np.where(used, self._first_s, 0.0).max(axis=1)
        if not self.request.uneven:
            share = -(-batch // np.maximum(ranks, 1))
            times = np.stack([o.curve.seconds_array(share.astype(float)) for o in self.options], axis=1)
            result = np.where(used, times, 0.0).max(axis=1)
            room = np.array([float(most) for most in self._largest])
            fits = np.where(used, share[:, None] <= room, True).all(axis=1)
        else:
            done = counts @ self._done if self._servers is None else workers @ (self._done / self._per_node[:, None])
            at = np.clip((done >= batch).argmax(axis=1), 1, GRID - 1)
            rows = np.arange(len(counts))
            d0, d1, t0, t1 = done[rows, at - 1], done[rows, at], self._grid_s[at - 1], self._grid_s[at]
            with np.errstate(divide="ignore", invalid="ignore"):
                part = np.clip(np.nan_to_num((batch - d0) / (d1 - d0)), 0.0, 1.0)
            result = np.maximum(t0 + part * (t1 - t0), floor_s)
            fits = done[:, -1] >= batch
        fits &= ranks >= np.where(used, self._min_ranks, 0).max(axis=1)
        return np.where(fits & (ranks <= batch) & (ranks > 0), result, np.inf)

    def _communication_s(
        self, counts: Counts, used: NDArray[np.bool_], ranks: NDArray[np.int64], compute_s: Floats
    ) -> tuple[Floats, NDArray[np.int64]]:
        """Return (exposed communication seconds with the best collective, index of the collective) per candidate."""
        overlap = np.array([overlap_of([o]) for o in self.options])
        overlaps = np.where(used, overlap, 1.0).min(axis=1)
        wire_nbytes = self.request.wire_nbytes(self.workload.gradient_nbytes)
        nbytes, parts = float(wire_nbytes), buckets(wire_nbytes, self.request.bucket_nbytes)
        n, nodes = np.maximum(ranks, 1).astype(float), np.maximum(counts.sum(axis=1), 1).astype(float)
        is_gpu = self.options[0].pool.is_gpu
        groups = self._links(counts, used)
        best = np.full(len(counts), np.inf)
        choice = np.zeros(len(counts), dtype=np.int64)
        for i, collective in enumerate(self._collectives):
            total = np.zeros(len(counts))
            for link, rows in groups:
                name = priced(collective, is_gpu, self.request.reduced_by_script)
                total[rows] = allreduce_s(
                    name, nbytes, n[rows], link, parts, nodes=nodes[rows], tensors=self.workload.tensors
                )
            after_s = np.zeros(len(counts))
            for link, rows in groups if self._sharded else ():
                total[rows], after_s[rows] = scatter_gather_s(nbytes, n[rows], link, parts, nodes[rows])
            hiding_s = np.where(np.isfinite(compute_s), compute_s, 0.0) / self._micro_batches
            hiding_s = np.minimum(hiding_s, np.where(used, self._overlapping_s, 0.0).max(axis=1))
            felt = np.asarray(exposed_s(total, hiding_s, parts, overlaps)) + after_s
            better = felt < best
            best, choice = np.where(better, felt, best), np.where(better, i, choice)
        return best, choice

    def _as_measured(
        self,
        counts: Counts,
        used: NDArray[np.bool_],
        ranks: NDArray[np.int64],
        compute_s: Floats,
        step_s: Floats,
        spread: Floats,
    ) -> tuple[Floats, Floats, NDArray[np.int64]]:
        """Return (step times, spreads, indices of the best collectives), predicted from measured multi-device steps.

        ``step_s``, ``spread``: the predictions without these measurements (seconds, and the standard deviation of the
        logarithm). They remain for candidates with one rank, or with a device that lacks such measurements. The index
        of these candidates is -1.
        """
        choice = np.full(len(counts), -1)
        rows_measured = np.flatnonzero((ranks > 1) & np.isfinite(compute_s) & ~(used & ~self._has_steps).any(axis=1))
        if not self._known or not len(rows_measured):
            return step_s, spread, choice
        links = self._links(counts[rows_measured], used[rows_measured])
        n, nodes = ranks[rows_measured].astype(float), counts[rows_measured].sum(axis=1).astype(float)
        best_s, best_spread = np.full(len(rows_measured), np.inf), np.zeros(len(rows_measured))
        for c, collective in enumerate(self._collectives):
            ratio = np.ones(len(rows_measured))
            for link, rows in links:
                ratio[rows] = communication_ratio(
                    collective,
                    self.workload.gradient_nbytes,
                    n[rows],
                    nodes[rows],
                    link,
                    self.workload.tensors,
                    self.request.backend,
                )
            found_s, of_it = self._slowest(used[rows_measured], n, nodes, compute_s[rows_measured], ratio)
            better = found_s < best_s
            best_s, best_spread = np.where(better, found_s, best_s), np.where(better, of_it, best_spread)
            choice[rows_measured] = np.where(better, c, choice[rows_measured])
        step_s, spread = step_s.copy(), spread.copy()
        step_s[rows_measured], spread[rows_measured] = best_s, best_spread
        return step_s, spread, choice

    def _slowest(
        self, used: NDArray[np.bool_], n: Floats, nodes: Floats, compute_s: Floats, ratio: Floats
    ) -> tuple[Floats, Floats]:
        """Return (step time including input, standard deviation of log(step time)) for each candidate.

        The measured steps of each device type in a candidate predict a step time. The longest of these times counts.
        ``used`` has a row for each candidate, with True for each option (way to use one device type) that the candidate
        contains. All other parameters have one element for each candidate. ``n``: number of ranks. ``nodes``: number of
        nodes. ``compute_s``: seconds in which the slowest rank processes its batch, including exposed input time.
        ``ratio``: the result of ``communication_ratio``.
        """
        batch = self.request.global_batch
        busiest = np.where(used, self._per_node, 0).max(axis=1).astype(float)
        slowest_s, spread = np.zeros(len(n)), np.zeros(len(n))
        for known, members in self._known:
            rows, which = np.nonzero(used[:, members])  # at most one option of a device is in a row
            if not len(rows):
                continue
            share, data_s, one_s = np.zeros((3, len(rows)))
            for i in np.unique(which):
                option, mine = self.options[members[i]], which == i
                share[mine] = np.ceil(option.curve.samples_array(compute_s[rows[mine]]) - WHOLE)
                share[mine] = np.clip(share[mine], 1, min(self._largest[members[i]], batch))
                data_s[mine] = option.curve.seconds_array(share[mine]) - option.computing.seconds_array(share[mine])
                one_s[mine] = compute_s[rows[mine]] - data_s[mine]
                one_s[mine] = np.maximum(one_s[mine], option.curve.seconds(0) / 2) / option.slowdown
            at = Runs(nodes[rows], busiest[rows], n[rows], share, one_s, ratio[rows])
            median_s, deviation = predicted(known, at)
            whole_s = median_s + data_s
            worse = whole_s > slowest_s[rows]
            slowest_s[rows] = np.where(worse, whole_s, slowest_s[rows])
            spread[rows] = np.where(worse, deviation * median_s / whole_s, spread[rows])
        return slowest_s, spread

    def _links(self, counts: Counts, used: NDArray[np.bool_]) -> list[tuple[Link, NDArray[np.intp]]]:
        """Return (link, indices of the candidates whose ranks communicate over it) for each distinct link.

        Candidates are grouped by link, because the time formulas take arrays of candidates but only one link.
        """
        single = counts.sum(axis=1) == 1
        table = np.stack(
            [
                np.where(single, used.argmax(axis=1), -1),
                np.where(used, self._latency_s, 0.0).max(axis=1),
                np.where(used, self._bandwidth_Bps, np.inf).min(axis=1),
                np.where(used, self._reduce_Bps, np.inf).min(axis=1),
                np.where(used, self._near_Bps, np.inf).min(axis=1),
            ],
            axis=1,
        )
        keys, inverse = np.unique(table, axis=0, return_inverse=True)
        rows = [np.flatnonzero(inverse.ravel() == i) for i in range(len(keys))]
        links = [self._own[int(k[0])] if k[0] >= 0 else self._between(k) for k in keys]
        return list(zip(links, rows, strict=True))

    def _between(self, key: Floats) -> Link:
        latency_s, bandwidth_Bps, reduce_Bps, near_Bps = map(float, key[1:])
        near_s = min(latency_s, near_latency_s(self.options[0].pool.is_gpu))
        if self.request.backend is not None:
            near_s *= self.request.backend.within.latency
        return Link(latency_s, bandwidth_Bps, reduce_Bps, near_latency_s=near_s, near_bandwidth_Bps=near_Bps)
