"""Rules that decide whether a failure of the ranks fails the job, and whether it counts towards the back-off limit.

They have the form of the rules in a Kubernetes Job's ``podFailurePolicy``. The coordinator evaluates rules about exit
codes and reasons with ``decided`` below. The operator evaluates rules about conditions of nodes and pods, later, in
``dljob.reconcile.failures.failure_conditions``.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field

from dlcontract.reasons import LAUNCH_FAILED
from dlcontract.record import Count, Record, Seconds, UntrustedRecord
from dlcontract.report import Failure


class ExitCodes(Record):
    operator: Literal["In", "NotIn"] = "In"
    values: tuple[int, ...]


class FailureRule(Record):
    """An action for the failures that match ``exit_codes`` or ``reasons``.

    If neither is set, the rule is about conditions of nodes or pods, which the coordinator (the agent that directs the
    job's other agents) cannot read. The rule then matches no failure, and is here only so that the rules after it have
    the same numbers as in the spec. The operator applies the rule, see ``FailureAllowance``.
    """

    action: Annotated[
        Literal["FailJob", "Ignore", "Count"],
        Field(
            description="FailJob: the job fails. Ignore: the ranks restart, and the failure does not count towards "
            "backoff_limit. Count: the ranks restart, and the failure counts towards backoff_limit."
        ),
    ]
    exit_codes: ExitCodes | None = None
    reasons: tuple[str, ...] = ()

    def matches(self, failure: Failure) -> bool:
        """Return True if the rule applies to ``failure``.

        A rule with ``exit_codes`` applies if a rank had started and ended with a code other than 0, and if this code is
        (In) or is not (NotIn) one of ``exit_codes.values``. A rule with ``reasons`` applies if it lists the reason of
        the failure. A rule with neither never applies.
        """
        if self.exit_codes is None:
            return failure.reason in self.reasons
        inside = failure.exit_code in self.exit_codes.values
        ran = failure.rank is not None and failure.reason != LAUNCH_FAILED
        return ran and bool(failure.exit_code) and inside is (self.exit_codes.operator == "In")


class FailureAllowance(UntrustedRecord):
    """A message from the operator to the coordinator: how many failures do not count because of node or pod conditions.

    Only the operator can read these conditions, but the coordinator (the agent that directs the job's other agents)
    counts the failures. The message is a part of the operator's record of failures, in the plan's ConfigMap under
    ``FAILURES_KEY``. The record exists only for jobs with rules about conditions of nodes and pods, or with pods that
    were evicted because of their storage. Agents of earlier releases do not read it.
    """

    ignored: Annotated[
        Count,
        Field(
            description="Failures that the coordinator counted towards backoff_limit, but that a rule with the action "
            "Ignore excludes."
        ),
    ] = 0
    wait_s: Annotated[
        Seconds,
        Field(
            description="Seconds that the coordinator waits when failures exceed backoff_limit, because the operator "
            "may still ignore the last one and raise the field ignored. If it does not, the job fails."
        ),
    ] = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the allowance from JSON. Raise a ValueError that names the field if it is invalid."""
        return cls.model_validate_json(text)


def matching(rules: Sequence[FailureRule], failure: Failure) -> bool:
    """Return True if at least one of the rules matches the failure."""
    return any(rule.matches(failure) for rule in rules)


def decided(rules: Sequence[FailureRule], failure: Failure) -> Failure:
    """Return ``failure`` after the action of the first rule that matches it.

    FailJob: a copy with ``retry`` False and ``counts`` True, so that the job fails at once. Ignore: a copy with
    ``counts`` False, so that the failure does not count towards the back-off limit. In both cases, the message of the
    copy names the rule. Count, or no rule that matches: ``failure`` itself. Rules do not apply to failures that cannot
    succeed on a retry, such as invalid input, nor to those that never count because the cluster has caused them, such
    as a drained node.
    """
    if not failure.retry or not failure.counts:
        return failure
    for number, rule in enumerate(rules):
        if not rule.matches(failure):
            continue
        if rule.action == "Count":
            return failure
        message = f"{failure.message}; spec.runPolicy.failureRules[{number}] says {rule.action}"
        stop = rule.action == "FailJob"
        return failure.model_copy(update={"message": message[-4096:], "retry": not stop, "counts": stop})
    return failure
