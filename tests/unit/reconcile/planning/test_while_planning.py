"""Tests of jobs whose plan is made in the background: the question, and what happens until it is answered."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from dlcontract import RunPhase
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile import Target, needs_view, parse_observed, reconcile
from dljob.reconcile.planning.make_plan import decide, question
from support.builders import CONFIG, CPUS, DIGITS, NOW, after, changed, nodes, plan_of, report, seen
from support.job_lifecycle import condition_of, done, gone, started, status, step, training, verdict


def pending(observed: Observed) -> Observed:
    """Return the job without the view, as the controller observes it until the plan is made."""
    return replace(observed, view=None)


STATES: dict[str, Callable[[], Observed]] = {
    "new": seen,
    "with a status": lambda: after(seen(), step(seen(view=nodes()))),
    "edited while training": lambda: changed(training(), epochs=7),
    "edited and stopping": lambda: _stopping(),
    "edited and stopped": lambda: gone(changed(training(), epochs=7)),
    "with a running batch size": lambda: changed(
        training({**DIGITS, "globalBatchSize": 96, "batchSizeRange": {"max": 192}}), epochs=7
    ),
}


def _stopping() -> Observed:
    edited = changed(training(), epochs=7)
    return after(edited, step(edited))


@pytest.mark.parametrize("state", STATES)
def test_question_has_the_same_answer_as_the_whole_job(state: str) -> None:
    observed = replace(STATES[state](), view=CPUS)
    parsed = parse_observed(observed)
    asked = question(parsed)
    assert asked.observed.job.spec == {} and asked.observed.pods == () and asked.observed.view is None
    with_view = replace(asked, observed=replace(asked.observed, view=CPUS, learned=observed.learned))
    assert decide(with_view, CONFIG) == decide(parsed, CONFIG)


def test_question_of_a_waiting_job_stays_the_same() -> None:
    waiting = seen({**DIGITS, "nodes": {"min": 9}})
    first = question(parse_observed(waiting))
    for seconds in (0, 60):
        waiting = after(waiting, step(waiting, seconds))
        assert question(parse_observed(waiting)) == first
    assert question(parse_observed(changed(waiting, epochs=9))) != first


def test_result_of_planning_is_used_without_a_view() -> None:
    new = seen()
    parsed = parse_observed(pending(new))
    decision = decide(parse_observed(new), CONFIG)
    desired = reconcile(pending(new), CONFIG, NOW, replace(parsed, decision=decision))
    assert isinstance(decision, StoredPlan) and desired.plan == decision and desired == step(new)


class TestUntilThen:
    def test_new_job_creates_nothing(self) -> None:
        observed = pending(seen())
        desired = step(observed)
        assert needs_view(observed) and (desired.objects, desired.scales, desired.deletes) == ((), (), ())
        assert verdict(desired, "Accepted") == ("True", "Accepted") and desired.requeue_after_s is None

    def test_running_pods_stay(self) -> None:
        desired = step(pending(changed(training(), epochs=7)))
        assert (desired.objects, desired.scales, desired.deletes) == ((), (), ())
        assert verdict(desired, "Running") == ("True", "Running") and status(desired).ready == "3/3"

    def test_stopped_pods_are_not_started_again(self) -> None:
        """Otherwise the old plan would start while the new one is made, for example by the next operator."""
        for observed in (_stopping(), gone(changed(training(), epochs=7))):
            desired = step(pending(observed))
            assert (desired.objects, desired.scales, desired.deletes) == ((), (), ())

    def test_job_that_ends_is_not_delayed(self) -> None:
        ended = changed(done(), epochs=7)
        assert verdict(step(pending(ended)), "Complete") == ("True", "Complete")

    def test_lost_node_is_fenced(self) -> None:
        observed = pending(changed(training(), epochs=7))
        lost = replace(observed, lost_nodes={"digits-cpu-node-1": NOW - timedelta(seconds=60)})
        desired = step(lost)
        assert desired.deletes == (Target("Pod", "digits-cpu-1", "uid-digits-cpu-1", force=True),)
        assert plan_of(after(lost, desired)).plan.term == 2 and desired.scales == ()

    def test_contradicted_plan_stays_in_force(self) -> None:
        running = started()
        slow = replace(running, report=report(running, RunPhase.RUNNING, step=500, step_s=1e6))
        observed = after(slow, step(slow))
        late = 1e9
        observed = after(observed, step(observed, late))
        assert needs_view(observed), "the operator looks for a better plan"
        desired = step(pending(observed), late + 60)
        assert (desired.scales, desired.deletes) == ((), ()) and condition_of(desired, "Planned").status.value == "True"
