"""Rules that decide what a failure of the ranks leads to, in the words of a Job's ``podFailurePolicy``."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from dlcontract.reasons import LAUNCH_FAILED
from dlcontract.record import Record
from dlcontract.report import Failure


class ExitCodes(Record):
    operator: Literal["In", "NotIn"] = "In"
    values: tuple[int, ...]


class FailureRule(Record):
    """An action for the failures that match ``exit_codes`` or ``reasons``. Exactly one of the two is set."""

    action: Annotated[
        Literal["FailJob", "Ignore", "Count"],
        Field(
            description="FailJob: the job fails. Ignore: the ranks restart, and the failure does not count towards "
            "backoff_limit. Count: it counts."
        ),
    ]
    exit_codes: ExitCodes | None = None
    reasons: tuple[str, ...] = ()

    def matches(self, failure: Failure) -> bool:
        """Return True if the rule applies. Exit codes are those of ranks that ran, and never 0."""
        if self.exit_codes is None:
            return failure.reason in self.reasons
        inside = failure.exit_code in self.exit_codes.values
        ran = failure.rank is not None and failure.reason != LAUNCH_FAILED
        return ran and bool(failure.exit_code) and inside is (self.exit_codes.operator == "In")


def decided(rules: Sequence[FailureRule], failure: Failure) -> Failure:
    """Return ``failure`` with ``counts`` and ``retry`` as the first rule that matches says.

    Rules do not apply to failures that cannot succeed on a retry, such as invalid input, nor to those that never count
    because the cluster has caused them, such as a drained node.
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
