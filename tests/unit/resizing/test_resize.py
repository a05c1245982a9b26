"""Tests of running jobs that are planned again because the cluster has changed."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlcontract import Mismatch, RunPhase
from dljob.cluster import ClusterView
from dljob.cluster.templates import NodeTemplates
from dljob.job.identity import profile_key
from dljob.job.observed import ClaimSeen, Observed
from dljob.planner import Learned, LearnedPoint
from dljob.planner.types.texts import time_text
from dljob.reconcile import needs_view, reconcile
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import question
from dljob.reconcile.planning.resize import rests_until
from dljob.scheduling.assignment.reasons import Resting
from dljob.scheduling.gain import MIN_BETWEEN_S
from support.builders import CONFIG, CPUS, DIGITS, NOW, Json, after, changed, nodes, plan_of, report, seen, settled
from support.job_lifecycle import condition_of, status, step, verdict

ELASTIC: Json = {**{k: v for k, v in DIGITS.items() if k != "epochs"}, "steps": 100_000, "nodes": {"min": 1, "max": 3}}
TWO = ClusterView(CPUS.nodes[:2])
SCALES = Learned(
    (LearnedPoint(32, 0.1, 50), LearnedPoint(48, 0.15, 50), LearnedPoint(96, 0.3, 50)),
    link_latency_s=1e-5, link_bandwidth_Bps=1e9,
)  # fmt: skip
"""More nodes are better: compute dominates, and the network is fast."""
TRAINING: Json = {"step": 500, "steps": 100_000, "step_s": 0.16}
STARTED_S = 10.0
FEWER = [{"ranks": ranks, "message": f"ValueError: {ranks} ranks"} for ranks in (1, 2)]
"""The numbers of ranks that the script refuses, of three."""
TORCHRUN: Json = {
    "model": {"hints": {"parameters": 1e6, "flopsPerSample": 1e9}},
    "trainer": {"framework": "Torchrun", "command": ["python", "train.py"]},
    "dataset": {"uri": "file:///made/by/the/script", "samples": 1797},
    "collective": "Torch",
}
"""A script that may report its steps, but may not resume from a checkpoint."""


def learned(observed: Observed) -> Observed:
    spec = parse_observed(observed).spec
    assert spec is not None
    return replace(observed, learned={(profile_key(spec), "cpu"): SCALES})


def trains_on_two(spec: Json = ELASTIC, claims: dict[str, ClaimSeen] | None = None, **changes: Any) -> Observed:
    """Return a job that trains on two nodes, all that there are. ``claims``: those of its user."""
    first = learned(seen(spec, TWO, claims=claims or {}))
    observed = settled(after(first, step(first)))
    assert plan_of(observed).nodes == 2, plan_of(observed).status.summary
    observed = after(observed, step(observed, 5.0))
    fields = {**TRAINING, "last_checkpoint": {"step": 490, "unix_s": NOW.timestamp()}, **changes}
    observed = replace(observed, report=report(observed, **fields))
    return after(observed, step(observed, STARTED_S))


def grown(observed: Observed, view: ClusterView = CPUS) -> Observed:
    """Return the job after a third node has joined, and the planning noticed it."""
    return replace(observed, view=view, capacity_grew=True)


def moving(observed: Observed, seconds: float) -> Observed:
    """Return the job after its decision to move."""
    decided = step(observed, seconds)
    assert verdict(decided, "Resizing") == ("True", "BetterPlan"), condition_of(decided, "Resizing").message
    assert decided.scales == (), "it is planned again before its pods stop, so that its new nodes are reserved"
    return replace(after(observed, decided), capacity_grew=False)


def moved(observed: Observed, seconds: float) -> Observed:
    """Return the job after its pods have stopped, and those of the new plan have started."""
    observed = after(observed, step(observed, seconds))
    assert all(item.replicas == 0 for item in observed.sets)
    stopped = replace(observed, pods=(), report=report(observed, RunPhase.STOPPED, **TRAINING))
    new = step(stopped, seconds + 5)
    assert verdict(new, "Resizing") == ("False", "Resized")
    return settled(after(stopped, new))


class TestGrow:
    def test_job_moves_to_a_node_that_joined(self) -> None:
        observed = trains_on_two()
        assert not needs_view(observed)
        assert "Resizing" not in {c.type for c in status(step(observed, 20)).conditions}
        observed = grown(observed)
        assert needs_view(observed)
        decided = step(observed, 20)
        text = condition_of(decided, "Resizing").message
        assert text.startswith("from 2 x cpu") and "to 3 x cpu" in text and " sooner" in text
        [event] = [event for event in decided.events if event.reason == "BetterPlan"]
        assert event.type == "Normal"
        going = moving(observed, 20)
        assert needs_view(going)
        leaving = step(going, 21)
        assert [scale.replicas for scale in leaving.scales] == [0]
        assert verdict(leaving, "Running") == ("False", "Replacing")
        assert "another plan is better" in condition_of(leaving, "Running").message
        there = moved(going, 21)
        found = plan_of(there)
        assert (found.nodes, found.plan.number, found.replans, found.resizes) == (3, 2, 1, 1)
        assert not needs_view(there)
        [event] = [e for e in step(replace(going, sets=(), pods=()), 30).events if e.reason == "Resized"]
        assert event.type == "Normal" and "from 2 x cpu" in event.message and " sooner" in event.message

    def test_plan_without_a_gain_is_not_worthwhile(self) -> None:
        observed = grown(trains_on_two(), TWO)
        stays = step(observed, 20)
        assert verdict(stays, "Resizing") == ("False", "NotWorthwhile")
        assert "still the best plan" in condition_of(stays, "Resizing").message
        assert stays.scales == () and not [e for e in stays.events if e.reason == "NotWorthwhile"]

    def test_gain_that_does_not_repay_the_restart_is_not_worthwhile(self) -> None:
        """The last checkpoint is 500 steps old, and only 2000 are left."""
        mark = {"step": 0, "unix_s": NOW.timestamp()}
        stays = step(grown(trains_on_two(steps=500 + 2000, last_checkpoint=mark)), 20)
        assert verdict(stays, "Resizing") == ("False", "NotWorthwhile")
        assert "including the restart" in condition_of(stays, "Resizing").message

    @pytest.mark.parametrize(
        ("spec", "measured"),
        [
            ({"planning": {"resize": "Never"}}, {}),
            ({"scheduling": {"disruption": "Avoid"}}, {}),
            ({"checkpoint": {"enabled": False}}, {}),
            ({"planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 2}]}, "nodes": {"min": 2}}, {}),
            (TORCHRUN, {}),
            ({}, {"step": 19}),
            ({}, {"step_s": None}),
            ({}, {"steps": 510}),
            ({}, {"plan_number": 7}),
            ({}, {"phase": RunPhase.RESTARTING}),
            ({}, {"mismatches": [Mismatch(rank=1, planned="cpu", found="other")]}),
        ],
        ids=[
            "resize Never", "disruption Avoid", "no checkpoints", "fixed", "torchrun", "first steps", "not measured",
            "last minutes", "another plan's report", "restarting", "other devices",
        ],
    )  # fmt: skip
    def test_job_that_does_not_look(self, spec: Json, measured: Json) -> None:
        observed = grown(trains_on_two({**ELASTIC, **spec}, **measured))
        assert not needs_view(observed)
        desired = step(observed, 20)
        assert desired.scales == () and "Resizing" not in {c.type for c in status(desired).conditions}

    def test_next_move_waits(self) -> None:
        observed = moved(moving(grown(trains_on_two()), 20), 21)
        smaller = replace(observed, report=report(observed, **TRAINING))
        smaller = after(smaller, step(smaller, 40))
        at = condition_of(step(smaller, 40), "Resizing").last_transition_time
        elapsed_s = (at - NOW).total_seconds()
        waiting = replace(smaller, capacity_grew=True)
        parsed = parse_observed(waiting)
        assert not needs_view(waiting, parsed, NOW + timedelta(seconds=elapsed_s + MIN_BETWEEN_S - 1))
        assert needs_view(waiting, parsed, NOW + timedelta(seconds=elapsed_s + MIN_BETWEEN_S))

    def test_clock_that_was_ahead_lengthens_no_rest(self) -> None:
        day_s = 86_400.0
        observed = moved(moving(grown(trains_on_two()), day_s), day_s + 1)
        observed = replace(observed, report=report(observed, **TRAINING))
        observed = after(observed, step(observed, day_s + 20))
        now = NOW + timedelta(seconds=40)
        assert rests_until(parse_observed(observed), now) == now + timedelta(seconds=MIN_BETWEEN_S)
        corrected = grown(after(observed, step(observed, 40)))
        assert needs_view(corrected, None, NOW + timedelta(seconds=40 + MIN_BETWEEN_S))

    def test_rest_after_a_move_is_explained_while_devices_are_free(self) -> None:
        """Fixed bug: nothing said why devices stayed empty while a job that could use them rested."""
        observed = moved(moving(grown(trains_on_two()), 20), 21)
        observed = replace(observed, report=report(observed, **TRAINING))
        observed = after(observed, step(observed, 40))
        at = condition_of(step(observed, 40), "Resizing").last_transition_time
        until = at + timedelta(seconds=MIN_BETWEEN_S)
        assert time_text(until) in condition_of(step(observed, 40), "Resizing").message
        rests = replace(observed, resting=Resting(until, "4 x cpu"))
        desired = step(rests, 41)
        assert verdict(desired, "Resizing") == ("False", "Resting")
        shown = condition_of(desired, "Resizing")
        assert "4 x cpu" in shown.message and time_text(until) in shown.message and shown.last_transition_time == at
        assert [(each.type, each.reason) for each in desired.events] == [("Normal", "Resting")]
        assert desired.requeue_after_s is not None
        assert NOW + timedelta(seconds=41 + desired.requeue_after_s) <= until
        taken = step(replace(after(rests, desired), resting=None), 42)
        assert verdict(taken, "Resizing") == ("False", "NotWorthwhile") and not taken.events
        late_s = (until - NOW).total_seconds()
        assert verdict(step(after(rests, desired), late_s), "Resizing") == ("False", "NotWorthwhile")
        assert rests_until(parse_observed(rests), at) == until and rests_until(parse_observed(rests), until) is None

    def test_node_that_is_gone_again_before_the_pods_stop(self) -> None:
        observed = replace(moving(grown(trains_on_two()), 20), view=TWO)
        stays = step(observed, 21)
        assert verdict(stays, "Resizing") == ("False", "NotWorthwhile") and stays.scales == ()

    def test_node_that_is_gone_again_while_the_pods_stop(self) -> None:
        observed = moving(grown(trains_on_two()), 20)
        observed = replace(after(observed, step(observed, 21)), view=TWO)
        back = step(replace(observed, pods=()), 30)
        assert verdict(back, "Resizing") == ("False", "NotWorthwhile")
        assert back.plan is not None and (back.plan.nodes, back.plan.plan.number) == (2, 1)

    def test_job_that_has_stopped_does_not_start_on_devices_that_others_use(self) -> None:
        """Fixed bug: a job whose script refused the ranks that were left started again with its old plan."""
        observed = moving(grown(trains_on_two()), 20)
        observed = after(observed, step(observed, 21))
        refused = [{"ranks": 1, "message": "ValueError: 1 rank"}]
        stopped = report(observed, RunPhase.STOPPED, **TRAINING, refused_sizes=refused)
        waits = step(replace(observed, pods=(), view=ClusterView(CPUS.nodes[:1]), report=stopped), 30)
        assert verdict(waits, "Planned")[0] == "False" and verdict(waits, "Admitted") == ("False", "NoPlan")
        assert "the script failed on 1 ranks" in condition_of(waits, "Planned").message
        assert waits.plan is None and waits.scales == ()

    def test_job_that_has_stopped_gets_new_nodes_if_others_use_its_devices(self) -> None:
        """Fixed bug: it started with its old plan, and gave up before an autoscaler could have added nodes."""
        observed = moving(grown(trains_on_two()), 20)
        busy = ClusterView(tuple(replace(node, free_cpu=0.0) for node in CPUS.nodes))
        observed = replace(after(observed, step(observed, 21)), pods=(), view=busy)
        new = NodeTemplates(nodes({"name": "new", "count": 6, "cpu": 2, "memory": "4Gi"}).nodes, start_timeout_s=1200)
        starts = reconcile(observed, replace(CONFIG, node_templates=new), NOW + timedelta(seconds=30))
        assert starts.plan is not None and (starts.plan.new_nodes or 0) > 0 and starts.plan.start_timeout_s == 1200
        assert verdict(starts, "Resizing") == ("False", "Resized")

    def test_job_that_has_stopped_waits_for_its_volume_with_a_plan_for_free_devices(self) -> None:
        """Fixed bug: when its claim was back, the job started with its old plan, whose devices others used."""
        spec = {**ELASTIC, "checkpoint": {"volume": {"claimName": "mine"}}}
        claims = {"mine": ClaimSeen("mine", "Bound", ("ReadWriteMany",))}
        observed = moving(grown(trains_on_two(spec, claims)), 20)
        observed = replace(after(observed, step(observed, 21)), pods=(), view=ClusterView(CPUS.nodes[:1]), claims={})
        waits = step(observed, 30)
        assert verdict(waits, "VolumeReady") == ("False", "ClaimNotFound") and waits.plan is None
        back = replace(after(observed, waits), claims=claims)
        assert needs_view(back, None, NOW + timedelta(seconds=60))
        starts = step(back, 60)
        assert starts.plan is not None and (starts.plan.nodes, starts.plan.plan.number) == (1, 2)
        assert verdict(starts, "Resizing") == ("False", "Resized")

    def test_switching_it_off_stops_a_move(self) -> None:
        observed = changed(moving(grown(trains_on_two()), 20), planning={"resize": "Never"})
        assert not needs_view(observed)
        stays = step(observed, 21)
        assert verdict(stays, "Resizing") == ("False", "NotWorthwhile") and stays.scales == ()

    def test_switching_it_off_restarts_nothing(self) -> None:
        observed = changed(trains_on_two(), planning={"resize": "Never"})
        desired = step(observed, 20)
        assert not needs_view(observed) and desired.scales == () and desired.plan is not None
        assert desired.plan.data() == observed.plan

    def test_new_spec_ends_a_move(self) -> None:
        observed = changed(moving(grown(trains_on_two()), 20), nodes={"min": 1, "max": 2})
        assert verdict(step(observed, 21), "Resizing") == ("False", "Resized")

    def test_moves_do_not_count_as_wrong_predictions(self) -> None:
        observed = trains_on_two()
        often = plan_of(observed).model_copy(update={"replans": 5, "resizes": 5})
        slow = replace(observed, plan=often.data())
        slow = replace(slow, report=report(slow, **{**TRAINING, "step_s": 5.0}))
        assert verdict(step(slow, 100), "PlanContradicted") == ("True", "SlowerThanPredicted")

    def test_job_of_an_earlier_release_is_not_restarted_by_the_upgrade(self) -> None:
        observed = trains_on_two()
        old = grown(replace(observed, plan=plan_of(observed).model_copy(update={"resizes": None}).data()))
        assert plan_of(old).resizes is None and not needs_view(old)
        assert needs_view(changed(old, planning={"resize": "Auto"}))

    def test_question_of_a_job_that_looks_is_that_of_its_job(self) -> None:
        observed = trains_on_two()
        assert question(parse_observed(observed)) == question(parse_observed(grown(observed)))


def lost(observed: Observed, phase: RunPhase = RunPhase.RESTARTING, **changes: Any) -> Observed:
    """Return the job after the node of its last pod was removed: the new pod finds no node."""
    pod = replace(observed.pods[-1], ready=False, node=None, unschedulable="0/2 nodes are available")
    observed = replace(observed, pods=(*observed.pods[:-1], pod), view=TWO)
    return replace(observed, report=report(observed, phase, **{**TRAINING, **changes}))


def trains_on_three(spec: Json = ELASTIC) -> Observed:
    first = learned(seen(spec))
    observed = settled(after(first, step(first)))
    assert plan_of(observed).nodes == 3
    observed = after(observed, step(observed, 5.0))
    observed = replace(observed, report=report(observed, **TRAINING))
    return after(observed, step(observed, STARTED_S))


class TestNodesGone:
    def test_plan_with_ranks_that_the_script_refuses_is_not_made(self) -> None:
        observed = lost(trains_on_three(), refused_sizes=FEWER)
        observed = after(observed, step(observed, 20))
        kept = step(observed, 320)
        assert verdict(kept, "Resizing") == ("False", "NotWorthwhile")
        assert "the script failed on 1, 2 ranks" in condition_of(kept, "Resizing").message

    def test_plan_has_a_number_of_ranks_that_the_script_has_not_refused(self) -> None:
        """Fixed bug: the job waited for the third node, because the best plan had a number that the script refused."""
        observed = lost(trains_on_three(), refused_sizes=FEWER[1:])
        observed = after(observed, step(observed, 20))
        leaving = after(observed, step(observed, 320))
        stopped = report(leaving, RunPhase.STOPPED, **TRAINING, refused_sizes=FEWER[1:])
        new = step(replace(leaving, pods=(), report=stopped), 325)
        assert verdict(new, "Resizing") == ("False", "Resized") and new.plan is not None and new.plan.nodes == 1

    def test_plan_after_the_back_off_does_not_have_the_ranks_that_the_script_refuses(self) -> None:
        """Fixed bug: the job started again with the number of ranks on which its script had failed."""
        observed = lost(trains_on_three(), refused_sizes=FEWER)
        observed = after(observed, step(observed, 20))
        released = step(observed, 320)
        assert verdict(released, "Admitted") == ("False", "StartTimedOut")
        down = replace(after(observed, released), pods=())
        assert needs_view(down, None, NOW + timedelta(seconds=400))
        waits = step(down, 400)
        assert "the script failed on 1, 2 ranks" in condition_of(waits, "Planned").message
        assert verdict(waits, "Admitted") == ("False", "NoPlan") and waits.scales == ()
        starts = step(replace(after(down, waits), view=CPUS), 420)
        assert starts.plan is not None and starts.plan.nodes == 3

    def test_script_that_was_changed_may_use_the_ranks_that_it_refused_before(self) -> None:
        observed = lost(trains_on_three(), refused_sizes=FEWER)
        edited = changed(observed, seed=7)
        assert verdict(step(edited, 20), "Planned") == ("True", "Planned")

    def test_job_that_does_not_train_is_planned_for_the_nodes_that_are_left(self) -> None:
        observed = lost(trains_on_three())
        observed = after(observed, step(observed, 20))
        assert not needs_view(observed, None, NOW + timedelta(seconds=300))
        assert step(observed, 300).scales == ()
        assert needs_view(observed, None, NOW + timedelta(seconds=320))
        leaving = step(observed, 320)
        assert verdict(leaving, "Resizing") == ("True", "NodesGone")
        assert verdict(leaving, "Admitted")[0] == "True", "it keeps its nodes, and does not back off"
        assert "found no node within the start time-out of 300 s" in condition_of(leaving, "Resizing").message
        assert "pods find no node" in condition_of(leaving, "Running").message
        there = moved(observed, 320)
        assert (plan_of(there).nodes, plan_of(there).resizes) == (2, 1)

    def test_nodes_that_nodes_min_needs_are_waited_for(self) -> None:
        """Without a plan for the nodes that are left, the job releases its pods as before."""
        observed = lost(trains_on_three({**ELASTIC, "nodes": {"min": 3, "max": 3}}))
        observed = after(observed, step(observed, 20))
        released = step(observed, 320)
        assert verdict(released, "Resizing") == ("False", "NotWorthwhile")
        assert verdict(released, "Admitted") == ("False", "StartTimedOut")

    def test_job_that_trains_on_its_other_nodes_is_not_restarted_for_nothing(self) -> None:
        observed = lost(trains_on_three(), RunPhase.RUNNING, world_size=2, step_s=0.16)
        observed = after(observed, step(observed, 20))
        assert step(observed, 400).scales == ()
        looks = replace(observed, capacity_grew=True)
        assert not needs_view(looks, None, NOW + timedelta(seconds=100)), "the pod may still be replaced"
        stays = step(looks, 400)
        assert verdict(stays, "Resizing") == ("False", "NotWorthwhile") and stays.scales == ()

    @pytest.mark.parametrize("resize", ["Auto", "Never"])
    def test_restart_of_ranks_that_trained_without_the_pod_has_the_whole_time_out(self, resize: str) -> None:
        """Fixed bug: all pods stopped at once when a rank failed after an hour on the other nodes."""
        trains = lost(
            trains_on_three({**ELASTIC, "planning": {"resize": resize}}), RunPhase.RUNNING, world_size=2, step_s=0.01
        )
        trains = after(trains, step(trains, 20))
        hour = after(trains, step(trains, 3600))
        fails = replace(hour, report=report(hour, RunPhase.RESTARTING, **TRAINING))
        kept = step(fails, 3601)
        assert kept.scales == () and verdict(kept, "Admitted") == ("True", "Started")
        fails = after(fails, kept)
        assert not needs_view(fails, None, NOW + timedelta(seconds=3610))
        assert step(fails, 3610).scales == () and step(fails, 3610).requeue_after_s == pytest.approx(291)
        assert [scale.replicas for scale in step(fails, 3601 + 301).scales] == [0]

    def test_switched_off(self) -> None:
        observed = lost(trains_on_three({**ELASTIC, "planning": {"resize": "Never"}}))
        observed = after(observed, step(observed, 20))
        assert verdict(step(observed, 320), "Admitted") == ("False", "StartTimedOut")

    def test_pods_on_lost_nodes_are_fenced_first(self) -> None:
        observed = lost(trains_on_three())
        observed = after(observed, step(observed, 20))
        node = observed.pods[0].node
        assert node is not None
        observed = replace(observed, lost_nodes={node: NOW + timedelta(seconds=310)})
        assert not needs_view(observed, None, NOW + timedelta(seconds=320))


def test_resumed_job_is_planned_for_the_nodes_that_are_left() -> None:
    """Fixed bug: a plan for three nodes, resumed on a cluster with one, asked for three pods."""
    suspended = changed(trains_on_three(), suspend=True)
    empty = replace(after(suspended, step(suspended, 20)), pods=())
    empty = after(empty, step(empty, 25))
    resumed = replace(changed(empty, suspend=False), view=ClusterView(CPUS.nodes[:1]))
    assert needs_view(resumed)
    new = step(resumed, 30)
    [replicas] = [each["spec"]["replicas"] for each in new.objects if each["kind"] == "StatefulSet"]
    assert replicas == 1 and plan_of(after(resumed, new)).nodes == 1
