"""The plans with which a waiting job could start: the best one on the whole cluster, and those on parts of it.

A job of which the number of nodes is not fixed starts as soon as there is room for any of its plans. A forecast that
knows only the plan on the whole cluster predicts waits that are several times too long.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dljob.api import DLJobStatus, Predicted
from dljob.cluster import ClusterView
from dljob.controller.planning.growing import usable_nodes
from dljob.controller.planning.queue.shadows import Ask
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import run_time
from dljob.job.reservation import PlannedPods, plan_reservation
from dljob.reconcile import ParsedJob
from dljob.scheduling import PossiblePlan
from dljob.scheduling.parts import device_parts

MAX_DEVICE_TYPES = 4
MAX_KNOWN = 512
"""Maximum number of questions (jobs to plan) whose plans are stored. Jobs with equal specs share them."""

KEPT_S = 600.0
"""Seconds for which the plans on parts of the cluster are used although the cluster or the profiles have changed.

Both may change every few seconds, and each waiting job has some twenty such plans. Only the plan on the whole cluster
is made again after each change.
"""


@dataclass(frozen=True)
class KnownPlan:
    """The parts of a plan that a forecast needs: the prediction and the pods. Jobs with the same spec share it."""

    predicted: Predicted
    pods: PlannedPods

    def of(self, spec: Mapping[str, Any], status: DLJobStatus) -> PossiblePlan:
        """Return this plan for one job: the remaining run time of the job, and what its pods need.

        ``spec``: of the job, as the API server stores it. ``status``: of the job, with what is left of its training.
        """
        return PossiblePlan(run_time(self.predicted, status), plan_reservation(self.pods, spec, {}))


@dataclass(frozen=True)
class _Answer:
    """The planner's answer for one part of the cluster.

    ``plan``: None: no plan is possible there. ``version``: version of the cluster and the profiles (see ``learn``).
    ``asked_s``: time when the planner was asked.
    """

    plan: KnownPlan | None
    version: Hashable
    asked_s: float


class PossiblePlans:
    """Asks the planner for the plans of waiting jobs, and stores them. Use it in one event loop only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, dict[Hashable, _Answer]] = OrderedDict()
        """For each question, the answers by part of the cluster."""

    async def learn(
        self, question: ParsedJob, whole: ClusterView, version: Hashable, ask: Ask, *, stop: Callable[[], bool]
    ) -> bool:
        """Ask the planner for those plans of a job that are not known yet. Return True if all are known then.

        ``whole``: the cluster as if all jobs had ended. ``version``: a value that changes with what plans depend on
        besides the question (cluster, profiles). When it has changed, the plan on the whole cluster is made again, and
        each plan on a part of the cluster that is older than ``KEPT_S`` seconds. ``stop``: called before each plan on a
        part. If it returns True, make no more plans and return False.
        """
        answers, now_s = self._of(question), self._clock()
        seen: set[Hashable] = {WHOLE}
        for part, view in _parts(question, whole):
            seen.add(part)
            before = answers.get(part)
            kept = part != WHOLE and before is not None and now_s - before.asked_s < KEPT_S
            if kept or (before is not None and before.version == version):
                continue
            if part != WHOLE and stop():
                return False
            asked = question if part == WHOLE else replace(question, accepted=None, report=None)
            found, plan = await ask(asked, view), None
            if isinstance(found, StoredPlan) and (part == WHOLE or not found.new_nodes):
                plan = KnownPlan(found.status.predicted, PlannedPods.of(found))
            answers[part] = _Answer(plan, version, now_s)
            if part == WHOLE and plan is None:
                break  # There is none on a part, either.
        for gone in answers.keys() - seen:
            del answers[gone]
        return True

    def get(self, question: ParsedJob) -> tuple[KnownPlan, ...]:
        """Return the known plans of a job, the best first; empty if no plan is possible, or if none is known yet.

        Of several plans with the same nodes and ranks, only one is returned.
        """
        answers = self._of(question)
        if WHOLE not in answers or (best := answers[WHOLE].plan) is None:
            return ()
        others = [answer.plan for answer in answers.values() if answer.plan is not None]
        by_pods = {_shape(best): best}
        for plan in sorted(others, key=lambda plan: _worth(question, plan)):
            by_pods.setdefault(_shape(plan), plan)
        return tuple(by_pods.values())

    def clear(self) -> None:
        self._known.clear()

    def _of(self, question: ParsedJob) -> dict[Hashable, _Answer]:
        left_out = tuple(sorted(question.observed.left_out))
        key = (question.observed.job.namespace, question.digest, left_out, question.volumes)
        found = self._known.setdefault(key, {})
        self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return found


WHOLE = "whole"
"""The name of the whole cluster, as if all jobs had ended, among the parts of the cluster."""


def _parts(question: ParsedJob, whole: ClusterView) -> Iterator[tuple[Hashable, ClusterView]]:
    """Yield (name, nodes) of each part of the cluster on which a job is planned.

    They are the whole cluster, and 1, 2, 4, … devices or nodes of each type, if the spec allows that number of nodes. A
    job whose groups the user has fixed is planned on the whole cluster only.
    """
    yield WHOLE, whole
    spec = question.spec
    if spec is None or spec.planning.groups:
        return
    nodes = usable_nodes(question, whole).nodes
    for device in list(dict.fromkeys(node.device for node in nodes))[:MAX_DEVICE_TYPES]:
        for count, devices, view in device_parts([node for node in nodes if node.device == device]):
            if spec.nodes.min <= count <= spec.nodes.max:
                yield (device, count, devices), view


def _worth(question: ParsedJob, plan: KnownPlan) -> tuple[float, float]:
    """Return the sort key of a plan by what the job minimizes, such as time or energy; the best plan comes first.

    Plans without a predicted time come last. Plans that are equal otherwise are sorted by time.
    """
    assert question.spec is not None
    predicted = plan.predicted
    total_s = predicted.total_seconds or float("inf")
    return predicted.expense(question.spec.objective.minimize) or total_s, total_s


def _shape(plan: KnownPlan) -> Hashable:
    return tuple((group.device, group.nodes, group.ranks_per_node) for group in plan.pods.groups)
