"""Tests of failure rules: which rule matches a failure, and what it decides."""

from typing import Any

import pytest

from dlcontract import ExitCodes, Failure, FailureRule, decided, reasons
from dljob.api import DLJobSpec, FailureReason
from dljob.job.plan.trainer import failure_rule
from support.builders import DIGITS

FAIL = FailureRule(action="FailJob", exit_codes=ExitCodes(values=(3, 4)))
IGNORE = FailureRule(action="Ignore", reasons=("RankKilled",))
COUNT = FailureRule(action="Count", reasons=("RankKilled",))
OTHERS = FailureRule(action="FailJob", exit_codes=ExitCodes(operator="NotIn", values=(3, 137)))

CASES: dict[str, tuple[tuple[FailureRule, ...], dict[str, Any], tuple[bool, bool]]] = {
    # rules, failure, (counts, retry) that they decide
    "no rule": ((), {"exit_code": 3}, (True, True)),
    "exit code in the values": ((FAIL,), {"exit_code": 4}, (True, False)),
    "exit code not in the values": ((FAIL,), {"exit_code": 5}, (True, True)),
    "NotIn": ((OTHERS,), {"exit_code": 5}, (True, False)),
    "NotIn, and the code is in the values": ((OTHERS,), {"exit_code": 137}, (True, True)),
    "a failure without an exit code": ((OTHERS,), {"exit_code": None}, (True, True)),
    "exit code of mpirun": ((FAIL,), {"exit_code": 3, "rank": None}, (True, True)),
    "a rank that did not start": ((OTHERS,), {"exit_code": 126, "reason": "LaunchFailed"}, (True, True)),
    "exit code 0": ((OTHERS,), {"exit_code": 0}, (True, True)),
    "reason": ((IGNORE,), {"reason": "RankKilled", "exit_code": 137}, (False, True)),
    "another reason": ((IGNORE,), {"reason": "Hung"}, (True, True)),
    "the first rule decides": ((COUNT, IGNORE), {"reason": "RankKilled"}, (True, True)),
    "a later rule": ((FAIL, IGNORE), {"reason": "RankKilled", "exit_code": 137}, (False, True)),
    "invalid input fails the job": ((IGNORE,), {"reason": "RankKilled", "retry": False}, (True, False)),
    "what the cluster caused never counts": ((FAIL,), {"exit_code": 3, "counts": False}, (False, True)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_first_matching_rule_decides(case: tuple[tuple[FailureRule, ...], dict[str, Any], tuple[bool, bool]]) -> None:
    rules, fields, expected = case
    failure = Failure(**({"reason": "RankFailed", "message": "as it said", "rank": 0} | fields))
    found = decided(rules, failure)
    assert (found.counts, found.retry) == expected
    assert found.model_copy(update={"counts": failure.counts, "retry": failure.retry, "message": ""}) == (
        failure.model_copy(update={"message": ""})
    )
    assert ("spec.runPolicy.failureRules[" in found.message) == (found != failure)


def test_rules_of_the_spec_reach_the_plan() -> None:
    given = [
        {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [3, 137]}},
        {"action": "Ignore", "onReasons": ["RankKilled"]},
    ]
    spec = DLJobSpec.model_validate({**DIGITS, "runPolicy": {"failureRules": given}})
    assert tuple(map(failure_rule, spec.run_policy.failure_rules)) == (OTHERS, IGNORE)


def test_rule_about_conditions_matches_nothing_in_the_plan_and_keeps_the_numbers() -> None:
    given = [
        {"action": "FailJob", "onNodeConditions": [{"type": "GpuUnhealthy"}]},
        {"action": "Ignore", "onReasons": ["RankKilled"]},
    ]
    spec = DLJobSpec.model_validate({**DIGITS, "runPolicy": {"failureRules": given}})
    rules = tuple(map(failure_rule, spec.run_policy.failure_rules))
    failure = Failure(reason="RankKilled", message="", rank=0, exit_code=137)
    assert [rule.matches(failure) for rule in rules] == [False, True]
    assert "failureRules[1]" in decided(rules, failure).message


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"action": "FailJob"}, "onExitCodes"),
        ({"action": "FailJob", "onExitCodes": {"values": [1]}, "onReasons": ["Hung"]}, "onExitCodes"),
        ({"action": "FailJob", "onExitCodes": {"values": []}}, "values"),
        ({"action": "FailJob", "onExitCodes": {"values": [0]}}, "values"),
        ({"action": "FailJob", "onReasons": ["PodStopped"]}, "onReasons"),
        ({"action": "Restart", "onReasons": ["Hung"]}, "action"),
        ({"action": "Ignore", "onNodeConditions": []}, "onNodeConditions"),
        ({"action": "Ignore", "onNodeConditions": [{"type": "Ready", "status": "unknown"}]}, "status"),
        ({"action": "Ignore", "onNodeConditions": [{"type": "GPU broken"}]}, "type"),
        ({"action": "Ignore", "onPodConditions": [{"type": "Ready"}]}, "onPodConditions"),
    ],
)
def test_invalid_rule_is_refused_with_its_field(rule: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        DLJobSpec.model_validate({**DIGITS, "runPolicy": {"failureRules": [rule]}})


def test_rules_name_every_reason_that_counts_and_may_be_retried() -> None:
    names = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    others = {reasons.BAD_INPUT, *reasons.OF_CLUSTER, *reasons.OF_COMPLETION, *reasons.OF_UPLOADS}
    assert {reason.value for reason in FailureReason} == names - others
