"""Fill in the spec of a job with ``spec.task`` from the suggestion of its look pod, which inspects the data.

Without a suggestion, say what the job waits for.
"""

from dataclasses import dataclass

from dljob.api import DLJobSpec, DLJobStatus
from dljob.api.changes import AS_BEGUN, CHANGE_REFUSED, has_begun, with_immediate_fields
from dljob.api.status.suggestion import SuggestionStatus
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.job.task.suggested_spec import suggested_spec, suggestion_status
from dljob.job.task.suggestion import Suggestion, printable, same_task, task_digest
from dljob.render import Names
from dljob.status import FALSE, Verdict

CONDITION = "DataInspected"


@dataclass(frozen=True)
class Looking:
    """A job that has no suggestion for its task yet. ``spec``: its spec, with the task.

    ``problem``: the condition DataInspected, if the look pod found an error of the data, or if its suggestion cannot be
    used; None while the look pod has not finished.
    """

    spec: DLJobSpec
    digest: str
    problem: Verdict | None = None


@dataclass(frozen=True)
class Completed:
    """The spec of a job with a task, completed by the suggestion.

    ``suggestion``: for the status; None if the stored plan had to replace a lost suggestion. ``refusal``: the condition
    Accepted, if a change of the task was refused.
    """

    spec: DLJobSpec
    suggestion: SuggestionStatus | None
    refusal: Verdict | None = None


def completed(
    observed: Observed, spec: DLJobSpec, before: DLJobStatus, accepted: StoredPlan | None, *, finished: bool
) -> Completed | Looking:
    """Return the completed spec, or what the job waits for.

    From the first step on, the job continues with the suggestion with which it began, as its checkpoint requires.
    ``finished``: True if the job has ended.
    """
    digest, names = task_digest(spec), Names.of(observed.job)
    begun = accepted is not None and (finished or has_begun(spec, before))
    found, problem = _suggestion(observed, names)
    if found is not None and found.model is not None and (found.digest == digest or begun):
        refusal = None
        if not same_task(found.digest, digest) and not finished:
            text = f"spec.task: found another task{AS_BEGUN}. The job continues with the former task"
            refusal = Verdict("Accepted", FALSE, CHANGE_REFUSED, text)
        try:
            own = suggested_spec(spec, found, names.suggestion, f"{observed.job.name}-{observed.job.uid}")
        except ValueError as error:
            text = f"the spec with the suggested model {found.model.name!r} is not valid: {printable(str(error), 1000)}"
            problem = Verdict(CONDITION, FALSE, "SuggestionNotValid", text)
        else:
            return Completed(own, suggestion_status(found, names.suggestion), refusal)
    if begun and accepted is not None and (planned := accepted.accepted_spec()) is not None:
        return Completed(with_immediate_fields(planned, spec), None)
    if problem is not None:
        return Looking(spec, digest, problem)
    if found is not None and found.error is not None and found.digest == digest:
        text = f"{found.error} Then {_again(names)}; or change the spec"
        return Looking(spec, digest, Verdict(CONDITION, FALSE, "DataNotUsable", text))
    return Looking(spec, digest)


def _suggestion(observed: Observed, names: Names) -> tuple[Suggestion | None, Verdict | None]:
    """Return the suggestion of this job, and the condition about one that cannot be read. Either may be None."""
    problem = observed.suggestion_problem
    if problem is None and observed.suggestion is not None:
        try:
            found = Suggestion.parse(observed.suggestion)
        except ValueError as error:
            problem = str(error)
        else:
            return (found if found.uid == observed.job.uid else None), None
    if problem is None:
        return None, None
    text = f"ConfigMap {names.suggestion}: {problem}. To look again, {_again(names)}"
    return None, Verdict(CONDITION, FALSE, "SuggestionNotValid", text)


def _again(names: Names) -> str:
    return f"delete the ConfigMap {names.suggestion}, so that a pod looks again"
