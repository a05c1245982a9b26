"""Tests of the decision that a training is good enough."""

import pytest

from dlcontract import StoppedEarly, Until
from dltrain.protocol.rank_messages import Evaluated, Logged, RankMessage, Step
from dltrain.record.run_report.history import History
from dltrain.record.stopping_rule import StoppingRule
from support.trainer.plans import make_plan


def evaluated(step: int, accuracy: float) -> Evaluated:
    return Evaluated(rank=0, step=step, accuracy=accuracy)


def logged(step: int, **values: float) -> Logged:
    return Logged(rank=0, step=step, values=values)


def loss(step: int, value: float | None) -> Step:
    return Step(rank=0, step=step, steps=9, loss=value, step_s=1.0, samples_per_s=1.0, world_size=1)


def decided(until: Until, *messages: RankMessage) -> list[tuple[int, str] | None]:
    """Return (step, reason) or None after each message."""
    rule = StoppingRule(until)
    found = [rule.record(message) for message in messages]
    return [None if each is None else (each[0], each[1].reason) for each in found]


@pytest.mark.parametrize(
    ("until", "message"),
    [
        (Until(metric="accuracy", at_least=0.9), evaluated(5, 0.9)),
        (Until(metric="loss", at_most=0.5), loss(5, 0.25)),
        (Until(metric="val/loss", at_most=0.0), logged(5, **{"val/loss": -1.0})),
        (Until(metric="bleu", at_least=30), logged(5, bleu=31, other=1)),
    ],
    ids=["accuracy", "loss", "logged, at most", "logged, at least"],
)
def test_target_is_reached(until: Until, message: RankMessage) -> None:
    assert decided(until, message) == [(5, "TargetReached")]


def test_other_values_decide_nothing() -> None:
    until = Until(metric="accuracy", at_least=0.9)
    assert decided(until, evaluated(1, 0.89), loss(2, 0.95), logged(3, bleu=2), loss(4, None)) == [None] * 4
    assert decided(until, logged(1, accuracy=95.0)) == [(1, "TargetReached")], "a script may log percentages"


def test_message_names_value_and_field() -> None:
    assert StoppingRule(Until(metric="accuracy", at_least=0.9)).record(evaluated(5, 0.925)) == (
        5, StoppedEarly(reason="TargetReached", message="accuracy: found 0.925 after step 5; spec.until.atLeast is 0.9"),
    )  # fmt: skip


def test_patience_counts_values_without_an_improvement() -> None:
    until = Until(metric="accuracy", at_least=0.99, patience=2)
    values = [0.5, 0.6, 0.6, 0.7, 0.7, 0.69]
    found = decided(until, *(evaluated(step, value) for step, value in enumerate(values, 1)))
    assert found == [None] * 5 + [(6, "NoImprovement")]
    lower = Until(metric="val", at_most=0.1, patience=1)
    assert decided(lower, logged(1, val=3.0), logged(2, val=2.0), logged(3, val=2.5))[-1] == (3, "NoImprovement")


def test_repeated_steps_do_not_count_twice() -> None:
    rule = StoppingRule(Until(metric="accuracy", at_least=0.99, patience=2))
    for step, value in ((1, 0.5), (2, 0.4), (2, 0.4), (1, 0.5), (2, 0.45)):
        assert rule.record(evaluated(step, value)) is None
    assert rule.values == ((1, 0.5), (2, 0.45))
    assert rule.record(evaluated(3, 0.5)) is not None


def test_loss_that_a_script_repeats_is_one_value() -> None:
    rule = StoppingRule(Until(metric="loss", at_most=0.1, patience=2))
    assert [rule.record(loss(step, 0.5)) for step in range(1, 9)] == [None] * 8
    assert rule.values == ((1, 0.5),)


def test_next_coordinator_continues_with_the_values_of_the_run_report() -> None:
    plan = make_plan()
    history = History(plan, 0.0)
    history.begin_attempt(plan, plan, 0.0)
    for message in (loss(1, 2.0), evaluated(1, 0.5), logged(1, bleu=30), evaluated(2, 0.4)):
        history.record(message, 0, 1.0)
    assert history.values("accuracy") == [(1, 0.5), (2, 0.4)]
    assert history.values("bleu") == [(1, 30.0)] and history.values("loss") == [(1, 2.0)]
    rule = StoppingRule(Until(metric="accuracy", at_least=0.9, patience=2), history.values("accuracy"))
    assert rule.record(evaluated(3, 0.45)) is not None


def test_patience_goes_on_after_a_change_of_the_plan() -> None:
    """Fixed bug: the values came from the run report, which keeps a part of many, so that patience counted fewer."""
    until = Until(metric="accuracy", at_least=0.99, patience=1000)
    rule = StoppingRule(until)
    for step in range(1000):
        assert rule.record(evaluated(step, 0.5)) is None
    more = rule.continued(until.model_copy(update={"at_least": 0.9}))
    assert more is not None and (found := more.record(evaluated(1000, 0.5))) is not None
    assert found[1].reason == "NoImprovement"
    assert rule.continued(Until(metric="loss", at_most=0.1)) is None


PATIENT = Until(metric="accuracy", at_least=0.99, patience=700)


def first_coordinator(until: Until = PATIENT) -> StoppingRule:
    """Return a rule with 1000 values, of which that of step 401 is the best."""
    rule = StoppingRule(until)
    for step in range(1000):
        assert rule.record(evaluated(step, 0.6 if step == 401 else 0.5)) is None
    return rule


def next_coordinator(rule: StoppingRule, until: Until = PATIENT, *, with_report: bool = True) -> StoppingRule:
    """Return the rule of a coordinator that has the run report, which lacks every second value, or has none."""
    return StoppingRule(until, rule.values[::2] if with_report else (), rule.progress())


@pytest.mark.parametrize("with_report", [True, False])
@pytest.mark.parametrize("first", [1000, 950, 402], ids=["no step again", "some again", "most again"])
def test_patience_is_exact_under_the_next_coordinator(first: int, with_report: bool) -> None:
    """Fixed bug: it came from the run report, which has a part of many values, and could lack the best one."""
    rule = next_coordinator(first_coordinator(), with_report=with_report)
    progress = rule.progress()
    assert progress is not None and progress.best == 0.6
    for step in range(first, 401 + 700):
        assert rule.record(evaluated(step, 0.5)) is None, step
    found = rule.record(evaluated(401 + 700, 0.5))
    assert found is not None and found[1].reason == "NoImprovement"
    assert "no better than 0.6 after step 401" in found[1].message


def test_patience_is_exact_under_a_third_coordinator_in_the_middle_of_repeated_steps() -> None:
    second = next_coordinator(first_coordinator())
    for step in range(900, 950):
        assert second.record(evaluated(step, 0.5)) is None
    third = next_coordinator(second, with_report=False)
    for step in range(900, 401 + 700):
        assert third.record(evaluated(step, 0.5)) is None, step
    assert third.record(evaluated(401 + 700, 0.5)) is not None


def test_best_value_that_is_repeated_counts_from_there() -> None:
    rule = next_coordinator(first_coordinator())
    for step in range(300, 402 + 700):
        assert rule.record(evaluated(step, 0.6 if step == 402 else 0.5)) is None, step
    assert rule.record(evaluated(402 + 700, 0.5)) is not None


def test_better_value_under_the_next_coordinator_counts_from_there() -> None:
    rule = next_coordinator(first_coordinator())
    for step in range(1000, 1010 + 700):
        assert rule.record(evaluated(step, 0.7 if step == 1010 else 0.5)) is None, step
    assert rule.record(evaluated(1010 + 700, 0.5)) is not None


def test_count_of_another_metric_is_not_continued() -> None:
    handed = first_coordinator().progress()
    assert StoppingRule(Until(metric="loss", at_most=0.1), (), handed).progress() is None
    assert StoppingRule(Until(metric="accuracy", at_most=0.1), (), handed).progress() is None


def test_plan_that_changes_under_the_next_coordinator_keeps_the_count() -> None:
    rule = next_coordinator(first_coordinator()).continued(PATIENT.model_copy(update={"at_least": 0.9}))
    assert rule is not None
    for step in range(990, 401 + 700):
        assert rule.record(evaluated(step, 0.5)) is None, step
    assert rule.record(evaluated(401 + 700, 0.5)) is not None
