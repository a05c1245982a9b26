"""Refuse changes of a spec that contradict the training of the job, if the API server has not refused them.

The API server lacks the rules if the CRD is older than the operator. It also admits a change that a user writes before
the status shows that training has begun. The job then continues with the spec of its plan.
"""

from dataclasses import dataclass

from dlcontract import Report
from dljob.api import DLJobSpec, DLJobStatus, PlanningMode
from dljob.api.changes import refused_change, with_immediate_fields
from dljob.job.plan.stored import StoredPlan, spec_digest
from dljob.status import FALSE, TRUE, Verdict, find
from dljob.status.build import last_checkpoint


@dataclass(frozen=True)
class Followed:
    """The spec that the operator follows: the job's spec, or the spec of its plan if a change was refused.

    ``digest``: hash of the spec's fields on which plans and pods depend. ``refusal``: the condition Accepted with the
    status False, which says why a change was refused; None if no change was.
    """

    spec: DLJobSpec
    digest: str
    refusal: Verdict | None = None


def followed(
    spec: DLJobSpec, digest: str, before: DLJobStatus, accepted: StoredPlan | None, report: Report | None
) -> Followed:
    """Return the spec that the operator follows for a job that has not ended. ``digest``: digest of ``spec``.

    If the change from the plan's spec to ``spec`` is refused, the operator follows the plan's spec, with the fields of
    ``spec`` that take effect at once, so that a user can always suspend the job. ``before`` (the job's status) and
    ``report`` (of its coordinator) show whether training has begun, after which more changes are refused.
    """
    if accepted is None or accepted.spec_digest == digest or (planned := accepted.accepted_spec()) is None:
        return Followed(spec, digest)
    stepped = report is not None and report.step > 0 and accepted.plan.checkpoint.enabled
    saved = report is not None and last_checkpoint(report, None) is not None
    refused = refused_change(planned, spec, before, begun=stepped or saved)
    if refused is None:
        return Followed(spec, digest)
    text = f"{refused.message}. {_kept(spec, accepted.plan.number)}"
    refusal = Verdict("Accepted", FALSE, "ChangeRefused", text)
    return Followed(with_immediate_fields(planned, spec), accepted.spec_digest, refusal)


def _kept(spec: DLJobSpec, number: int) -> str:
    """Return a sentence that says what a job does after a refused change to ``spec``. ``number``: of its plan."""
    stops = "suspend: true" if spec.suspend else "planning.mode: PlanOnly"
    if spec.suspend or spec.planning.mode is PlanningMode.PLAN_ONLY:
        return f"Its pods stop ({stops}). In all else, the job keeps the spec of plan {number}"
    return f"The job continues with the spec of plan {number}"


def after_end(spec: DLJobSpec, generation: int, before: DLJobStatus, accepted: StoredPlan | None) -> Verdict | None:
    """Return the condition Accepted that reports a change of the spec after the job's end; None if it need not change.

    The status of the condition is False if the changed spec contradicts the training, and True if the user has then
    changed the spec back. ``generation``: generation of ``spec``. If the status has the same generation, an earlier
    reconcile has checked the spec, and the result is None.
    """
    if accepted is None or generation == before.observed_generation:
        return None
    if accepted.spec_digest == spec_digest(spec):
        was = find(before.conditions, "Accepted")
        back = was is not None and was.reason == "JobEnded"
        return Verdict("Accepted", TRUE, "Accepted", "the spec matches the job's plan again") if back else None
    planned = accepted.accepted_spec()
    refused = refused_change(planned, spec, before) if planned is not None else None
    return None if refused is None else Verdict("Accepted", FALSE, "JobEnded", refused.message)
