"""Search for data-parallel plans: each rank holds the whole model, or shares the optimizer's state with the others.

There is a search for each kind of device, precision, strategy and use of activation checkpointing. It evaluates
combinations of options approximately, and the most promising ones of them exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from dlcontract import SERVERS
from dljob.calibrate.learned import Learned
from dljob.perf.step.input_data import Stored
from dljob.perf.workload.workload import Workload, in_precision
from dljob.planner.candidates import precision, recomputation
from dljob.planner.candidates.accumulation import accumulated
from dljob.planner.candidates.collectives import HALVES, summing
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout, layouts
from dljob.planner.candidates.options import Option, options, sharing_options
from dljob.planner.candidates.pools import KINDS, Eligible, Pool
from dljob.planner.candidates.request_workload import stored_of
from dljob.planner.candidates.shard_space import largest_share
from dljob.planner.explanation.explain import memory_refusals
from dljob.planner.search import objective
from dljob.planner.search.enumeration import Search
from dljob.planner.search.screen import Screen
from dljob.planner.types import Choice, CollectiveName, Refusal, Request, Strategy

EVALUATED_ROWS = 10
"""Number of best candidates that the planner evaluates exactly after an approximate search. It also evaluates the best
candidate of as many different sets of device types."""
HOPELESS = 1.1
"""Factor on the best approximate score so far, above which a candidate on GPUs cannot win: approximate times are wrong
by a few per cent, and plans within ``objective.INDISTINCT`` of the best one tie with it."""

Constants = Mapping[tuple[str, str], Learned]
"""(Name of the measured model or training script, device type) → measured constants."""
Found = tuple[list[Part], Choice | Refusal]
Made = dict[tuple[str, bool, Layout, Stored | None, str, bool], list[Option]]


def strategies(request: Request) -> tuple[Strategy, ...]:
    """Return the data-parallel strategies to consider: Data, or Optimizer (with a sharded optimizer), or both.

    If the user requests Optimizer, return only Optimizer. If the user requests Auto, return both, unless the user fixes
    a collective that cannot be used with a sharded optimizer. Otherwise, return only Data.
    """
    if request.strategy == "Auto":
        return ("Data", "Optimizer") if request.collective in (None, *HALVES) else ("Data",)
    return ("Optimizer",) if request.strategy == "Optimizer" else ("Data",)


def collectives(request: Request, parts: Sequence[Part]) -> tuple[CollectiveName, ...]:
    """Return the all-reduce algorithms to consider for a plan: the user's choice, or all that are useful for its ranks.

    ``parts``: the groups of nodes of the plan, with their ranks.
    """
    if request.collective:
        return (request.collective,)
    names, ranks = summing(parts[0].option), sum(p.ranks for p in parts)
    if request.bound_ranks is not None:
        names = tuple(n for n in names if n != "ParameterServer")
    if ranks == 1:
        return names[:1]  # one rank has no gradients to reduce, so any name will do
    if ranks == 2:  # one worker needs no server, and halving-doubling between two ranks is a ring
        return tuple(n for n in names if n not in ("ParameterServer", "HalvingDoubling"))
    return names


def candidates(
    request: Request, nodes: Eligible, workload: Workload, learned: Constants, made: Made
) -> tuple[list[Found], list[Refusal]]:
    """Return the most promising data-parallel candidates, evaluated exactly, and the rejected devices with reasons.

    ``nodes``: the nodes that the job may use. ``made``: cache of options (ways to use a type of device). A job never
    mixes GPUs and CPUs, or GPUs of two vendors (``Pool.kind``).
    """
    found: list[Found] = []
    refusals = [*nodes.refusals, *precision.refusals(request, nodes.pools)]
    searches = [
        (
            able,
            typed,
            strategy,
            typed is variants[-1] and strategy == strategies(request)[-1],
            any(pool.is_gpu for pool in able) and (i > 0 or typed is not variants[0]),
        )
        for kind in KINDS
        for i, (each, able) in enumerate(
            precision.searched(request, [pool for pool in nodes.pools if pool.kind == kind], learned)
        )
        for variants in [recomputation.variants(request, in_precision(workload, each))]
        for typed, strategy in product(variants, strategies(request))
    ]
    smallest: list[tuple[list[Option], Workload]] = []
    known = _Known(request)
    plain: dict[tuple[tuple[str, ...], str, Strategy], tuple[Search, list[Part]]] = {}
    for pools, typed, strategy, needs_least, is_later in searches:
        place = tuple(pool.device for pool in pools), typed.precision, strategy
        if typed.recomputes and place in plain:
            search, parts = plain[place]
            least_s = float(search.scores.min())
            if recomputation.cannot_pay(request, search.screen.workload, search.options, learned, least_s):
                found += _again(request, parts, typed, learned, made)
                continue
        is_gpu = any(pool.is_gpu for pool in pools)
        most = sum(sum(pool.free) if is_gpu else pool.nodes * layouts(pool, request)[-1].ranks for pool in pools)
        ways = [
            _accumulated(option, request)
            for pool in pools
            for g in layouts(pool, request)
            for whole in [options_of(pool, g, typed, request, learned, made)]
            for option in (
                sharing_options(whole, g, typed, request, learned, most) if strategy == "Optimizer" else whole
            )
        ]
        if needs_least:  # of memory
            smallest.append((ways, typed))
        fitting = [o for o in ways if largest_share(o, request.global_batch, request.storage) >= 1]
        ways, fit_all = fitting, len(fitting) == len(ways)
        if not ways:
            continue
        search = Search(ways, request, Screen(ways, request, typed))
        search.run()
        promising = known.promising(search) if is_later else _best(search)
        for at in promising:
            parts = ordered([Part(ways[option], n) for option, n in search.rows.pairs(at)])
            if fit_all:
                plain.setdefault(place, (search, parts))
            # On the best row, evaluate all collectives to show how they compare. On the others, evaluate the best one.
            names = collectives(request, parts) if at == promising[0] else (search.collective_of(at),)
            tried = [_with_best_server(request, parts, name, typed) for name in names]
            found += tried
            known.add(search, at, [choice for _, choice in tried if isinstance(choice, Choice)])
    return found, refusals + memory_refusals(smallest, request)


def _again(request: Request, parts: Sequence[Part], workload: Workload, learned: Constants, made: Made) -> list[Found]:
    """Return a plan, the best one without activation checkpointing, with it. It is slower, and shown for comparison.

    ``parts``: its groups of nodes, the fastest first. ``workload``: with activation checkpointing.
    """
    found = []
    for part in parts:
        o = part.option
        same = [
            each
            for layout in layouts(o.pool, request)
            if layout.ranks == o.ranks_per_node and (o.pool.is_gpu or layout.cores == o.cores)
            for each in options_of(o.pool, layout, workload, request, learned, made)
            if (each.nodes, each.min_nodes, each.machine_nodes) == (o.nodes, o.min_nodes, o.machine_nodes)
        ]
        if not same:
            return []
        found.append(Part(_accumulated(replace(same[0], strategy=o.strategy), request), part.nodes))
    parts = ordered(found)
    return [_with_best_server(request, parts, collectives(request, parts)[0], workload)]


def _best(search: Search) -> list[int]:
    """Return the indices of the candidates of a search to evaluate exactly, the best one first."""
    return list(dict.fromkeys([*search.best(EVALUATED_ROWS, objective.INDISTINCT), *search.trade_offs()]))


class _Known:
    """The candidates that were evaluated exactly so far, with their approximate evaluations.

    A search on GPUs for another precision, or with activation checkpointing, need not evaluate candidates that cannot
    win. On CPUs, plans that are much slower can win, because they use fewer cores (``objective.without_idle_cpus``).
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._lowest = inf
        self._by_devices: dict[frozenset[str], list[tuple[float, float, float]]] = {}

    def promising(self, search: Search) -> list[int]:
        """Return the indices of the candidates of ``search`` to evaluate exactly, the best one first.

        A candidate is left out if its score is more than ``HOPELESS`` times the lowest known one, and if a known
        candidate on the same types of device is not worse in time, energy and cost. The best one always counts.
        """
        found = _best(search)
        return [at for at in found if at == found[0] or not self._is_hopeless(search, at)]

    def add(self, search: Search, at: int, choices: Sequence[Choice]) -> None:
        """Add a candidate that was evaluated exactly. ``choices``: the plans with it that fit into memory."""
        if not choices:
            return
        self._by_devices.setdefault(self._devices(search, at), []).append(self._figures(search, at))
        score = float(search.scores[at])
        if score >= objective.LATE or any(objective.meets(self._request, c.prediction.total_p90_s) for c in choices):
            self._lowest = min(self._lowest, score)

    def _is_hopeless(self, search: Search, at: int) -> bool:
        if search.scores[at] <= HOPELESS * self._lowest:
            return False
        own = self._figures(search, at)
        others = self._by_devices.get(self._devices(search, at), ())
        return any(all(a <= b for a, b in zip(other, own, strict=True)) for other in others)

    @staticmethod
    def _devices(search: Search, at: int) -> frozenset[str]:
        return frozenset(search.options[option].label for option, _ in search.rows.pairs(at))

    @staticmethod
    def _figures(search: Search, at: int) -> tuple[float, float, float]:
        return float(search.found.step_s[at]), float(search.found.energy_J[at]), float(search.found.usd[at])


def _with_best_server(request: Request, parts: list[Part], name: CollectiveName, workload: Workload) -> Found:
    """Return the plan with these groups of nodes. If it has a parameter server, the best group has this rank.

    ``parts``: the fastest group first. The last rank is the server, or the first one with LayeredServer. A fast server
    may save more time than a fast worker.
    """
    tried = [(parts, evaluate(parts, name, request, workload))]
    if name in SERVERS:
        for part in parts:
            others = [other for other in parts if other is not part]
            order = [part, *others] if name == "LayeredServer" else [*others, part]
            if order != parts:
                tried.append((order, evaluate(order, name, request, workload)))
    choices = [choice for _, choice in tried if isinstance(choice, Choice)]
    best = min(choices, key=lambda c: objective.score(request, c.prediction), default=tried[0][1])
    return next(each for each in tried if each[1] is best)


def with_best_cores(request: Request, groups: Sequence[list[Part]], workload: Workload) -> list[Found]:
    """Return the plans with groups that the user fixes, with the numbers of cores for which the best of them is best.

    They differ in the collective. ``groups``: the same groups with different numbers of cores, the most first. If none
    fits into memory, return those with the fewest cores, which need the least.
    """
    tried: list[list[Found]] = []
    for each in groups:
        parts = [replace(part, option=_accumulated(part.option, request)) for part in each]
        tried.append([(parts, evaluate(parts, name, request, workload)) for name in collectives(request, parts)])
    choices = [choice for found in tried for _, choice in found if isinstance(choice, Choice)]
    if not choices:
        return tried[-1]
    best = objective.best(request, choices)
    return next(found for found in tried if any(choice is best for _, choice in found))


def _accumulated(option: Option, request: Request) -> Option:
    asked = None if request.chooses_micro_batches else min(request.micro_batches, request.global_batch)
    return accumulated(option, asked, request.global_batch)


def options_of(
    pool: Pool, layout: Layout, workload: Workload, request: Request, learned: Constants, made: Made
) -> list[Option]:
    """Return the options to use a pool with a layout of ranks and cores, from the cache ``made`` if possible.

    Options depend on the global batch size only through the data that the job reads from disk.
    """
    key = (pool.device, pool.is_gpu, layout, stored_of(request), workload.precision, workload.recomputes)
    if key not in made:
        made[key] = options(pool, layout, workload, request, learned)
    return made[key]


def ordered(parts: Sequence[Part]) -> list[Part]:
    """Return the parts (groups of nodes of a plan) with the fastest ranks first, so that rank 0 is on a fast node."""
    return sorted(parts, key=lambda p: (p.option.curve.slope_s, p.option.label))
