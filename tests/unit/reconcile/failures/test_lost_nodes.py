"""Tests of fencing: pods on lost nodes are deleted by force, after the term was raised."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from dlcontract import RunPhase
from dljob.api import Phase
from dljob.job.observed import Observed
from dljob.job.plan.stored import OPERATOR_KEY
from dljob.reconcile import Desired, Target
from support.builders import DIGITS, NOW, Json, after, changed, plan_of, report, settled
from support.job_lifecycle import DOWN, OUTCOME, condition_of, status, step, training

FETCHED: Json = {**DIGITS, "dataset": {"uri": "http://a/b.npz", "samples": 1437}}


class TestLostNodes:
    def lost(self, seconds_ago: float) -> Observed:
        observed = training({**DIGITS, "runPolicy": {"nodeLostSeconds": 40}})
        return replace(observed, lost_nodes={"digits-cpu-node-1": NOW - timedelta(seconds=seconds_ago)})

    def test_job_waits_for_a_lost_node_to_return(self) -> None:
        desired = step(self.lost(39))
        assert desired.deletes == ()
        assert desired.requeue_after_s == 1
        assert plan_of(after(self.lost(39), desired)).plan.term == 1

    def test_restored_plan_keeps_the_term_of_its_coordinator(self) -> None:
        """If the plan's ConfigMap is deleted by hand after a fence, fenced pods are still rejected."""
        observed = self.lost(40)
        fenced = after(observed, step(observed))
        fenced = replace(fenced, report=report(fenced))
        again = after(fenced, step(replace(fenced, plan=None)))
        assert plan_of(again).plan.term >= 2

    def test_fencing_raises_the_term_and_deletes_the_pod(self) -> None:
        observed = self.lost(40)
        desired = step(observed)
        assert desired.deletes == (Target("Pod", "digits-cpu-1", "uid-digits-cpu-1", force=True),)
        found = plan_of(after(observed, desired)).plan
        assert (found.term, found.number) == (2, 1)
        assert desired.scales == ()

    @pytest.mark.parametrize("pods_stop", [True, False], ids=["foreground", "orphan"])
    def test_deletion_in_the_foreground_does_not_wait_for_a_lost_node(self, *, pods_stop: bool) -> None:
        """Fixed bug: the job stayed until the node was back. Its plan may be gone before its pods."""
        observed = self.lost(39)
        pods = tuple(replace(pod, deleting=pods_stop) for pod in observed.pods)
        leaving = replace(observed, job=replace(observed.job, deleting=True), pods=pods, plan=None)
        assert step(leaving) == (Desired(requeue_after_s=1.0) if pods_stop else Desired())
        overdue = replace(leaving, lost_nodes=self.lost(40).lost_nodes)
        gone = Target("Pod", "digits-cpu-1", "uid-digits-cpu-1", force=True)
        assert step(overdue) == (Desired(deletes=(gone,)) if pods_stop else Desired())

    @pytest.mark.parametrize("stop", ["suspended", "moved to a new plan", "finished"])
    def test_pods_that_stop_are_fenced_too(self, stop: str) -> None:
        """Otherwise, the job would wait for the kubelet of the lost node, which reports the end of the pod."""
        observed = self.lost(40)
        if stop == "suspended":
            observed = changed(observed, suspend=True)
        elif stop == "moved to a new plan":
            observed = changed(observed, epochs=9)
        else:
            observed = replace(observed, report=report(observed, RunPhase.SUCCEEDED))
        desired = step(observed)
        assert desired.scales == DOWN
        assert desired.deletes == (Target("Pod", "digits-cpu-1", "uid-digits-cpu-1", force=True),)
        stopped = after(observed, desired)
        assert plan_of(stopped).plan.term == (1 if stop == "finished" else 2)
        if stop == "moved to a new plan":
            assert plan_of(after(stopped, step(settled(stopped)))).plan.term == 2

    @pytest.mark.parametrize("ended", [False, True])
    def test_pods_of_a_job_with_an_invalid_spec_are_fenced_too(self, *, ended: bool) -> None:
        """Fixed bug: with a spec that a new release refuses, the job waited for the lost node without limit."""
        observed = changed(self.lost(1000), epochs=-1)
        if ended:
            observed = replace(observed, report=report(observed, RunPhase.SUCCEEDED))
        desired = step(observed)
        assert condition_of(desired, "Accepted").reason == "InvalidSpec"
        assert desired.deletes == (Target("Pod", "digits-cpu-1", "uid-digits-cpu-1", force=True),)
        assert plan_of(after(observed, desired)).plan.term == (1 if ended else 2)
        assert desired.scales == (DOWN if ended else ())

    @pytest.mark.parametrize(("seconds_ago", "fenced"), [(39, False), (40, True)])
    def test_spec_that_a_new_release_refuses_still_says_when_pods_are_overdue(
        self, seconds_ago: float, *, fenced: bool
    ) -> None:
        """The stricter rule of the release refuses the spec in the plan too, which lacks nodeLostSeconds anyhow."""
        observed = changed(self.lost(seconds_ago), epochs=-1)
        assert observed.plan is not None
        mine = json.loads(observed.plan[OPERATOR_KEY])
        mine["spec"]["epochs"] = -1
        observed = replace(observed, plan={**observed.plan, OPERATOR_KEY: json.dumps(mine)})
        assert plan_of(observed).accepted_spec() is None
        desired = step(observed)
        assert bool(desired.deletes) == fenced
        assert desired.requeue_after_s == (None if fenced else 1)

    @pytest.mark.parametrize("policy", [None, [], {"nodeLostSeconds": "soon"}, {"nodeLostSeconds": -1}])
    def test_invalid_node_lost_seconds_count_as_the_default(self, policy: object) -> None:
        observed = changed(self.lost(59), runPolicy=policy, epochs=-1)
        assert step(observed).deletes == ()
        assert step(changed(self.lost(60), runPolicy=policy, epochs=-1)).deletes

    def test_reports_of_a_fenced_coordinator_are_ignored(self) -> None:
        observed = self.lost(40)
        old = report(observed, RunPhase.SUCCEEDED, outcome=OUTCOME)
        fenced = replace(after(observed, step(observed)), report=old)
        assert status(step(fenced)).completion_time is None
        assert status(step(replace(fenced, report=report(fenced, RunPhase.SUCCEEDED)))).phase is Phase.COMPLETE

    def test_pod_is_fenced_once(self) -> None:
        observed = self.lost(40)
        fenced = after(observed, step(observed))
        desired = step(fenced)
        assert desired.deletes == ()
        assert plan_of(after(fenced, desired)).plan.term == 2

    def test_pod_that_remains_is_fenced_once(self) -> None:
        """Fixed bug: a pod with a finalizer raised the term at every reconcile."""
        observed = self.lost(61)
        pods = tuple(replace(p, deleting=True, fenced=p.node in observed.lost_nodes) for p in observed.pods)
        assert plan_of(after(observed, step(observed))).plan.term == 2
        again = step(replace(observed, pods=pods))
        assert again.deletes == () and plan_of(after(observed, again)).plan.term == 1

    def test_lost_nodes_of_other_jobs_do_not_matter(self) -> None:
        observed = replace(training(), lost_nodes={"elsewhere": NOW - timedelta(days=1)})
        assert (step(observed).deletes, step(observed).requeue_after_s) == ((), None)
