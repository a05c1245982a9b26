"""Search over the numbers of nodes of each type of device. ``Screen`` evaluates the candidates.

The search of a small cluster is complete. On a large cluster, the search evaluates every type of device alone over a
grid of numbers of nodes, pairs of types over a coarser grid, every subset of the fastest types at several sizes and at
every power of two ranks, and mixes that have exactly the least or the largest number of nodes that the request allows.
A local search then starts from the best candidates and ends when no neighbour is better.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dljob.cluster.catalogue import vendor
from dljob.planner.candidates.options import Option
from dljob.planner.search.objective import meets_all, scores
from dljob.planner.search.objective import tolerance as equally_good
from dljob.planner.search.pareto import MAX_SHOWN, promising
from dljob.planner.search.screen import Counts, Screen, Screened
from dljob.planner.types import CollectiveName, Request

COMPLETE = 4000
"""Maximum number of candidates (combinations of node counts) at which the search evaluates all of them.

If there are more, it evaluates a selection and then searches locally."""
ROUNDS = 12
"""Maximum number of rounds of the local search."""
SEEDS = 6
"""Number of the best candidates so far whose neighbours are evaluated in each round of the local search."""


def grid(most: int, fine: bool = True) -> list[int]:
    """Return geometrically growing numbers up to ``most``, which is the last one.

    They are 1, 2, 3, 4, 6, 8, 12, … if ``fine`` is true, and 1, 2, 4, 8, … otherwise.
    """
    counts, n = {most}, 1
    while n <= most:
        counts |= {n, min(most, 3 * n // 2)} if fine and n > 1 else {n}
        n *= 2
    return sorted(counts)


def charged_cpus(option: Option, request: Request) -> float:
    """Return how many CPUs of a quota (``Request.cpus_max``) a pod takes.

    A pod with at most one CPU can request less, and a pod on GPUs does not count.
    """
    requested = request.cpu_per_pod or np.inf  # Ranks may compute with more threads than requested CPUs.
    return 0.0 if option.pool.is_gpu or option.cpus <= 1 else min(option.cpus, requested)


class Search:
    """Search over candidate plans, stored as rows of an array.

    A row contains the number of nodes for each option (way to use one device type). It uses at most one option of each
    device type.
    """

    def __init__(self, options: Sequence[Option], request: Request, screen: Screen) -> None:
        self.options, self.request, self.screen = options, request, screen
        self._most = np.array([o.nodes for o in options], dtype=np.int64)
        self._least = np.array([o.min_nodes for o in options], dtype=np.int64)
        self._per_node = np.array([o.ranks_per_node for o in options], dtype=np.int64)
        self._gpu_limits = [
            (np.array([o.ranks_per_node if o.pool.is_gpu and vendor(o.label) == name else 0 for o in options]), most)
            for name, most in request.gpus_max.items()
        ]
        self._devices = np.array([o.ranks_per_node * (1 if o.pool.is_gpu else max(1.0, o.cores)) for o in options])
        self._cpus = np.array([charged_cpus(o, request) for o in options])
        self._device = np.array(_numbered([o.label for o in options]))
        # Rows are identified by a random 64-bit hash, which is a thousand times faster than comparing them.
        self._hashing = np.random.default_rng(0).integers(-(2**62), 2**62, len(options), dtype=np.int64) | 1
        self._seen = np.zeros(0, dtype=np.int64)
        self.counts: Counts = np.zeros((0, len(options)), dtype=np.int64)
        self.found: Screened = screen.screen(self.counts)
        self.scores: NDArray[np.float64] = np.zeros(0)

    def run(self) -> None:
        """Run the search. Store the rows in ``counts``, their predictions in ``found``, their scores in ``scores``."""
        by_device = [np.flatnonzero(self._device == d) for d in range(self._device.max() + 1)]
        size = 1
        for members in by_device:
            size *= 1 + int(self._most[members].sum())
        if size <= COMPLETE:
            self._look(self._complete(by_device))
            return
        self._look(self._stacked(self._row({i: n}) for i in range(len(self.options)) for n in self._grid(i)))
        best = [int(members[self._best_alone(members)]) for members in by_device]
        fewest = [int(members[self._per_node[members].argmin()]) for members in by_device]
        self._look(np.concatenate([self._mixes(best), self._at_bounds(fewest)]))
        for _ in range(ROUNDS):
            before = self.scores.min(initial=np.inf)
            top = np.argsort(self.scores, kind="stable")[:SEEDS]
            if not len(top):
                break
            self._look(np.concatenate([self._neighbours(self.counts[i], best, by_device) for i in top]))
            if not self.scores.min(initial=np.inf) < before:
                break

    def _grid(self, option: int, fine: bool = True) -> list[int]:
        most = min(int(self._most[option]), self.request.nodes_max or int(self._most[option]))
        bound = min(most, max(1, self.request.nodes_min))
        return sorted({*grid(most, fine), bound})

    def _row(self, counts: dict[int, int]) -> NDArray[np.int64]:
        row = np.zeros(len(self.options), dtype=np.int64)
        for i, n in counts.items():
            row[i] = n
        return row

    def _most_of(self, subset: Sequence[int]) -> NDArray[np.int64]:
        """Return the row with all nodes of each option in ``subset``."""
        return self._row({i: int(self._most[i]) for i in subset})

    def _stacked(self, rows: Iterable[NDArray[np.int64]]) -> Counts:
        """Return the rows as an array of shape (rows, options), also if there are no rows."""
        return np.array(list(rows), dtype=np.int64).reshape(-1, len(self.options))

    def _pairs(self, picked: Sequence[tuple[int, int, int, int]]) -> Counts:
        """Return a row for each (option, nodes, other option, nodes of the other option)."""
        rows = np.zeros((len(picked), len(self.options)), dtype=np.int64)
        if picked:
            one, nodes, other, nodes_of_other = np.array(picked, dtype=np.int64).T
            rows[np.arange(len(picked)), one] = nodes
            rows[np.arange(len(picked)), other] = nodes_of_other
        return rows

    def _complete(self, by_device: list[NDArray[np.intp]]) -> Counts:
        """Return all combinations of node counts, with at most one option of each device type."""
        rows = self._stacked([self._row({})])
        for members in by_device:
            counts = [(int(i), n) for i in members for n in range(1, int(self._most[i]) + 1)]
            ways = self._stacked(self._row({i: n}) for i, n in [(int(members[0]), 0), *counts])
            rows = (rows[:, None, :] + ways).reshape(-1, len(self.options))
        return rows

    def _best_alone(self, members: NDArray[np.intp]) -> int:
        """Return the index in ``members`` of the option that has the best score in a candidate without other options.

        ``members``: the options of one type of device. If no option is feasible alone, return the index of the option
        with the most ranks.
        """
        alone = (self.counts > 0).sum(axis=1) == 1
        best = [self.scores[alone & (self.counts[:, i] > 0)].min(initial=np.inf) for i in members]
        if np.isfinite(best).any():
            return int(np.argmin(best))
        return int(np.argmax([self.options[i].nodes * self.options[i].ranks_per_node for i in members]))

    def _mixes(self, best: list[int]) -> Counts:
        grids = {i: self._grid(i, fine=False) for i in best}
        pairs = self._pairs([(i, n, j, m) for i, j in combinations(best, 2) for n in grids[i] for m in grids[j]])
        fastest = sorted(best, key=lambda i: self.options[i].curve.slope_s)[:8]
        subsets = [self._most_of(s) for size in range(2, len(fastest) + 1) for s in combinations(fastest, size)]
        if not subsets:
            return pairs
        most = np.stack(subsets)
        return np.concatenate([pairs, self._scaled(most), self._filled(most, fastest), self._at_bounds(best)])

    def _bounds(self) -> tuple[int, int]:
        """Return the least and the largest number of nodes that the request allows."""
        return max(1, self.request.nodes_min), self.request.nodes_max or int(self._most.sum())

    def _at_bounds(self, best: Sequence[int]) -> Counts:
        """Return rows with exactly as many nodes as a bound of the request.

        Each row uses the nodes of one type first, and then those of the others, the fastest first. ``best``: an option
        of each device type.
        """
        fastest = sorted(best, key=lambda i: self.options[i].curve.slope_s / self._per_node[i])
        rows = []
        for nodes in dict.fromkeys(self._bounds()):
            for first in fastest:
                left, row = nodes, self._row({})
                for i in (first, *(other for other in fastest if other != first)):
                    row[i] = min(left, self._most[i])
                    left -= row[i]
                if not left:
                    rows.append(row)
        return self._stacked(rows)

    def _scaled(self, most: Counts) -> Counts:
        """Return each row of ``most`` scaled down to several total numbers of nodes.

        A row of ``most`` has all nodes of some device types. A scaled row has nearly the same fraction of the nodes of
        every device type.
        """
        total = most.sum(axis=1, keepdims=True)
        bounds = [np.full_like(total, self.request.nodes_min), np.minimum(total, self.request.nodes_max or total)]
        nodes = np.concatenate([total >> np.arange(12), *bounds], axis=1)
        scaled = -(-most[:, None, :] * nodes[:, :, None] // total[:, :, None])
        rows: Counts = np.minimum(most[:, None, :], scaled)
        return rows.reshape(-1, most.shape[1])

    def _filled(self, most: Counts, fastest: Sequence[int]) -> Counts:
        """Return, for each row of ``most``, rows that have 2, 4, 8, ... ranks and use the fastest devices first.

        A row of ``most`` has all nodes of some device types. ``fastest``: the options, the fastest first.
        Halving-doubling is much faster at a power of two ranks, so changing the nodes of one device cannot improve such
        a row. Therefore the search has to start from the best mix of devices at each power of two.
        """
        ranks = most[:, fastest] * self._per_node[fastest]
        before = np.cumsum(ranks, axis=1) - ranks
        largest = min(int(ranks.sum(axis=1).max()), self.request.global_batch)
        powers = 1 << np.arange(1, largest.bit_length())
        filled = np.clip(powers[None, :, None] - before[:, None, :], 0, ranks[:, None, :]) // self._per_node[fastest]
        rows = np.zeros((len(most), len(powers), most.shape[1]), dtype=np.int64)
        rows[:, :, fastest] = filled
        return rows.reshape(-1, most.shape[1])

    def _neighbours(self, row: NDArray[np.int64], best: list[int], by_device: list[NDArray[np.intp]]) -> Counts:
        """Return rows that differ from ``row`` in the option or the number of nodes of one device type.

        ``best``: the best option of each device type. ``by_device``: all options of each device type.

        The number of nodes changes slightly, changes much, or makes the total number of ranks a power of two. Small
        changes seldom reach a power of two, at which halving-doubling is fast. If the number of nodes is at a bound of
        the request, nodes of one device type are also replaced by as many of another one.
        """
        held = np.array([m[row[m].argmax()] if row[m].any() else b for m, b in zip(by_device, best, strict=True)])
        ranks = int(row @ self._per_node)
        each = held[self._device]
        n = row[each]
        others = ranks - n * self._per_node[each]
        small = np.maximum(1, n // 8)
        fixed = [n, np.zeros_like(n), np.ones_like(n), n - 1, n + 1, n // 2, 2 * n, n + small, n - small, self._most]
        powers = [(power - others) // self._per_node for power in _powers_about(ranks)]
        counts = np.clip(np.stack([*fixed, *powers], axis=1), 0, self._most[:, None])
        rows = np.where(self._device[:, None] == self._device, 0, row)
        rows = np.repeat(rows, counts.shape[1], axis=0)
        rows[np.arange(len(rows)), np.repeat(np.arange(len(n)), counts.shape[1])] = counts.ravel()
        return np.concatenate([rows, self._exchanged(row, held)]) if row.sum() in self._bounds() else rows

    def _exchanged(self, row: NDArray[np.int64], held: NDArray[np.intp]) -> Counts:
        """Return rows in which one, half or all nodes of one option in ``held`` are nodes of another one."""
        give, take = (side.ravel() for side in np.meshgrid(held, held, indexing="ij"))
        apart = (give != take) & (row[give] > 0)
        give, take = np.repeat(give[apart], 3), np.repeat(take[apart], 3)
        amounts = np.stack([np.ones_like(row), np.maximum(1, row // 2), row], axis=1)[give[::3]].ravel()
        moved = np.minimum(amounts, self._most[take] - row[take])
        rows = np.repeat(row[None], len(give), axis=0)
        rows[np.arange(len(give)), give] -= moved
        rows[np.arange(len(give)), take] += moved
        return rows

    def _look(self, counts: Counts) -> None:
        """Predict and score the rows that are within the request's bounds and were not evaluated before.

        Append them to ``counts``, their predictions to ``found``, and their scores to ``scores``.
        """
        nodes = counts.sum(axis=1)
        most = self.request.nodes_max or int(self._most.sum())
        possible = ((counts == 0) | (counts >= self._least)).all(axis=1)
        counts = counts[possible & (nodes >= max(1, self.request.nodes_min)) & (nodes <= most)]
        for per_node, gpus in self._gpu_limits:
            counts = counts[counts @ per_node <= gpus]
        if self.request.cpus_max is not None:
            counts = counts[counts @ self._cpus <= self.request.cpus_max]
        if self.request.refused_ranks:
            counts = counts[~np.isin(counts @ self._per_node, sorted(self.request.refused_ranks))]
        keys, first = np.unique(counts @ self._hashing, return_index=True)
        fresh = counts[np.sort(first[~np.isin(keys, self._seen)])]
        if not len(fresh):
            return
        self._seen = np.concatenate([self._seen, keys])
        seen = self.screen.screen(fresh)
        self.counts = np.concatenate([self.counts, fresh])
        self.scores = np.concatenate([self.scores, scores(self.request, seen)])
        self.found = self.found.joined(seen)

    def best(self, count: int, tolerance: float) -> list[NDArray[np.int64]]:
        """Return the feasible rows (candidates) to evaluate exactly: first the ``count`` best rows, then others.

        The others are the row with the fewest GPUs or CPUs among those within the relative ``tolerance`` of the best
        score that meet the deadline (of all of them, if none meets it), the best row of each of ``count`` sets of
        devices, rows with the best set of devices but other numbers of nodes, and trade-offs between time, energy and
        cost.
        """
        order = np.argsort(self.scores, kind="stable")
        order = order[np.isfinite(self.scores[order])]
        if not len(order):
            return []
        picked = dict.fromkeys(order[:count].tolist())
        near = order[self.scores[order] <= self.scores[order[0]] * self._tolerance(order, tolerance)]
        in_time = meets_all(self.request, self.found.step_p90_s[near])
        near = near[in_time] if in_time.any() else near
        picked[int(near[np.argmin(self.counts[near] @ self._devices)])] = None
        kinds = (self.counts[order] > 0) @ self._hashing
        best = order[kinds == kinds[0]]
        sizes = np.frexp(self.counts[best].sum(axis=1))[1]  # log2 of the number of nodes, rounded
        picked |= dict.fromkeys([*order[_first(kinds)][:count].tolist(), *best[_first(sizes)][:count].tolist()])
        picked |= dict.fromkeys(promising(self.found, MAX_SHOWN).tolist())
        return [self.counts[i] for i in picked]

    def _tolerance(self, order: NDArray[np.intp], tolerance: float) -> NDArray[np.float64]:
        """Return for each row the factor on the best score up to which the row counts as equally good.

        ``order``: indices of rows, the best first. ``tolerance``: relative tolerance of rows with equally many CPUs.
        """
        if self.request.minimize != "Time" or self.options[0].pool.is_gpu:
            return np.full(len(order), 1 + tolerance)
        return equally_good(self.counts[order] @ self._devices, self.counts[order].sum(axis=1), 0)

    def collectives_of(self, rows: Sequence[NDArray[np.int64]]) -> list[CollectiveName]:
        """Return, for each row (candidate), the collective with the fastest step by the approximate evaluation."""
        return self.screen.screen(np.stack(rows)).collective if rows else []


def _powers_about(ranks: int) -> tuple[int, int]:
    """Return (largest power of two up to ``ranks``, smallest power of two above ``ranks``)."""
    return 1 << max(ranks.bit_length() - 1, 0), 1 << ranks.bit_length()


def _numbered(labels: Sequence[str]) -> list[int]:
    """Return a number for each label: equal labels get equal numbers, counted from 0 in order of first appearance."""
    distinct = list(dict.fromkeys(labels))
    return [distinct.index(label) for label in labels]


def _first(keys: NDArray[Any]) -> NDArray[np.intp]:
    """Return the indices, in rising order, at which each distinct key occurs first."""
    return np.sort(np.unique(keys, return_index=True)[1])
