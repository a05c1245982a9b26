"""Which node counts to look at, and which of them are best by the screen.

Small clusters are searched completely. On large ones: every device alone over a grid of counts, pairs over a coarser
grid, every subset of devices at several sizes, then steps to neighbours from the best ones until none is better.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dljob.planner.candidates.options import Option
from dljob.planner.search.objective import scores
from dljob.planner.search.pareto import MAX_SHOWN, promising
from dljob.planner.search.screen import Counts, Screen, Screened
from dljob.planner.types import CollectiveName, Request

COMPLETE = 4000
"""So many combinations are all looked at."""
ROUNDS = 12
"""Steps to neighbours, at most."""
SEEDS = 6
"""Best ones whose neighbours are looked at in each round."""


def grid(most: int, fine: bool = True) -> list[int]:
    """Counts up to ``most`` that grow geometrically: 1, 2, 3, 4, 6, 8, 12, … and ``most``."""
    counts, n = {most}, 1
    while n <= most:
        counts |= {n, min(most, 3 * n // 2)} if fine and n > 1 else {n}
        n *= 2
    return sorted(counts)


class Search:
    """Rows of node counts over options, at most one option of each device, within the request's bounds."""

    def __init__(self, options: Sequence[Option], request: Request, screen: Screen) -> None:
        self.options, self.request, self.screen = options, request, screen
        self._most = np.array([o.nodes for o in options], dtype=np.int64)
        self._per_node = np.array([o.ranks_per_node for o in options], dtype=np.int64)
        self._device = np.array(_numbered([o.label for o in options]))
        # Rows are told apart by a random number of 64 bits for each: a thousand times faster than comparing them.
        self._hashing = np.random.default_rng(0).integers(-(2**62), 2**62, len(options), dtype=np.int64) | 1
        self._seen = np.zeros(0, dtype=np.int64)
        self.counts: Counts = np.zeros((0, len(options)), dtype=np.int64)
        self.found: Screened = screen.screen(self.counts)
        self.scores: NDArray[np.float64] = np.zeros(0)

    def run(self) -> None:
        """Look at what is worth looking at; the results are in ``counts``, ``found`` and ``scores``."""
        by_device = [np.flatnonzero(self._device == d) for d in range(self._device.max() + 1)]
        size = 1
        for members in by_device:
            size *= 1 + int(self._most[members].sum())
        if size <= COMPLETE:
            self._look(self._complete(by_device))
            return
        self._look(self._row({i: n}) for i in range(len(self.options)) for n in self._grid(i))
        best = [int(members[self._best_alone(members)]) for members in by_device]
        self._look(self._mixes(best))
        for _ in range(ROUNDS):
            before = self.scores.min(initial=np.inf)
            top = np.argsort(self.scores, kind="stable")[:SEEDS]
            self._look(row for i in top for row in self._neighbours(self.counts[i], by_device))
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

    def _complete(self, by_device: list[NDArray[np.intp]]) -> Iterator[NDArray[np.int64]]:
        choices = [
            [None, *((i, n) for i in members for n in range(1, int(self._most[i]) + 1))] for members in by_device
        ]
        for picks in product(*choices):
            yield self._row({int(p[0]): p[1] for p in picks if p is not None})

    def _best_alone(self, members: NDArray[np.intp]) -> int:
        """Of a device's options, the one with the best score by itself; else the one with most ranks."""
        alone = (self.counts > 0).sum(axis=1) == 1
        best = [self.scores[alone & (self.counts[:, i] > 0)].min(initial=np.inf) for i in members]
        if np.isfinite(best).any():
            return int(np.argmin(best))
        return int(np.argmax([self.options[i].nodes * self.options[i].ranks_per_node for i in members]))

    def _mixes(self, best: list[int]) -> Iterator[NDArray[np.int64]]:
        for i, j in combinations(best, 2):
            for n, m in product(self._grid(i, fine=False), self._grid(j, fine=False)):
                yield self._row({i: n, j: m})
        fastest = sorted(best, key=lambda i: self.options[i].curve.slope_s)[:8]
        for size in range(2, len(fastest) + 1):
            for subset in combinations(fastest, size):
                total = int(sum(self._most[i] for i in subset))
                bounds = {self.request.nodes_min, self.request.nodes_max or total}
                for nodes in {*(total >> k for k in range(12)), *bounds}:
                    yield self._row(
                        {i: min(int(self._most[i]), -(-int(self._most[i]) * nodes // total)) for i in subset}
                    )

    def _neighbours(self, row: NDArray[np.int64], by_device: list[NDArray[np.intp]]) -> Iterator[NDArray[np.int64]]:
        """Rows with another count of one device: a few more or less, or so many that ranks are a power of two.

        The latter since halving and doubling is fast there and nowhere between, where no small step finds it.
        """
        ranks = int(row @ self._per_node)
        powers = {1 << max(ranks.bit_length() - 1, 0), 1 << ranks.bit_length()}
        for members in by_device:
            held = next((int(i) for i in members if row[i]), None)
            n = int(row[held]) if held is not None else 0
            others = ranks - (n * int(self._per_node[held]) if held is not None else 0)
            steps = {0, 1, n - 1, n + 1, n // 2, 2 * n, n + max(1, n // 8), n - max(1, n // 8), 10**9}
            for i in [int(i) for i in members]:
                for count in steps | {(power - others) // int(self._per_node[i]) for power in powers}:
                    new = row.copy()
                    new[members] = 0
                    new[i] = min(max(count, 0), int(self._most[i]))
                    yield new

    def _look(self, rows: Iterator[NDArray[np.int64]]) -> None:
        """Screen the rows that are within bounds and were not looked at yet."""
        listed = list(rows)
        if not listed:
            return
        counts = np.stack(listed)
        nodes = counts.sum(axis=1)
        most = self.request.nodes_max or int(self._most.sum())
        counts = counts[(nodes >= max(1, self.request.nodes_min)) & (nodes <= most)]
        keys, first = np.unique(counts @ self._hashing, return_index=True)
        fresh = counts[np.sort(first[~np.isin(keys, self._seen)])]
        if not len(fresh):
            return
        self._seen = np.concatenate([self._seen, keys])
        seen = self.screen.screen(fresh)
        self.counts = np.concatenate([self.counts, fresh])
        self.scores = np.concatenate([self.scores, scores(self.request, seen)])
        self.found = self.found.joined(seen)

    def best(self, count: int, alike: float) -> list[NDArray[np.int64]]:
        """Feasible rows, best first: the ``count`` best; of those within ``alike`` of the best, the one with fewest
        ranks; the best of each of ``count`` sets of devices; smaller and larger ones of the best set; trade-offs."""
        order = np.argsort(self.scores, kind="stable")
        order = order[np.isfinite(self.scores[order])]
        if not len(order):
            return []
        picked = dict.fromkeys(order[:count].tolist())
        near = order[self.scores[order] <= self.scores[order[0]] * (1 + alike)]
        picked[int(near[np.argmin(self.counts[near] @ self._per_node)])] = None
        kinds = (self.counts[order] > 0) @ self._hashing
        best = order[kinds == kinds[0]]
        sizes = np.frexp(self.counts[best].sum(axis=1))[1]  # to the power of two below
        picked |= dict.fromkeys([*order[_first(kinds)][:count].tolist(), *best[_first(sizes)][:count].tolist()])
        picked |= dict.fromkeys(promising(self.found, MAX_SHOWN).tolist())
        return [self.counts[i] for i in picked]

    def collectives_of(self, rows: Sequence[NDArray[np.int64]]) -> list[CollectiveName]:
        """The collective that the screen found best for each of the rows."""
        return self.screen.screen(np.stack(rows)).collective if rows else []


def _numbered(labels: Sequence[str]) -> list[int]:
    """Each label's index among the distinct ones, in order of first appearance."""
    distinct = list(dict.fromkeys(labels))
    return [distinct.index(label) for label in labels]


def _first(keys: NDArray[Any]) -> NDArray[np.intp]:
    """Where each of the distinct keys stands first, in that order."""
    return np.sort(np.unique(keys, return_index=True)[1])
