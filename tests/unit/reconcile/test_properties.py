"""Tests of invariants of reconcile along random paths of events in a job's life."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlcontract import Failure, Plan, RunPhase
from dljob.api import DLJobStatus, Phase
from dljob.calibrate import Learned, NoiseOf
from dljob.job.observed import Observed, Rejected
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile import Desired, needs_view, reconcile
from dljob.status.conditions import phase
from support.builders import CONFIG, CPUS, DIGITS, NOW, Json, after, changed, nodes, report, seen, settled
from support.job_lifecycle import OUTCOME, done, started, status, training

LIMITS = {"backoffLimit": 2, "activeDeadlineSeconds": 900, "ttlSecondsAfterFinished": 300, "nodeLostSeconds": 30}
FAILURE = Failure(reason="ProgramFailed", message="the program ended", rank=1, exit_code=1)


@dataclass(frozen=True)
class Situation:
    """A job at one moment. ``templates``: the pod template that each StatefulSet has, by its name."""

    observed: Observed
    seconds: float = 0.0
    templates: Mapping[str, Json] = field(default_factory=dict)

    @property
    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    @property
    def before(self) -> DLJobStatus:
        return DLJobStatus.model_validate(self.observed.job.status)

    @property
    def over(self) -> bool:
        return self.before.phase in (Phase.COMPLETE, Phase.FAILED)

    def reconciled(self) -> Desired:
        """Reconcile as the controller does, with a view of the cluster only if it is needed."""
        view = self.observed.view if needs_view(self.observed) else None
        return reconcile(replace(self.observed, view=view), CONFIG, self.now)


def _reported(run_phase: RunPhase, **changes: object) -> Callable[[Observed], Observed]:
    def reported(o: Observed) -> Observed:
        return o if o.plan is None else replace(o, report=report(o, run_phase, **changes))

    return reported


def _lost(o: Observed) -> Observed:
    away = {pod.node: NOW - timedelta(seconds=20) for pod in o.pods[:1] if pod.node is not None}
    return replace(o, lost_nodes=away)


EVENTS: dict[str, Callable[[Observed], Observed]] = {
    "pods ready": settled,
    "pods not ready": lambda o: settled(o, ready=False),
    "pods leave": lambda o: replace(o, pods=tuple(replace(pod, deleting=True, ready=False) for pod in o.pods)),
    "waiting": _reported(RunPhase.WAITING),
    "running": _reported(RunPhase.RUNNING),
    "progress": _reported(RunPhase.RUNNING, step=40, loss=0.5, restarts={"NodeLost": 1}),
    "restarting": _reported(RunPhase.RESTARTING, failures=1, failure=FAILURE),
    "too many failures": _reported(RunPhase.RESTARTING, failures=3, failure=FAILURE),
    "succeeded": _reported(RunPhase.SUCCEEDED, outcome=OUTCOME),
    "failed": _reported(RunPhase.FAILED, failure=FAILURE),
    "nonsense reported": lambda o: replace(o, report='{"schema": 1}'),
    "suspended": lambda o: changed(o, suspend=True),
    "resumed": lambda o: changed(o, suspend=False),
    "larger batch": lambda o: changed(o, globalBatchSize=192),
    "former batch": lambda o: changed(o, globalBatchSize=96),
    "plan only": lambda o: changed(o, planning={"mode": "PlanOnly"}),
    "planned by itself": lambda o: changed(o, planning={"mode": "Auto"}),
    "a range of batches": lambda o: changed(o, batchSizeRange={"max": 768}),
    "no range of batches": lambda o: changed(o, batchSizeRange=None),
    "noise is measured": lambda o: replace(o, learned=NOISY),
    "invalid": lambda o: changed(o, globalBatchSize=0),
    "infeasible": lambda o: changed(o, nodes={"min": 30}),
    "feasible": lambda o: changed(o, nodes={"min": 2}),
    "nodes go": lambda o: replace(o, view=nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi"})),
    "nodes come": lambda o: replace(o, view=CPUS, lost_nodes={}),
    "a node is lost": _lost,
    "no class": lambda o: replace(o, classes=()),
    "the plan is deleted": lambda o: replace(o, plan=None),
    "the sets are deleted": lambda o: replace(o, sets=(), pods=()),
    "a set is scaled": lambda o: replace(o, sets=tuple(replace(s, replicas=1) for s in o.sets)),
    "names taken": lambda o: replace(o, leftovers=("Service digits",)),
    "names free": lambda o: replace(o, leftovers=()),
    "refused": lambda o: replace(o, rejected=Rejected("StatefulSet", "digits-cpu", "no")),
    "taken": lambda o: replace(o, rejected=None),
    "status wiped": lambda o: replace(o, job=replace(o.job, status={})),
}
NOISY = {("digits-cnn", "cpu"): Learned(noise=NoiseOf("digits", 1e4, 1000))}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.sampled_from([0.0, 1.0, 20.0, 400.0])), max_size=14)


def following_situation(situation: Situation, desired: Desired) -> Situation | None:
    """Return the situation after the desired state was applied, or None if the job was deleted."""
    if desired.delete_job:
        return None
    applied = {m["metadata"]["name"]: m["spec"]["template"] for m in desired.objects if m["kind"] == "StatefulSet"}
    following = after(situation.observed, desired)
    return replace(situation, observed=following, templates={**situation.templates, **applied})


def written(desired: Desired) -> Plan | None:
    """Return the applied plan."""
    return next((StoredPlan.parse(m["data"]).plan for m in desired.objects if "data" in m), None)


def in_force(observed: Observed) -> Plan | None:
    return None if observed.plan is None else StoredPlan.parse(observed.plan).plan


def walk(steps: list[tuple[str, float]]) -> list[tuple[Situation, Desired]]:
    """Yield every situation on the path, with its desired state."""
    situation: Situation | None = Situation(seen({**DIGITS, "runPolicy": LIMITS}))
    path: list[tuple[Situation, Desired]] = []
    for event, seconds in [("pods ready", 0.0), *steps]:
        assert situation is not None
        desired = situation.reconciled()
        path.append((situation, desired))
        situation = following_situation(situation, desired)
        if situation is None:
            break
        situation = replace(situation, observed=EVENTS[event](situation.observed), seconds=situation.seconds + seconds)
    return path


def status_is_well_formed(situation: Situation, desired: Desired) -> None:
    if desired.status is None:
        return
    conditions = desired.status.conditions
    types = [condition.type for condition in conditions]
    assert len(types) == len(set(types)), "there is one condition per type"
    assert desired.status.phase is phase(conditions), "the phase follows from the conditions"
    assert DLJobStatus.model_validate(desired.status.manifest()) == desired.status, (
        "the status must survive a round trip"
    )
    before = {c.type: c for c in situation.before.conditions}
    assert set(before) <= set(types), "conditions are not dropped"
    for new in conditions:
        assert new.last_transition_time <= situation.now
        if (old := before.get(new.type)) is not None:
            moved, changed = old.last_transition_time != new.last_transition_time, old.status is not new.status
            assert changed or not moved, f"the time of {new.type} changed without its status"


def pods_of_two_plans_never_mix(situation: Situation, desired: Desired) -> None:
    observed = situation.observed
    with_pods = {item.name for item in observed.sets if item.replicas > 0}
    for manifest in desired.objects:
        if manifest["kind"] == "StatefulSet" and (name := manifest["metadata"]["name"]) in with_pods:
            same = manifest["spec"]["template"] == situation.templates.get(name)
            assert same, "a template was changed while it had pods"
    new, old = written(desired), in_force(observed)
    if new is not None and old is not None and (observed.pods or with_pods):
        assert new.digest() == old.digest(), "the plan was replaced while pods were running"


def plan_numbers_and_terms_never_decrease(situation: Situation, desired: Desired) -> None:
    new, old = written(desired), in_force(situation.observed)
    if new is not None and old is not None:
        assert new.number >= old.number
        assert new.term >= old.term
        assert (new.number == old.number) == (new.digest() == old.digest()), "a number belongs to one plan"


def jobs_that_must_not_run_have_no_pods(situation: Situation, desired: Desired) -> None:
    spec = situation.observed.job.spec
    if spec.get("suspend") or situation.over or spec.get("planning", {}).get("mode") == "PlanOnly":
        assert all(scale.replicas == 0 for scale in desired.scales)
        new, old = written(desired), in_force(situation.observed)
        if new is None or old is None:
            assert desired.objects == ()
        else:  # Pods on lost nodes are fenced: only the term of the plan rises, before they are deleted.
            assert [manifest["kind"] for manifest in desired.objects] == ["ConfigMap"]
            assert new.term == old.term + 1 and new.digest() == old.digest()
            assert any(target.force for target in desired.deletes)


def finished_jobs_stay_finished(situation: Situation, desired: Desired) -> None:
    if situation.over and desired.status is not None:
        assert desired.status.phase is situation.before.phase
        assert desired.status.completion_time == situation.before.completion_time
        assert desired.measurements is None, "a run updates profiles once"


def only_finished_jobs_are_deleted(situation: Situation, desired: Desired) -> None:
    assert situation.over or not desired.delete_job


INVARIANTS = (
    status_is_well_formed,
    pods_of_two_plans_never_mix,
    plan_numbers_and_terms_never_decrease,
    jobs_that_must_not_run_have_no_pods,
    finished_jobs_stay_finished,
    only_finished_jobs_are_deleted,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
@example([("infeasible", 0.0), ("the sets are deleted", 1.0), ("a node is lost", 0.0)])
@example([("a range of batches", 0.0), ("a node is lost", 0.0)])
@example([("larger batch", 0.0), ("plan only", 0.0), ("waiting", 0.0), ("a node is lost", 0.0)])
def test_every_invariant_holds_on_every_path(steps: list[tuple[str, float]]) -> None:
    for situation, desired in walk(steps):
        for invariant in INVARIANTS:
            invariant(situation, desired)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_applied_objects_are_not_applied_again(steps: list[tuple[str, float]]) -> None:
    """After the desired state is applied, another reconcile changes nothing. Otherwise, the operator would never stop."""
    situation, _ = walk(steps)[-1]
    desired = situation.reconciled()
    assert desired == situation.reconciled(), "reconcile must be deterministic"
    for _ in range(3):
        following = following_situation(situation, desired)
        if following is None:
            return
        situation, before = following, desired
        desired = situation.reconciled()
    assert replace(desired, events=()) == replace(before, events=())
    assert desired.events == ()
    assert desired.delete_job or status(desired).manifest() == situation.observed.job.status


@pytest.mark.parametrize("make", [seen, started, training, done])
def test_job_that_is_being_deleted_is_left_alone(make: Callable[[], Observed]) -> None:
    observed = make()
    leaving = replace(observed, job=replace(observed.job, deleting=True))
    assert not needs_view(leaving)
    assert reconcile(leaving, CONFIG, NOW) == Desired()


@pytest.mark.parametrize("text", [{"phase": "Happy"}, {"conditions": "none"}, {"nodes": -1, "stray": 1}])
def test_invalid_status_is_replaced(text: dict[str, object]) -> None:
    observed = started()
    spoilt = replace(observed, job=replace(observed.job, status=text))
    assert status(reconcile(spoilt, CONFIG, NOW)).ready == "3/3"
