"""The options of jobs for an assignment: their plans on several numbers of devices of each GPU type."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf

from dljob.api import DLJobStatus
from dljob.cluster import ClusterView
from dljob.controller.planning.answers import plan_only, with_limits
from dljob.controller.planning.growing import usable_nodes
from dljob.controller.planning.queue.shadows import Ask
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import left_part, run_p90_s, slowdown
from dljob.kube import Cache, JobKey
from dljob.planner.candidates.pools import wanted
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.limits import quota_needs
from dljob.reconcile.planning.resize import MIN_STEPS
from dljob.scheduling import Charge, NamespaceLimits
from dljob.scheduling.assignment import Option
from dljob.scheduling.pace import MEASURED_P90
from dljob.scheduling.parts import device_parts

MAX_DEVICE_TYPES = 4
MAX_KNOWN = 512
"""Maximum number of requests (jobs with equal specs, on an equal cluster) whose options are stored."""
OPTIONS_S = 600.0
"""Seconds after which a job's options (plans on devices of one type) are made again: labels of nodes may change."""
Charges = tuple[tuple[Charge, int], ...]
"""Pairs of what an object charges to quotas, and the number of such objects."""
MAX_OF_LEAST = 1.1
"""Largest energy (or cost) of an option relative to the job's best option, if the job minimizes energy (or cost)."""


@dataclass(frozen=True, slots=True)
class Known:
    """The options of a job for its whole training. ``spread``: 90th percentile of their seconds / median.

    ``first_part``: part of the training that the first steps are, before which a job does not move. ``charges``: for
    each option, what its objects charge to quotas, as ``quota_needs`` returns it.
    """

    options: tuple[Option, ...]
    spread: float = 1.0
    first_part: float = 0.0
    charges: tuple[Charges, ...] = ()


class KnownOptions:
    """Asks the planner for the options of jobs, and stores them. Use it in one event loop only."""

    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._cache, self._clock = cache, clock
        self._known: OrderedDict[Hashable, tuple[float, NamespaceLimits, Known]] = OrderedDict()
        """For each request, the time when its options were made, the limits of the namespace then, and the options."""

    def clear(self) -> None:
        self._known.clear()

    async def of(self, key: JobKey, question: ParsedJob, whole: ClusterView, shape: Hashable, ask: Ask) -> Known:
        """Return the job's options (plans on different device types and numbers of devices) as if no other job ran.

        Nothing else uses the quotas of its namespace then. ``Option.seconds`` covers the whole training, not only the
        rest. ``whole``: the cluster as if all jobs had ended. ``shape``: its ``shape_of``. ``ask``: makes plans.
        """
        limits = self._cache.limits(key[0]).unused()
        request = (
            key[0], question.digest, bool(question.one_node_claim), tuple(sorted(question.observed.left_out)),
            question.memory_to_try, question.volumes, question.refused_ranks, question.bound_ranks,
            self._cache.profiles_version, shape, bool(limits.quotas and question.observed.claims),
        )  # fmt: skip
        known = self._known.get(request)
        if known is not None and self._clock() - known[0] < OPTIONS_S and known[1] == limits:
            self._known.move_to_end(request)
            return known[2]
        found = await _found(with_limits(question, limits), usable_nodes(question, whole), ask)
        self._known[request] = (self._clock(), limits, found)
        self._known.move_to_end(request)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return found


async def _found(question: ParsedJob, whole: ClusterView, ask: Ask) -> Known:
    """Ask the planner for plans on 1, 2, 4, … devices of each GPU type, and return them as options.

    Leave out an option that is not faster than a smaller one, or that takes more than ``MAX_OF_LEAST`` times the least
    energy (or cost), if the job minimizes it.
    """
    asked = replace(question, accepted=None, report=None)
    found: list[tuple[Option, float, float, Charges]] = []
    first_part = 0.0
    types = [name for name in whole.device_types if any(n.is_gpu for n in whole.nodes if n.device == name)]
    for device in types[:MAX_DEVICE_TYPES]:
        best_s = inf
        for count, per_node, view in device_parts([node for node in whole.nodes if node.device == device]):
            plan = await ask(asked, view)
            if not isinstance(plan, StoredPlan) or plan.new_nodes:
                continue
            predicted, sizes = plan.status.predicted, [(group.nodes, group.ranks_per_node) for group in plan.groups]
            # A plan that uses less than is free is usually that of a smaller size, but not if the spec allows 3 nodes.
            size = sizes[0] if len(sizes) == 1 else (count, per_node)
            used = sum(nodes * ranks for nodes, ranks in sizes)
            if used == size[0] * size[1] and 0 < predicted.total_seconds < best_s:
                best_s = predicted.total_seconds
                spread = (run_p90_s(predicted) or best_s) / best_s
                first_part = min(1.0, MIN_STEPS * predicted.step_seconds / best_s)
                charges = tuple(quota_needs(plan))
                found.append((Option(device, *size, best_s), _expense(question, plan), spread, charges))
    least = min((expense for _, expense, _, _ in found), default=0.0)
    kept = [each for each in found if each[1] <= MAX_OF_LEAST * least]
    spread = max((each[2] for each in kept), default=1.0)
    return Known(tuple(each[0] for each in kept), spread, first_part, tuple(each[3] for each in kept))


def left(known: Known, status: DLJobStatus, *, running: bool) -> tuple[Option, ...]:
    """Return the options of a job with the seconds of its remaining training instead of the whole training.

    A job slower than predicted is assumed to be as slow with each option. ``running``: True: count from the current
    step; False: from the last checkpoint.
    """
    factor = left_part(status, running=running) * slowdown(status)
    return tuple(replace(each, seconds=max(1e-3, each.seconds * factor)) for each in known.options)


def due_s(question: ParsedJob, spread: float, now: datetime, start_s: float, *, measured: bool) -> float | None:
    """Return the most predicted seconds with which a job meets its deadline by the 90th percentile; None: it has none.

    ``spread``: 90th percentile of the predicted time / median. ``start_s``: seconds until its first step. ``measured``:
    True if its steps have been measured.
    """
    due = question.spec.scheduling.finish_by if question.spec is not None else None
    if due is None:
        return None
    return ((due - now).total_seconds() - start_s) / (min(spread, MEASURED_P90) if measured else spread)


def _expense(question: ParsedJob, plan: StoredPlan) -> float:
    """Return the predicted energy (J), cost or carbon (g) of a plan, if the job minimizes it; otherwise 0."""
    assert question.spec is not None
    return plan.status.predicted.expense(question.spec.objective.minimize) or 0.0


def shape_of(view: ClusterView) -> Hashable:
    """Return a key for the shape of the cluster: how many nodes have which device type and number of free devices.

    Options are the same on clusters of the same shape."""
    return frozenset(Counter((node.device, node.free_devices, node.left_out is None) for node in view.nodes).items())


def has_part(question: ParsedJob) -> bool:
    """Return True if the job's plan will run, and the operator (not the user or Kueue) chooses its devices."""
    spec = question.spec
    return spec is not None and not question.queued and not plan_only(question) and not spec.planning.groups


def gpu_types(question: ParsedJob, view: ClusterView) -> list[str]:
    """Return the types of GPUs in ``view`` that the spec of a job allows. Without any, it takes no part."""
    spec = question.spec
    found = {node.device for node in view.nodes if node.is_gpu}
    return [name for name in sorted(found) if spec is not None and (not spec.devices or wanted(name, spec.devices))]
