"""Parse the spec, status, plan and report of an observed job, and describe errors in the spec and the report."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pydantic import ValidationError

from dlcontract import Report
from dljob.api import DLJobSpec, DLJobStatus, PlanningMode
from dljob.api.changes import planned_fields
from dljob.api.crd import JOB_NAME_RULE
from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.api.overrides import OverridePolicy
from dljob.api.status.suggestion import SuggestionStatus
from dljob.job.defaults import applied, with_defaults
from dljob.job.observed import Observed, queued_elsewhere
from dljob.job.plan.stored import StoredPlan, spec_digest
from dljob.job.spec_errors import in_words
from dljob.job.waiting import NODES_NOT_PROVIDED, START_TIMED_OUT
from dljob.kueue import Within, within
from dljob.planner import Infeasible, VolumeLimit
from dljob.reconcile.rollout import quiet
from dljob.reconcile.spec import bound_ranks, one_node
from dljob.reconcile.spec.changes import followed
from dljob.reconcile.spec.overrides_policy import refused_override, refused_secret
from dljob.reconcile.spec.task import Looking, completed
from dljob.reconcile.spec.volumes import volume_limits
from dljob.render import Names
from dljob.status import FALSE, Verdict, find, is_true, previous

PARSED_NCHARS = 2**14
"""Maximum length of the JSON text of a spec that is cached after parsing. Longer texts are parsed each time."""


@dataclass(frozen=True)
class ParsedJob:
    """An observed job, with its spec, stored plan and report parsed. ``before``: its status before this reconcile."""

    observed: Observed
    before: DLJobStatus
    spec: DLJobSpec | None
    """The spec that the operator follows, with the administrator's defaults in place of its unset fields.

    It is the job's spec or, if the operator refuses a change of the spec, the spec before the change."""
    own_spec: DLJobSpec | None
    """``spec`` without the defaults."""
    refusal: Verdict | None
    """The condition Accepted, which says why the operator does not follow the job's spec; None if it does."""
    digest: str | None
    """Digest of ``own_spec``; None if the spec is invalid."""
    accepted: StoredPlan | None
    plan_problem: str | None
    """Why the stored plan cannot be parsed; None if it can, or if no plan is stored."""
    report: Report | None
    report_problem: str | None
    defaults: JobDefaults = NO_DEFAULTS
    """The administrator's defaults from which unset fields of ``spec`` were filled."""
    defaulted: tuple[str, ...] = ()
    """A line for each value of ``spec`` that is a default (see ``job.defaults.applied``). Prices have no line."""
    decision: StoredPlan | Infeasible | None = None
    """Result of ``make_plan.decide`` that was computed earlier; None: not computed yet."""
    queued: bool = False
    """True if Kueue decides when the job's pods run."""
    pace_s: float | None = None
    """Deadline in seconds for the prediction of a whole training by the next plan (``planning.rest.with_pace``).

    None: ``spec.objective.deadline`` applies. Infinite: all deadlines have passed, and none applies."""
    begin_hour: int = 0
    """Hour of the day (UTC) at which the next plan begins; 0 if the carbon intensity does not depend on it."""
    not_provided: frozenset[str] = frozenset()
    """Device types of the last plan, if an autoscaler did not provide the nodes for it, with or without a request."""
    one_node_claim: one_node.OneNodeClaim | None = None
    """Claim of the job because of which its next plans use one node (``spec.one_node``); None if there is none."""
    volumes: tuple[VolumeLimit, ...] = ()
    """Claims of the job that only some nodes can mount, so that its next plans use these nodes."""
    memory_to_try: tuple[int, ...] = ()
    """Memory in bytes that each pod gets at least by the next plan, because pods reached their limit; see
    ``FailureRecord.memory_to_try``. Empty if they did not, if the spec or an administrator sets the memory, and for
    jobs that Kueue admits."""
    refused_ranks: frozenset[int] = frozenset()
    """Numbers of ranks on which the job's script failed, so that its next plans must not have them."""
    bound_ranks: int | None = None
    """The only number of ranks that the job's next plans may have (``spec.bound_ranks``); None: any number."""
    looking: Looking | None = None
    """Set while a job with ``spec.task`` waits for the suggestion of its look pod; ``spec`` is then None."""
    suggestion: SuggestionStatus | None = None
    """The suggestion by which ``spec`` was completed; None for a job without ``spec.task``."""
    within: Within | None = None
    """The limits of Kueue's admission, if it admitted fewer pods than the plan has. The job must then be planned again.
    """

    @property
    def asked(self) -> DLJobSpec | None:
        """Return the spec that decides what the job's pods use now.

        It is ``spec`` or, while a look pod inspects the data of ``spec.task``, the spec with the task.
        """
        return self.looking.spec if self.looking is not None else self.spec

    @property
    def plan_may_change(self) -> bool:
        """Return True if the operator chooses the job's plan, and has made it for the present spec."""
        spec, accepted = self.spec, self.accepted
        if spec is None or accepted is None or spec.suspend:
            return False
        return spec.planning.mode is PlanningMode.AUTO and accepted.spec_digest == self.digest

    @property
    def limits(self) -> tuple[str, ...]:
        """Return a text for each limit of the job's next plans that is not in its spec: one node, a number of ranks."""
        one = () if self.one_node_claim is None else (one_node.why(self.one_node_claim),)
        return one if self.bound_ranks is None else (*one, bound_ranks.why(self.bound_ranks))

    @property
    def shown_suggestion(self) -> SuggestionStatus | None:
        """Return the suggestion for the status: that of the job's task, or the one that the status has already.

        Return None if the user has removed the task, before training began: that suggestion is for no model of the job.
        """
        accepted = self.spec is not None and self.refusal is None and not self.finished
        removed = accepted and "task" not in self.observed.job.spec
        return None if removed else self.suggestion or self.before.suggestion

    @cached_property
    def finished(self) -> bool:
        return _finished(self.before)


def _finished(before: DLJobStatus) -> bool:
    return is_true(before.conditions, "Complete") or is_true(before.conditions, "Failed")


def parse_observed(
    observed: Observed, policy: OverridePolicy = OverridePolicy.ALL, defaults: JobDefaults = NO_DEFAULTS
) -> ParsedJob:
    """Parse spec, status, plan and report of a job.

    ``policy``: pod template overrides that the installation allows. ``defaults``: the installation's defaults. If a
    plan is stored for the spec, the defaults in this plan apply instead.
    """
    spec, problem = _spec(observed)
    before = previous(observed.job)
    accepted, plan_problem = _accepted(observed)
    report, report_problem = _report(observed, accepted)
    refusal = None if problem is None else Verdict("Accepted", FALSE, "InvalidSpec", problem)
    looking, suggestion, refused_task = None, None, None
    if spec is not None and spec.task is not None:
        found_task = completed(observed, spec, before, accepted, finished=_finished(before))
        if isinstance(found_task, Looking):
            refusal = refused_override(spec, observed.job.may_override, policy)
            own = replace(found_task, spec=with_defaults(spec, defaults))
            spec, looking = None, None if refusal else own
        else:
            spec, suggestion, refused_task = found_task.spec, found_task.suggestion, found_task.refusal
    digest = spec_digest(spec) if spec else None
    if spec is not None and digest is not None and not _finished(before):
        found = followed(spec, digest, before, accepted, report)
        refusal = refused_override(found.spec, observed.job.may_override, policy)
        spec, digest = (None, None) if refusal else (found.spec, found.digest)
        refusal = refusal or refused_task or found.refusal
    queued = spec is not None and not _finished(before) and _queued(observed, spec, accepted)
    if accepted is not None and (_finished(before) or accepted.spec_digest == digest):
        defaults = accepted.defaults or NO_DEFAULTS
    completed_spec = with_defaults(spec, defaults) if spec else None
    return ParsedJob(
        observed=observed,
        before=before,
        spec=completed_spec,
        own_spec=spec,
        defaults=defaults,
        defaulted=applied(spec, defaults) if spec else (),
        refusal=refusal,
        digest=digest,
        accepted=accepted,
        plan_problem=plan_problem,
        report=report,
        report_problem=report_problem,
        queued=queued,
        not_provided=_not_provided(before, accepted),
        one_node_claim=one_node.one_node_claim(observed, completed_spec, accepted),
        volumes=_volumes(observed, completed_spec),
        memory_to_try=() if queued else _memory_to_try(accepted, spec, completed_spec, digest),
        refused_ranks=_refused_ranks(accepted, report, digest),
        bound_ranks=bound_ranks.bound_ranks(spec, before, accepted, report),
        looking=looking,
        suggestion=suggestion,
        within=within(observed.queue, accepted, digest) if queued and quiet(observed) else None,
    )


def _not_provided(before: DLJobStatus, accepted: StoredPlan | None) -> frozenset[str]:
    admitted = find(before.conditions, "Admitted")
    if accepted is None or admitted is None or admitted.status is not FALSE:
        return frozenset()
    timed_out = admitted.reason == START_TIMED_OUT and accepted.new_nodes
    provided = admitted.reason != NODES_NOT_PROVIDED and not timed_out
    return frozenset() if provided else frozenset(group.device for group in accepted.groups)


def _volumes(observed: Observed, spec: DLJobSpec | None) -> tuple[VolumeLimit, ...]:
    if spec is None:
        return ()
    return volume_limits(spec, Names.of(observed.job).claim, observed.claims, observed.classes, observed.volumes)


def _memory_to_try(
    accepted: StoredPlan | None, own: DLJobSpec | None, spec: DLJobSpec | None, digest: str | None
) -> tuple[int, ...]:
    """Return the value of ``ParsedJob.memory_to_try``. ``own``: ``spec`` without the defaults, with this ``digest``."""
    if accepted is None or accepted.failures is None or own is None or spec is None or spec.resources.memory:
        return ()
    same = accepted.spec_digest == digest
    planned = accepted.spec if same else planned_fields(own)
    return accepted.failures.memory_to_try(planned, accepted.memory_nbytes, changed=not same)


def _refused_ranks(accepted: StoredPlan | None, report: Report | None, digest: str | None) -> frozenset[int]:
    """Return the value of ``ParsedJob.refused_ranks``. ``digest``: of the job's spec, which may change the script.

    The plan has those that its predecessors for the same spec had. The report has those of its plan, which may still be
    the one before the current one.
    """
    if accepted is None or accepted.spec_digest != digest:
        return frozenset()
    stored = frozenset(accepted.refused_ranks or ())
    if report is None:
        return stored
    older = accepted.plan.number - report.plan_number
    known = older == 0 or (older == 1 and accepted.replans > 0)
    return stored.union(size.ranks for size in report.refused_sizes) if known else stored


def _queued(observed: Observed, spec: DLJobSpec, accepted: StoredPlan | None) -> bool:
    """Return True if Kueue decides when the pods of a job run.

    Pods that were started without Kueue run on until they stop for another reason, whatever the job's label says. Kueue
    decides about pods that it admitted until they have stopped, even if the label is removed.
    """
    if not quiet(observed):
        return accepted is not None and accepted.admission is not None
    return queued_elsewhere(observed.job) and spec.planning.mode is not PlanningMode.PLAN_ONLY


def with_secrets(parsed: ParsedJob, usable: Mapping[str, bool]) -> ParsedJob:
    """Return the job, without its spec if it names a Secret that jobs may not use. ``refusal`` then names the Secret.

    ``usable``: name → True if the Secret has the label that lets jobs use it. A Secret without an entry does not exist,
    and may not be used either.
    """
    refusal = refused_secret(parsed.asked, usable) if parsed.asked is not None else None
    return parsed if refusal is None else replace(parsed, spec=None, digest=None, looking=None, refusal=refusal)


def _spec(observed: Observed) -> tuple[DLJobSpec | None, str | None]:
    if not JOB_NAME_RULE.holds(observed.job.name):
        return None, f"found {observed.job.name!r}; {JOB_NAME_RULE.message}"
    if observed.job.spec_problem is not None:
        return None, observed.job.spec_problem
    try:
        # The API server drops unknown fields. A field that it knows and this release does not is of a later CRD, during
        # an upgrade or after a rollback, and usually has its default value.
        text = json.dumps(observed.job.spec)
        return (_validated_once if len(text) <= PARSED_NCHARS else _validated)(text), None
    except ValidationError as error:
        return None, in_words(error)


def _validated(text: str) -> DLJobSpec:
    return DLJobSpec.model_validate(json.loads(text), extra="ignore")


@lru_cache(maxsize=256)
def _validated_once(text: str) -> DLJobSpec:
    """Return the spec with this JSON text. A job is reconciled many times with the same spec, which is immutable."""
    return _validated(text)


def _accepted(observed: Observed) -> tuple[StoredPlan | None, str | None]:
    """Return the job's stored plan and None, or None and the reason why the stored plan cannot be read.

    Both are None if no plan is stored, or if it belongs to another job.
    """
    if observed.plan is None:
        return None, None
    try:
        accepted = StoredPlan.parse(observed.plan)
    except ValidationError as error:
        return None, in_words(error, "plan").replace("\n", " ")[:1000]
    except ValueError as error:
        return None, str(error)[:1000]
    return (accepted, None) if accepted.plan.uid == observed.job.uid else (None, None)


def _report(observed: Observed, accepted: StoredPlan | None) -> tuple[Report | None, str | None]:
    """Return the coordinator's report, and a text about a problem of the report. Either may be None.

    The report is None if it is missing, invalid or ignored. An invalid report has a problem; a missing or ignored one
    has none. If only the noise scale is invalid, return the report without the noise scale, and the problem.

    A report is ignored if it is of another job, or if its term is lower than the term of the plan. The operator raises
    the term in the plan when it replaces a coordinator on a lost node. The replaced coordinator wrote such a report.
    """
    if observed.report_problem is not None:
        return None, _ignored(observed, observed.report_problem)
    if observed.report is None:
        return None, None
    problem = None
    try:
        report = Report.parse(observed.report)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        problem = f"{where}: {first['msg']} ({error.error_count()} errors in total)"
        if any(each["loc"][:1] != ("noise",) for each in error.errors()):
            return None, _ignored(observed, problem)
        # Nothing depends on the noise scale while the job runs. Without the rest of the report, the operator would not
        # notice that the job ends.
        report = Report.model_validate_json(json.dumps({**json.loads(observed.report), "noise": None}))
        problem = f"the noise scale of this run is ignored: {problem}"
    except ValueError as error:
        return None, _ignored(observed, str(error))
    if report.uid != observed.job.uid:
        return None, None  # From a deleted job of this name. Its ConfigMap will be deleted too.
    if accepted is not None and report.term < accepted.plan.term:
        return None, None  # A fenced coordinator wrote it.
    return report, problem


def _ignored(observed: Observed, problem: str) -> str:
    return f"the report in ConfigMap {observed.job.name}-report is ignored: {problem}"
