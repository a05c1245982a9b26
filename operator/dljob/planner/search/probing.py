"""Suggest the next run to measure: the one that most reduces the uncertainty of this job's predictions."""

from dataclasses import replace
from math import ceil

import numpy as np

from dljob.calibrate.probes import MAX_PROBES, information, next_probe
from dljob.calibrate.scaling import Posterior, fit
from dljob.perf.fit.scaling import Runs
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.node_layout import ranks_per_node_choices
from dljob.planner.candidates.options import Option
from dljob.planner.search.enumeration import grid
from dljob.planner.types import Request
from dljob.planner.types.texts import samples


def suggested(request: Request, option: Option, workload: Workload) -> str | None:
    """Return a text that suggests a run to measure, such as '2 x t4 (4 ranks each), 16 samples per rank: reduces ...'.

    Consider all placements on the option's type of device within the job's bounds, with equal local batch sizes. Return
    None if there are fewer than two placements, if ``MAX_PROBES`` multi-device steps were measured, or if all
    placements were measured.
    """
    learned = option.learned.steps if option.learned else ()
    known = [s for s in learned if s.place.sharded == (option.strategy == "Optimizer")]
    places = _places(request, option, workload)
    if len(known) >= MAX_PROBES or len(places) < 2:
        return None
    runs = _runs(places, request, option)
    seen = {(s.place.nodes, s.place.node_devices) for s in known}
    measured = [i for i, place in enumerate(places) if place in seen]
    found = option.steps or _prior(option, request)
    at = next_probe(found, runs, measured)
    if at is None:
        return None
    nodes, each = places[at]
    where = f"{nodes} x {option.label}" + (f" ({each} ranks each)" if each > 1 else "")
    share = _share(request, nodes * each)
    less = information(found, runs)[at]
    return f"{where}, {samples(share)} per rank: reduces the variance of predicted step times by {100 * less:.0f} %"


def _places(request: Request, option: Option, workload: Workload) -> list[tuple[int, int]]:
    """Return (nodes, ranks per node) of the runs to consider, which have at least two ranks.

    Each is within the job's bounds on nodes, and its ranks can hold equal parts of the global batch in memory.
    """
    found = []
    for each in ranks_per_node_choices(option.pool) if option.pool.is_gpu else [option.ranks_per_node]:
        able = sum(free >= each for free in option.pool.free) if option.pool.is_gpu else option.nodes
        most = min(able, request.nodes_max or able)
        for nodes in grid(most) if most else []:
            ranks = nodes * each
            if not 2 <= ranks <= request.global_batch or nodes < request.nodes_min:
                continue
            share, pods = _share(request, ranks), replace(option, ranks_per_node=each)
            if share <= option.largest_batch and pods.pod_nbytes(workload, share) <= option.host_nbytes:
                found.append((nodes, each))
    return found


def _share(request: Request, ranks: int) -> int:
    return ceil(request.global_batch / ranks)


def _alone_s(option: Option, share: int) -> float:
    return option.computing.seconds(share) * option.ratio.at(share / option.micro_batches) / option.slowdown


def _runs(places: list[tuple[int, int]], request: Request, option: Option) -> Runs:
    rows = [(n, k, n * k, share := _share(request, n * k), _alone_s(option, share)) for n, k in places]
    return Runs(*np.array(rows, dtype=float).T)


def _prior(option: Option, request: Request) -> Posterior:
    """Return the distribution of step times that is assumed for a device type without measured multi-device steps."""
    nothing = Runs(*np.zeros((5, 0)))
    return fit(_alone_s(option, ceil(request.global_batch / 2)), nothing, np.zeros(0))
