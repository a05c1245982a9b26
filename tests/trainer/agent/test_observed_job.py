"""Tests of what a coordinator records: outputs that members send again, and plans that replace others."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlcontract import MAX_POD_NBYTES, ModelRef, Plan, PodMemory, RefusedSize, Report, RunPhase, Until
from dltrain.agent.coordinator.diagnosis import Attempt, diagnose
from dltrain.agent.coordinator.links import Lost, Received
from dltrain.agent.coordinator.membership import Membership
from dltrain.agent.coordinator.observed_job import ObservedJob
from dltrain.agent.coordinator.waits import LAUNCH_LIMIT_S, PREPARE_S
from dltrain.protocol.agent_messages import AttemptEnded, PodMemoryPeak, Prepared, RankEnded, RankUp, StillEnding
from dltrain.protocol.rank_messages import Evaluated, Step
from support.trainer.plans import make_plan

FIRST, SECOND = "digits-cpu-0", "digits-cpu-1"


def make_job(tmp_path: Path, plan: Plan, previous: Report | None = None) -> ObservedJob:
    settings: Any = SimpleNamespace(pod=FIRST, pod_ip="127.0.0.1", agent_port=1, hang_min_s=5.0, run_dir=tmp_path)
    reporter: Any = SimpleNamespace(compose=None, urge=lambda: None)
    identity: Any = SimpleNamespace(client=None, tunnel=None)
    reaper: Any = None
    return ObservedJob(settings, identity, reaper, {}, reporter, plan, previous)


@pytest.fixture
def job(tmp_path: Path) -> ObservedJob:
    return make_job(tmp_path, make_plan(3))


def ended(attempt: str, rank: int, text: str) -> RankEnded:
    return RankEnded(attempt=attempt, rank=rank, signal=9, output=text)


def texts(job: ObservedJob) -> dict[int, str]:
    return {rank: output.text for rank, output in job.outputs.items()}


@pytest.mark.parametrize("reverse", [False, True])
def test_output_of_the_last_attempt_of_an_earlier_coordinator_counts(job: ObservedJob, reverse: bool) -> None:
    sent = [ended("9.2", 0, "old"), ended("10.2", 1, "one"), ended("10.2", 1, "one"), ended("10.1", 2, "two")]
    for line in reversed(sent) if reverse else sent:
        job._take(Received(SECOND, line))
    assert texts(job) == {1: "one"}


def test_earlier_output_is_ignored_once_ranks_were_launched(job: ObservedJob) -> None:
    job.attempts = 1
    job._take(Received(SECOND, ended("1.1", 0, "old")))
    job.attempt = Attempt(job.plan, "2.1")
    job._take(Received(SECOND, ended("1.1", 0, "old")))
    assert texts(job) == {} and not job.attempt.ended


def test_rank_that_its_agent_killed_after_a_lost_connection_is_no_failure(job: ObservedJob) -> None:
    job.attempts, job.attempt = 1, Attempt(job.plan, "2.1")
    job._take(Lost(SECOND, "the connection ended"))
    job._take(Received(SECOND, ended("2.1", 1, "killed")))
    assert texts(job) == {1: "killed"}
    assert not job.attempt.ended and not job.attempt.deaths


@pytest.mark.parametrize("framework", ["Torchrun", "MPI", "DLTrain"])
def test_rank_that_never_starts_fails_the_launch_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    """Fixed bug: without mpirun, a launch in which the agent of a pod started no process had no limit of time."""
    now_s = 5000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    command = () if framework == "DLTrain" else ("train",)
    job = make_job(tmp_path, make_plan(3, model=ModelRef(name="mlp", command=command, framework=framework)))
    monkeypatch.setattr(job.account, "tick", lambda unix_s: None)
    job.attempt = attempt = Attempt(job.plan, "1.1", now_s)
    now_s += LAUNCH_LIMIT_S + 1
    job._tick()
    assert not attempt.troubled, "copies of checkpoints, which pods make before, have no limit"
    attempt.launched_s, attempt.launcher_runs = now_s, framework != "Torchrun"
    for rank in (0, 1):
        job._take(Received(FIRST, RankUp(attempt="1.1", rank=rank, pid=1)))
    now_s += LAUNCH_LIMIT_S
    job._tick()
    assert not attempt.troubled
    now_s += 1
    job._tick()
    job._tick()
    late, failure = job.plan.ranks[2], diagnose(attempt)
    assert attempt.troubled and len(attempt.failures) == 1
    assert (failure.reason, failure.rank, failure.host) == ("LaunchFailed", 2, late.pod)
    assert failure.retry and failure.counts and f"found no process of ranks 2 ({late.pod}) after" in failure.message
    assert ("ports of their agents and of MPI" in failure.message) == attempt.launcher_runs


def test_plan_of_the_operator_replaces_an_edited_one_with_a_higher_number(job: ObservedJob) -> None:
    """Fixed bug: the agents went on with a plan that a user had edited, until their pods restarted."""
    own = job.plan
    job._take(own.model_copy(update={"number": 99, "global_batch": 240}))
    edited = job.events.new_plan
    assert edited is not None and edited.number == 99
    job.events.new_plan = None
    job.adopt(edited)
    job._take(own)
    assert job.events.new_plan == own


def test_edited_plan_is_not_adopted_if_the_operator_has_replaced_it_meanwhile(job: ObservedJob) -> None:
    """The ranks write a checkpoint before the coordinator adopts a plan, which takes longer than the replacement."""
    own = job.plan
    job._take(own.model_copy(update={"number": 99, "global_batch": 240}))
    job._take(own)
    assert job.events.new_plan == own and job.plan == own


def test_new_number_of_the_same_training_restarts_nothing(job: ObservedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.membership, "call", lambda plan: None)
    later = job.plan.model_copy(update={"number": 7})
    job._take(later)
    assert job.plan == later and job.events.new_plan is None


def test_next_coordinator_continues_to_count_for_the_patience(tmp_path: Path) -> None:
    """A job without a checkpoint volume has no run report. The report to the operator has the count."""
    plan = make_plan(3, until=Until(metric="accuracy", at_least=0.99, patience=3))
    first = make_job(tmp_path, plan)
    assert first.stopping_rule is not None
    for step, accuracy in ((10, 0.7), (20, 0.6), (30, 0.6)):
        assert first.stopping_rule.record(Evaluated(rank=0, step=step, accuracy=accuracy)) is None
    sent = Report.parse(first._report().to_json())
    for uid, stops in ((plan.uid, True), ("another", False)):
        rule = make_job(tmp_path, plan.model_copy(update={"number": 2, "uid": uid}), sent).stopping_rule
        assert rule is not None
        assert rule.record(Evaluated(rank=0, step=30, accuracy=0.6)) is None
        assert (rule.record(Evaluated(rank=0, step=40, accuracy=0.6)) is not None) == stops


def test_report_has_the_memory_of_the_pod_that_needed_the_most(tmp_path: Path) -> None:
    plan = make_plan(3)
    job = make_job(tmp_path, plan)
    assert job._report().pod_memory is None
    job.attempts, job.attempt = 1, Attempt(plan, "2.1")
    sent = [(FIRST, "2.1", 500), (SECOND, "2.1", 900), (FIRST, "2.1", 700), (FIRST, "1.9", 5000), ("x", "2.1", 6000)]
    for pod, attempt, nbytes in sent:
        job._take(Received(pod, PodMemoryPeak(attempt=attempt, nbytes=nbytes)))
    found = job._report().pod_memory
    assert found == PodMemory(pod=SECOND, ranks=1, peak_nbytes=900)
    later = job._report()
    assert make_job(tmp_path, plan, later)._report().pod_memory == found, "another pod coordinates now"
    larger = plan.model_copy(update={"steps": 2 * (plan.steps or 1)})
    assert make_job(tmp_path, larger, later)._report().pod_memory is None, "it was another plan"
    job.adopt(larger)
    assert job._report().pod_memory is None


@pytest.mark.parametrize(
    ("changes", "known"),
    [({"steps": 7}, (1, 2)), ({"global_batch": 240}, ()), ({"model": {"name": "another"}}, ())],
    ids=["the same script", "another batch", "another model"],
)
def test_numbers_of_ranks_that_the_script_refuses_outlive_the_plan(
    job: ObservedJob, changes: dict[str, Any], known: tuple[int, ...]
) -> None:
    """Regression: with another layout, the job tried each of them again when it lost pods."""
    job.ledger.refused_sizes = tuple(RefusedSize(ranks=ranks, message="ValueError") for ranks in (1, 2))
    model = job.plan.model.model_copy(update=changes.get("model", {}))
    job.adopt(job.plan.model_copy(update={**changes, "model": model}))
    assert tuple(size.ranks for size in job._report().refused_sizes) == known


def test_numbers_of_ranks_that_the_script_refused_under_earlier_plans_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: the pods of a job that moved to other nodes tried each of them again when the job lost pods."""
    before = make_plan(3)
    sent = make_job(tmp_path, before)._report()
    plan = before.model_copy(update={"number": 2, "steps": 7, "refused_ranks": (2,)})
    job = make_job(tmp_path, plan, sent)
    assert [size.ranks for size in job._report().refused_sizes] == [2]
    monkeypatch.setattr(Membership, "present", plan.pods[:2])
    assert job.launchable is None
    job.adopt(plan.model_copy(update={"steps": 8, "refused_ranks": (1, 2)}))
    assert sorted(size.ranks for size in job._report().refused_sizes) == [1, 2]


def test_job_whose_data_stream_is_read_by_each_rank_waits_for_its_lost_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed bug: it was launched on the other pods, and failed with BadInput, which is not tried again."""
    plan = make_plan(3, shares=(40, 40, 40), min_ranks=1)
    job = make_job(tmp_path, plan)
    monkeypatch.setattr(Membership, "present", plan.pods[:2])
    assert job.launchable is not None and len(job.launchable.ranks) == 2
    update = Step(rank=0, step=4, steps=9, step_s=1.0, samples_per_s=1.0, world_size=3, bound_ranks=3)
    job.ledger.record(update, 0.0)
    assert job.launchable is None
    assert make_job(tmp_path, plan, job._report()).launchable is None, "another coordinator waits, too"
    monkeypatch.setattr(Membership, "present", plan.pods)
    assert job.launchable is plan


def test_smaller_plan_has_no_refused_numbers_beyond_its_own(job: ObservedJob) -> None:
    job.ledger.refused_sizes = tuple(RefusedSize(ranks=ranks, message="ValueError") for ranks in (1, 2))
    job.adopt(job.plan.model_copy(update={"ranks": job.plan.ranks[:2]}))
    assert tuple(size.ranks for size in job._report().refused_sizes) == (1,)


@pytest.mark.parametrize(
    ("replicas", "parts"), [(1, (100, 200, 300, 400)), (2, (300, 400))], ids=["one replica", "two replicas"]
)
def test_report_has_the_memory_of_each_part_of_a_split_model(
    replicas: int, parts: tuple[int, ...], tmp_path: Path
) -> None:
    plan = make_plan(4, shares=[8 // replicas] * 4, global_batch=8, parallelism="Pipeline", micro_batches=2, min_ranks=4,
                     replicas=replicas)  # fmt: skip
    job = make_job(tmp_path, plan)
    job.attempts, job.attempt = 1, Attempt(plan, "2.1")
    for rank in plan.ranks:
        own = {rank.rank: 100 * (rank.rank + 1), 99: 10**6, (rank.rank + 1) % 4: 7000}
        job._take(Received(rank.pod, PodMemoryPeak(attempt="2.1", nbytes=500, ranks=own)))
    found = job._report().pod_memory
    assert found is not None and (found.pod, found.parts) == (FIRST, parts), "no pod speaks for the ranks of others"
    later = job._report()
    assert make_job(tmp_path, plan, later)._report().pod_memory == found, "another pod coordinates now"
    job._take(Received(FIRST, PodMemoryPeak(attempt="2.1", nbytes=400, ranks={0: 900, 1: 7000})))
    found = job._report().pod_memory
    assert found is not None and (found.peak_nbytes, found.parts[0], found.parts[1:]) == (500, 900, parts[1:])


def test_absurd_memory_is_not_reported(job: ObservedJob) -> None:
    job.attempts, job.attempt = 1, Attempt(job.plan, "2.1")
    for nbytes in (-5, 0, MAX_POD_NBYTES + 1, 10**30):
        job._take(Received(FIRST, PodMemoryPeak(attempt="2.1", nbytes=nbytes)))
    assert job._report().pod_memory is None


@pytest.mark.parametrize("end", [Prepared(attempt="2.1"), AttemptEnded(attempt="2.0"), None], ids=str)
def test_report_says_that_killed_processes_have_not_ended(job: ObservedJob, end: Any) -> None:
    """Fixed bug: with a rank in uninterruptible I/O, a job stood still, and nothing said why."""
    job.ledger.phase, job.attempt = RunPhase.RESTARTING, Attempt(job.plan, "2.1", time.monotonic())
    assert job._report().waits_for is None
    job._take(Received(SECOND, StillEnding(processes="rank 1 (process 7, state D)")))
    text = job._report().waits_for
    assert text is not None and text.startswith(f"pod {SECOND}: killed, but not ended: rank 1 (process 7, state D). ")
    job.ledger.phase = RunPhase.RUNNING
    assert job._report().waits_for is None
    job.ledger.phase = RunPhase.RESTARTING
    job._take(Lost(SECOND, "the connection ended") if end is None else Received(SECOND, end))
    assert job._report().waits_for is None


def test_report_names_pods_that_are_absent_or_prepare_for_long(job: ObservedJob) -> None:
    job.ledger.phase = RunPhase.WAITING
    assert job._report().waits_for == f"not connected: {', '.join(job.plan.pods)}"
    job.attempt = Attempt(job.plan, "1.1", time.monotonic())
    job.prepared.add(FIRST)
    assert job._report().waits_for is None, "for so short a time, nobody needs to know"
    job.attempt.started_s -= PREPARE_S + 1
    text = job._report().waits_for
    assert text is not None and text.endswith(f": {', '.join(pod for pod in job.plan.pods if pod != FIRST)}")
    job.prepared.update(job.plan.pods)
    job.attempt.up.update(range(1, 3))
    assert job._report().waits_for == f"these ranks have not started: 0 ({FIRST})"
    job.attempt.up.add(0)
    assert job._report().waits_for is None
