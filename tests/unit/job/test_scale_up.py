"""Tests of jobs that the existing nodes cannot run, in a cluster whose autoscaler can add nodes."""

from dataclasses import replace
from datetime import timedelta

from dljob.cluster import ClusterView
from dljob.cluster.templates import NodeTemplates
from dljob.job.observed import Observed
from dljob.job.plan.recommendation import parse_job, recommend
from dljob.job.plan.stored import StoredPlan
from dljob.job.scale_up import waiting_text
from dljob.planner import Decision, Infeasible
from dljob.reconcile import Desired, parse_observed, reconcile
from dljob.reconcile.planning.make_plan import decide
from support.builders import CONFIG, CPUS, DIGITS, NOW, Json, after, nodes, planned, seen, settled
from support.job_lifecycle import condition_of, kinds, verdict

TEMPLATES = NodeTemplates(nodes({"name": "new", "count": 5, "cpu": 2, "memory": "4Gi"}).nodes, start_timeout_s=1200)
AUTOSCALED = replace(CONFIG, node_templates=TEMPLATES)
FIVE: Json = {**DIGITS, "nodes": {"min": 5, "max": 5}}


def at(observed: Observed, seconds: float) -> Desired:
    return reconcile(observed, AUTOSCALED, NOW + timedelta(seconds=seconds))


def pending(spec: Json) -> Observed:
    """Return the job with its pods, of which the scheduler has placed only those for which there are nodes."""
    first = seen(spec)
    observed = settled(after(first, at(first, 0)))
    unplaced = [
        replace(pod, node=None, ready=False, unschedulable="0/3 nodes are available") for pod in observed.pods[3:]
    ]
    waiting = replace(observed, pods=(*observed.pods[:3], *unplaced))
    return after(waiting, at(waiting, 1))


def test_job_that_the_existing_nodes_can_run_is_planned_on_them_alone() -> None:
    with_templates = planned(seen(), AUTOSCALED)
    assert with_templates == planned(seen())
    assert (with_templates.new_nodes, with_templates.start_timeout_s) == (None, None)
    assert "new_nodes" not in with_templates.data()["operator.json"]


def test_job_without_room_gets_pods_for_nodes_that_the_autoscaler_adds() -> None:
    assert isinstance(decide(parse_observed(seen(FIVE)), CONFIG), Infeasible)
    desired = at(seen(FIVE), 0)
    assert desired.plan is not None and desired.plan.nodes == 5 and desired.plan.new_nodes == 2
    assert "StatefulSet" in kinds(desired)
    assert waiting_text(2) in condition_of(desired, "Planned").message


def test_job_that_runs_no_longer_says_that_nodes_are_missing() -> None:
    """Fixed bug: seen with a real Cluster Autoscaler, the message stayed until the end of the job."""
    observed = pending(FIVE)
    assert waiting_text(2) in condition_of(at(observed, 2), "Planned").message
    ready = tuple(replace(pod, node=f"n{i}", ready=True, unschedulable=None) for i, pod in enumerate(observed.pods))
    running = replace(observed, pods=ready)
    running = after(running, at(running, 3))
    text = condition_of(at(running, 4), "Planned").message
    assert "not exist yet" not in text and text.startswith("plan 1: 5 x cpu")
    lost = replace(running, pods=observed.pods)
    assert "not exist yet" not in condition_of(at(lost, 5), "Planned").message


def test_node_without_enough_free_cpu_or_memory_is_no_node_for_a_pod() -> None:
    """Fixed bug: nodes that other jobs use counted as if they were free, because each CPU node has one device."""
    spec = DIGITS | {"nodes": {"min": 3, "max": 3}, "resources": {"cpu": "1500m", "memory": "2Gi"}}
    free = {"name": "free", "count": 1, "cpu": 2, "memory": "4Gi"}
    for used in ({"cpu": 1, "memory": "4Gi"}, {"cpu": 2, "memory": "1Gi"}):
        view = nodes(free, {"name": "used", "count": 2, **used})
        assert planned(seen(spec, view), AUTOSCALED).new_nodes == 2, used


def test_job_on_an_empty_cluster_needs_all_of_its_nodes() -> None:
    plan = planned(seen(FIVE, ClusterView()), AUTOSCALED)
    assert plan.new_nodes == 5


def test_job_that_needs_more_than_the_templates_add_waits_without_pods() -> None:
    six = {**DIGITS, "nodes": {"min": 6, "max": 6}}
    found = decide(parse_observed(seen(six)), AUTOSCALED)
    assert isinstance(found, Infeasible)
    assert found == decide(parse_observed(seen(six)), CONFIG), "the message is about the nodes that exist"


def test_pods_wait_for_new_nodes_longer_than_for_others() -> None:
    waiting = pending(FIVE)
    assert verdict(at(waiting, 1100), "Admitted") == ("True", "Starting")
    released = at(waiting, 1300)
    assert verdict(released, "Admitted") == ("False", "StartTimedOut")
    assert "1200 s" in condition_of(released, "Admitted").message


def test_own_start_timeout_of_a_job_takes_precedence() -> None:
    waiting = pending({**FIVE, "scheduling": {"startTimeout": "2m"}})
    assert verdict(at(waiting, 100), "Admitted") == ("True", "Starting")
    assert verdict(at(waiting, 130), "Admitted") == ("False", "StartTimedOut")


def test_plan_of_new_nodes_round_trips() -> None:
    plan = planned(seen(FIVE), AUTOSCALED)
    read = StoredPlan.parse(plan.data())
    assert (read.new_nodes, read.start_timeout_s) == (2, 1200)


def test_dljob_plan_shows_what_the_operator_would_do() -> None:
    manifest = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": {"name": "digits"}, "spec": FIVE}
    assert isinstance(recommend(parse_job(manifest), CPUS, {}).answer, Infeasible)
    found = recommend(parse_job(manifest), CPUS, {}, templates=TEMPLATES)
    assert isinstance(found.answer, Decision) and waiting_text(2) in (found.answer.warning or "")
    assert len(found.view.nodes) == 5


def test_after_a_time_out_existing_nodes_come_first() -> None:
    waiting = pending(FIVE)
    stopped = settled(after(waiting, at(waiting, 1300)))
    later = replace(stopped, view=nodes({"name": "n", "count": 5, "cpu": 2, "memory": "4Gi"}), pods=())
    desired = at(later, 1300 + 3600)
    assert desired.plan is not None and desired.plan.new_nodes is None
    assert len(CPUS.nodes) == 3
