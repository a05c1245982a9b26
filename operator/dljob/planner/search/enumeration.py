"""Search over the numbers of nodes of each type of device. ``Screen`` evaluates the candidates.

The search of a small cluster is complete. On a large cluster, the search evaluates every type of device alone over a
grid of numbers of nodes, pairs of types over a coarser grid, every subset of the fastest types at several sizes and at
every power of two ranks, and mixes that have exactly the least or the largest number of nodes that the request allows.
A local search then starts from the best candidates and ends when no neighbour is better.
"""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dljob.cluster.catalogue import vendor
from dljob.planner.candidates.options import Option
from dljob.planner.search.objective import meets_all, scores, without_idle_cpus
from dljob.planner.search.pareto import MAX_SHOWN, promising
from dljob.planner.search.rows import Integers, Rows, joined
from dljob.planner.search.screen import NOTHING, Screen, Screened
from dljob.planner.search.screen import joined as joined_predictions
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
    """Search over candidate plans, which are rows of arrays (``Rows``)."""

    def __init__(self, options: Sequence[Option], request: Request, screen: Screen) -> None:
        self.options, self.request, self.screen, self._types = options, request, screen, screen.types
        self._most = np.array([o.nodes for o in options], dtype=np.int64)
        self._least = np.array([o.min_nodes for o in options], dtype=np.int64)
        self._per_node = np.array([o.ranks_per_node for o in options], dtype=np.int64)
        self._gpu_limits = [
            (np.array([o.ranks_per_node if o.pool.is_gpu and vendor(o.label) == name else 0 for o in options]), most)
            for name, most in request.gpus_max.items()
        ]
        self._devices = np.array([o.ranks_per_node * (1 if o.pool.is_gpu else max(1.0, o.cores)) for o in options])
        self._cpus = np.array([charged_cpus(o, request) for o in options])
        # Rows are identified by a random 64-bit hash, which is a thousand times faster than comparing them.
        self._hashing = np.random.default_rng(0).integers(-(2**62), 2**62, len(options), dtype=np.int64) | 1
        self._seen = np.array([np.iinfo(np.int64).max])  # in rising order, with an end that is no row's hash
        self.rows: Rows = self._types.empty(0)
        self.found: Screened = NOTHING
        self.scores: NDArray[np.float64] = np.zeros(0)

    def run(self) -> None:
        """Run the search. Store the rows in ``rows``, their predictions in ``found``, their scores in ``scores``."""
        size = 1
        for members in self._types.members:
            size *= 1 + int(self._most[members].sum())
        if size <= COMPLETE:
            self._look(self._complete())
            return
        self._look(self._types.rows([{i: n} for i in range(len(self.options)) for n in self._grid(i)]))
        if self.request.bound_ranks is not None:
            self._look(self._types.rows(self._with_ranks(self.request.bound_ranks)))
        best = [int(members[self._best_alone(members)]) for members in self._types.members]
        fewest = [int(members[self._per_node[members].argmin()]) for members in self._types.members]
        self._look(joined([*self._mixes(best), self._at_bounds(fewest)]))
        done = set[int]()
        for _ in range(ROUNDS):
            before = self.scores.min(initial=np.inf)
            top = [i for i in np.argsort(self.scores, kind="stable")[:SEEDS].tolist() if i not in done]
            if not top:
                break
            self._look(joined([rows for i in top for rows in self._neighbours(i, best)]))
            done.update(top)
            if not self.scores.min(initial=np.inf) < before:
                break

    def _grid(self, option: int, fine: bool = True) -> list[int]:
        most = min(int(self._most[option]), self.request.nodes_max or int(self._most[option]))
        bound = min(most, max(1, self.request.nodes_min))
        return sorted({*grid(most, fine), bound})

    def _with_ranks(self, ranks: int) -> list[dict[int, int]]:
        """Return rows (option → nodes) with exactly this number of ranks, on one or two types of device."""
        found = []
        for i, j in product(range(len(self.options)), repeat=2):
            if i == j or self._types.of_option[i] != self._types.of_option[j]:
                for n in [0] if i == j else self._grid(i, fine=False):
                    rest, uneven = divmod(ranks - n * int(self._per_node[i]), int(self._per_node[j]))
                    if not uneven and 0 < rest <= self._most[j]:
                        found.append({j: rest} if i == j else {i: n, j: rest})
        return found

    def _complete(self) -> Rows:
        """Return all combinations of node counts, with at most one option of each device type."""
        ways = [
            [(int(members[0]), 0), *((int(i), n) for i in members for n in range(1, int(self._most[i]) + 1))]
            for members in self._types.members
        ]
        at = np.indices([len(each) for each in ways]).reshape(len(ways), -1)
        pairs = [np.array(each, dtype=np.int64)[picked].T for each, picked in zip(ways, at, strict=True)]
        return Rows(*(np.stack([pair[i] for pair in pairs]) for i in (0, 1)))

    def _best_alone(self, members: NDArray[np.intp]) -> int:
        """Return the index in ``members`` of the option that has the best score in a candidate without other options.

        ``members``: the options of one type of device. If no option is feasible alone, return the index of the option
        with the most ranks.
        """
        number = self._types.of_option[members[0]]
        alone = self.rows.used[number] & (self.rows.used.sum(axis=0) == 1)
        option, scores = self.rows.option[number, alone], self.scores[alone]
        best = [scores[option == i].min(initial=np.inf) for i in members]
        if np.isfinite(best).any():
            return int(np.argmin(best))
        return int(np.argmax([self.options[i].nodes * self.options[i].ranks_per_node for i in members]))

    def _mixes(self, best: list[int]) -> list[Rows]:
        grids = {i: self._grid(i, fine=False) for i in best}
        pairs = [{i: n, j: m} for i, j in combinations(best, 2) for n in grids[i] for m in grids[j]]
        fastest = sorted(best, key=lambda i: self.options[i].curve.slope_s)[:8]
        subsets = [s for size in range(2, len(fastest) + 1) for s in combinations(fastest, size)]
        if not subsets:
            return [self._types.rows(pairs)]
        most = self._types.rows([{i: int(self._most[i]) for i in subset} for subset in subsets])
        return [self._types.rows(pairs), self._scaled(most), self._filled(most, fastest), self._at_bounds(best)]

    def _bounds(self) -> tuple[int, int]:
        """Return the least and the largest number of nodes that the request allows."""
        return max(1, self.request.nodes_min), self.request.nodes_max or int(self._most.sum())

    def _at_bounds(self, best: Sequence[int]) -> Rows:
        """Return rows with exactly as many nodes as a bound of the request.

        Each row uses the nodes of one type first, and then those of the others, the fastest first. ``best``: an option
        of each device type.
        """
        fastest = sorted(best, key=lambda i: self.options[i].curve.slope_s / self._per_node[i])
        rows = []
        for nodes in dict.fromkeys(self._bounds()):
            for first in fastest:
                left, row = nodes, dict[int, int]()
                for i in (first, *(other for other in fastest if other != first)):
                    row[i] = min(left, int(self._most[i]))
                    left -= row[i]
                if not left:
                    rows.append(row)
        return self._types.rows(rows)

    def _scaled(self, most: Rows) -> Rows:
        """Return each row of ``most`` scaled down to several total numbers of nodes.

        A row of ``most`` has all nodes of some device types. A scaled row has nearly the same fraction of the nodes of
        every device type.
        """
        total = most.total_nodes[:, None]
        bounds = [np.full_like(total, self.request.nodes_min), np.minimum(total, self.request.nodes_max or total)]
        nodes = np.concatenate([total >> np.arange(12), *bounds], axis=1)
        scaled = -(-most.nodes[:, :, None] * nodes // total)
        return _repeated(most, np.minimum(most.nodes[:, :, None], scaled))

    def _filled(self, most: Rows, fastest: Sequence[int]) -> Rows:
        """Return, for each row of ``most``, rows that have 2, 4, 8, ... ranks and use the fastest devices first.

        A row of ``most`` has all nodes of some device types. ``fastest``: the options, the fastest first.
        Halving-doubling is much faster at a power of two ranks, so changing the nodes of one device cannot improve such
        a row. Therefore the search has to start from the best mix of devices at each power of two.
        """
        order, per_node = self._types.of_option[fastest], self._per_node[fastest][:, None]
        ranks = most.nodes[order] * per_node
        before = np.cumsum(ranks, axis=0) - ranks
        largest = min(int(ranks.sum(axis=0).max()), self.request.global_batch)
        powers = 1 << np.arange(1, largest.bit_length())
        filled = np.clip(powers - before[:, :, None], 0, ranks[:, :, None]) // per_node[:, :, None]
        nodes = np.zeros((*most.nodes.shape, len(powers)), dtype=np.int64)
        nodes[order] = filled
        return _repeated(most, nodes)

    def _neighbours(self, at: int, best: list[int]) -> list[Rows]:
        """Return rows that differ from a row in the option or the number of nodes of one device type.

        ``at``: the index of the row. ``best``: the best option of each device type.

        The number of nodes changes slightly, changes much, or makes the total number of ranks a power of two or the
        number of the request. Small changes seldom reach a power of two, at which halving-doubling is fast. If the
        number of nodes is at a bound of the request, nodes of one device type are also replaced by as many of another
        one.
        """
        nodes = self.rows.nodes[:, at]
        held = np.where(nodes > 0, self.rows.option[:, at], best)
        ranks = int(nodes @ self._per_node[held])
        n, own = nodes[self._types.of_option], self._per_node[held][self._types.of_option]
        others = ranks - n * own
        small = np.maximum(1, n // 8)
        fixed = [n, np.zeros_like(n), np.ones_like(n), n - 1, n + 1, n // 2, 2 * n, n + small, n - small, self._most]
        sizes = [*_powers_about(ranks), self.request.bound_ranks or ranks]
        sized = [(size - others) // self._per_node for size in sizes]
        counts = np.clip(np.stack([*fixed, *sized], axis=1), 0, self._most[:, None])
        rows = Rows(*(np.repeat(values[:, None], counts.size, axis=1) for values in (held, nodes)))
        option = np.repeat(np.arange(len(n)), counts.shape[1])
        changed = self._types.of_option[option], np.arange(counts.size)
        rows.option[changed], rows.nodes[changed] = option, counts.ravel()
        return [rows, self._exchanged(held, nodes)] if nodes.sum() in self._bounds() else [rows]

    def _exchanged(self, held: Integers, nodes: Integers) -> Rows:
        """Return rows in which one, half or all nodes of one device type are nodes of another one.

        ``held``, ``nodes``: the option of each device type in a row, and its number of nodes.
        """
        give, take = (side.ravel() for side in np.meshgrid(*2 * [np.arange(len(held))], indexing="ij"))
        apart = (give != take) & (nodes[give] > 0)
        give, take = np.repeat(give[apart], 3), np.repeat(take[apart], 3)
        amounts = np.stack([np.ones_like(nodes), np.maximum(1, nodes // 2), nodes], axis=1)[give[::3]].ravel()
        moved = np.minimum(amounts, self._most[held[take]] - nodes[take])
        rows = Rows(*(np.repeat(values[:, None], len(give), axis=1) for values in (held, nodes)))
        rows.nodes[give, np.arange(len(give))] -= moved
        rows.nodes[take, np.arange(len(give))] += moved
        return rows

    def _look(self, rows: Rows) -> None:
        """Predict and score the rows that are within the request's bounds and were not evaluated before.

        Append them to ``rows``, their predictions to ``found``, and their scores to ``scores``.
        """
        most = self.request.nodes_max or int(self._most.sum())
        possible = (rows.total_nodes >= max(1, self.request.nodes_min)) & (rows.total_nodes <= most)
        if (self._least > 1).any():
            possible &= (rows.nodes >= rows.of(self._least, 0)).all(axis=0)
        for per_node, gpus in self._gpu_limits:
            possible &= rows.summed(per_node) <= gpus
        if self.request.cpus_max is not None:
            possible &= rows.summed(self._cpus) <= self.request.cpus_max
        if self.request.refused_ranks:
            possible &= ~np.isin(rows.summed(self._per_node), sorted(self.request.refused_ranks))
        if self.request.bound_ranks is not None:
            possible &= rows.summed(self._per_node) == self.request.bound_ranks
        rows = rows if possible.all() else rows[possible]
        keys, first = np.unique(rows.summed(self._hashing), return_index=True)
        before = np.searchsorted(self._seen, keys)
        is_fresh = self._seen[before] != keys
        fresh = rows[np.sort(first[is_fresh])]
        if not len(fresh):
            return
        self._seen = np.insert(self._seen, before[is_fresh], keys[is_fresh])
        seen = self.screen.screen(fresh)
        self.rows = joined([self.rows, fresh])
        self.scores = np.concatenate([self.scores, scores(self.request, seen)])
        self.found = joined_predictions([self.found, seen])

    def best(self, count: int, tolerance: float) -> list[int]:
        """Return the feasible rows (candidates) to evaluate exactly: first the ``count`` best rows, then others.

        The others are the row with the fewest GPUs or CPUs among those within the relative ``tolerance`` of the best
        score that meet the deadline (of all of them, if none meets it), on CPUs the row that replaces it if more CPUs
        save too little time, the best row of each of ``count`` sets of devices, and rows with the best set of devices
        but other numbers of nodes.
        """
        order = np.argsort(self.scores, kind="stable")
        order = order[np.isfinite(self.scores[order])]
        if not len(order):
            return []
        picked = dict.fromkeys(order[:count].tolist())
        able = order[meets_all(self.request, self.found.step_p90_s[order])]
        near = able[self.scores[able] <= self.scores[order[0]] * (1 + tolerance)]
        if not len(near):
            able, near = order, order[self.scores[order] <= self.scores[order[0]] * (1 + tolerance)]
        start = int(np.argmin(self.rows[near].summed(self._devices)))
        picked[int(near[start])] = None
        if self.request.minimize == "Time" and not self.options[0].pool.is_gpu:
            rows, at = self.rows[able], int(np.flatnonzero(able == near[start])[0])
            cpus = rows.summed(self._devices)
            picked[int(able[without_idle_cpus(self.scores[able], cpus, rows.total_nodes, at)])] = None
        ordered = self.rows[order]
        kinds = np.where(ordered.used, self._hashing[ordered.option], 0).sum(axis=0)
        best = order[kinds == kinds[0]]
        sizes = np.frexp(self.rows.total_nodes[best])[1]  # log2 of the number of nodes, rounded
        picked |= dict.fromkeys([*order[_first(kinds)][:count].tolist(), *best[_first(sizes)][:count].tolist()])
        return list(picked)

    def trade_offs(self) -> list[int]:
        """Return feasible rows (candidates) that are promising trade-offs between time, energy and cost."""
        found: list[int] = promising(self.found, MAX_SHOWN).tolist()
        return found

    def collective_of(self, at: int) -> CollectiveName:
        """Return the collective of the row ``at`` with the fastest step by the approximate evaluation."""
        return self.screen.collectives[int(self.found.collective[at])]


def _repeated(rows: Rows, nodes: Integers) -> Rows:
    """Return several candidates with the options of each row. ``nodes``: shape (types of device, rows, candidates)."""
    option = np.repeat(rows.option, nodes.shape[2], axis=1)
    return Rows(option, nodes.reshape(len(nodes), -1))


def _powers_about(ranks: int) -> tuple[int, int]:
    """Return (largest power of two up to ``ranks``, smallest power of two above ``ranks``)."""
    return 1 << max(ranks.bit_length() - 1, 0), 1 << ranks.bit_length()


def _first(keys: NDArray[Any]) -> NDArray[np.intp]:
    """Return the indices, in rising order, at which each distinct key occurs first."""
    return np.sort(np.unique(keys, return_index=True)[1])
