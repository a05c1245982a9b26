"""Tests of the ledger, in which the coordinator notes what ranks say: hang limits, and the report."""

import pytest

from dlcontract import Failure, Mismatch, Outcome, ProbePoint, RankMeasure, Report, RunPhase
from dltrain.protocol.rank_messages import Busy, Finished, Hello, Mark, Probed, Shrunk, Step
from dltrain.record.hang_detection import START_DEADLINE_S
from dltrain.record.ledger import Ledger
from support.trainer.plans import make_plan

PLAN = make_plan(3, global_batch=3, steps=10)


def step(rank: int, number: int, step_s: float = 0.1, device: str = "cpu") -> Step:
    measure = RankMeasure(rank=rank, device=device, share=1)
    return Step(
        rank=rank, step=number, steps=10, step_s=step_s, samples_per_s=1, world_size=3, measure=measure, loss=1.0
    )


def test_step_time_of_another_plan_is_not_reported() -> None:
    """Fixed bug: after a move to other devices, the remaining time followed from the step time on the former ones."""
    ledger = Ledger(PLAN, None)
    ledger.record(step(0, 4, step_s=2.0), 0.0)
    before = ledger.report(5.0)
    again = Ledger(PLAN, before).report(6.0)
    assert (again.step, again.step_s, again.samples_per_s) == (4, 2.0, 1)
    moved = Ledger(PLAN.model_copy(update={"number": 2}), before).report(6.0)
    assert (moved.step, moved.steps, moved.step_s, moved.samples_per_s) == (4, 10, None, None)


def test_ranks_to_which_a_data_stream_binds_the_training_are_reported() -> None:
    ledger = Ledger(PLAN, None)
    ledger.record(step(0, 4).model_copy(update={"bound_ranks": 3}), 0.0)
    ledger.begin_attempt(PLAN, 1.0)
    before = ledger.report(5.0)
    assert before.bound_ranks == 3
    again = Ledger(PLAN.model_copy(update={"number": 2}), before)
    assert again.report(6.0).bound_ranks == 3, "until the first step of the next attempt says otherwise"
    again.record(step(0, 5), 7.0)
    assert again.report(8.0).bound_ranks is None


def test_hang_deadline_follows_the_step_time_of_the_rank() -> None:
    ledger = Ledger(PLAN, None, hang_min_s=5.0)
    ledger.record(Hello(rank=0, pid=1), 0.0)
    assert ledger.silent_rank(START_DEADLINE_S - 1) is None and ledger.silent_rank(START_DEADLINE_S + 1) == (0, 901.0)
    ledger.record(step(0, 1, step_s=0.1), 100.0)
    ledger.record(step(1, 1, step_s=2.0), 100.0)
    assert ledger.silent_rank(104.9) is None
    assert ledger.silent_rank(105.5) == (0, 5.5), "five seconds at least"
    ledger.record(step(1, 1, step_s=9.0).model_copy(update={"typical_s": 2.0}), 100.0)  # one of its steps was long
    ledger.record(step(0, 2), 119.9)
    assert ledger.silent_rank(119.95) is None and ledger.silent_rank(120.5) == (1, 20.5), "ten median steps"
    ledger.record(Busy(rank=1, what="evaluation", limit_s=60), 121.0)
    ledger.record(step(0, 3), 185.0)
    assert ledger.silent_rank(185.0) is None and ledger.silent_rank(187.0) == (1, 66.0)
    ledger.forget_rank(1)
    assert ledger.silent_rank(187.0) is None


def test_time_without_a_processor_is_no_silence() -> None:
    ledger = Ledger(PLAN, None, hang_min_s=5.0)
    ledger.record(step(0, 1), 100.0)
    ledger.record(step(1, 1), 100.0)
    ledger.excuse(3.0)
    assert ledger.silent_rank(107.9) is None and ledger.silent_rank(108.1) == (1, pytest.approx(8.1))
    ledger.record(step(1, 2), 108.0)
    ledger.excuse(1000.0)
    assert ledger.silent_rank(154.9) is None, "limit and excuses of ten times the limit"
    assert ledger.silent_rank(155.1) == (0, pytest.approx(55.1)), "a rank that really hangs is found"


def test_report_contains_all_updates_and_survives_the_coordinator() -> None:
    ledger = Ledger(PLAN, None)
    assert ledger.report(1.0).phase is RunPhase.WAITING
    for rank, unix_s in ((0, 10.0), (2, 12.0), (1, 11.0)):
        ledger.record(Mark(rank=rank, what="imported", unix_s=unix_s), 0.0)
    assert ledger.record(Mark(rank=0, what="first_step", unix_s=20.0), 0.0), "it needs a report at once"
    assert ledger.record(step(0, 1), 0.0) and not ledger.record(step(0, 2), 0.0), (
        "only the first step of an attempt needs a report at once"
    )
    ledger.restarts, ledger.failures = {"RankKilled": 2}, 2
    ledger.failure = Failure(reason="RankKilled", message="as it said")
    report = Report.parse(ledger.report(30.0).to_json())
    assert (report.step, report.steps, report.world_size, report.loss) == (2, 10, 3, 1.0)
    assert report.startup.imported_unix_s == 12.0, "the last rank's"
    assert report.startup.first_step_unix_s == 20.0
    again = Ledger(PLAN, report)
    assert (again.restarts, again.failures, again.startup) == ({"RankKilled": 2}, 2, report.startup)
    assert (again.report(31.0).step, again.report(31.0).steps, again.report(31.0).loss) == (2, 10, 1.0), (
        "the reported step does not decrease"
    )
    other_job = Ledger(PLAN.model_copy(update={"uid": "other"}), report)
    assert other_job.restarts == {} and other_job.failure is None


def test_mismatched_rank_is_reported_and_its_probe_ignored() -> None:
    ledger = Ledger(PLAN, None)
    point = ProbePoint(device="cpu", batch=1, compute_s=0.1)
    ledger.record(Hello(rank=0, pid=1, device="cpu"), 0.0)
    assert ledger.record(Hello(rank=1, pid=1, device="slow"), 0.0), "it needs a report at once"
    ledger.record(Hello(rank=2, pid=1), 0.0)
    ledger.record(Probed(rank=1, points=(point.model_copy(update={"device": "slow"}),)), 0.0)
    ledger.record(Probed(rank=0, points=(point,), link_latency_s=1e-4), 0.0)
    report = ledger.report(0.0)
    assert report.mismatches == (Mismatch(rank=1, planned="cpu", found="slow"),)
    assert report.probes == (point,) and report.link_latency_s == 1e-4


def test_outcome_reaches_the_report() -> None:
    ledger = Ledger(PLAN, None)
    ledger.record(Finished(rank=0, outcome=Outcome(steps=10, seconds=5, accuracy=0.9)), 0.0)
    assert ledger.report(0.0).accuracy == 0.9


def test_report_follows_the_remaining_ranks() -> None:
    ledger = Ledger(PLAN, None)
    for rank in range(3):
        ledger.record(step(rank, 4, step_s=2.0), 0.0)
    assert ledger.gain_s(1, 3) == (10 - 4) * 2.0 / 3
    shrunk = Shrunk(rank=1, step=4, alive=(1, 2), shrink_s=0.1)
    assert ledger.record(shrunk, 0.0) and not ledger.record(shrunk.model_copy(update={"rank": 2}), 0.0)
    assert ledger.report(0.0).world_size == 2 and [m.rank for m in ledger.report(0.0).ranks] == [1, 2]
    ledger.record(step(2, 6), 0.0)
    assert ledger.report(0.0).step == 4, "rank 1 represents the job now"
    ledger.record(step(1, 7), 0.0)
    assert ledger.report(0.0).step == 7
