"""Jobs whose plan needs nodes that do not exist yet, in an installation that asks for them with ProvisioningRequests.

The plan is stored without pods. A ProvisioningRequest then asks the autoscaler for the nodes of all pods together, and
the pods start when its condition Provisioned is True. If the autoscaler cannot add the nodes, takes them back, or does
not answer within the start time-out, the job releases what it has and is planned again after a back-off. The next plan
uses other nodes if it can.

If capacity of existing nodes grows meanwhile, and the job fits there, it starts there and the request is deleted.

The condition Admitted stores the state, with the reasons ``job.waiting.WAITS_FOR_NODES`` and ``NODES_NOT_PROVIDED``.
"""

from datetime import datetime

from dljob.api import DLJobSpec
from dljob.job.observed import SPEC_ANNOTATION, ProvisioningSeen
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile import gang
from dljob.reconcile.desired import Draft, Target
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import make_plan
from dljob.reconcile.rollout import quiet
from dljob.reconcile.volume import blocks, volume_ready
from dljob.render import RenderConfig, pod_templates, provisioning_request, support
from dljob.status import FALSE, TRUE, Verdict, find

KIND = "ProvisioningRequest"
RECREATE_S = 1.0
"""Seconds until a request for another plan is made, after the deletion of the last one."""
RECHECK_S = 15.0
"""Seconds between two checks whether the operator may read requests again. Nothing tells it that it may."""
UNREADABLE = (
    "provisioningrequests: the operator may not list them, and does not see the answer of the autoscaler; expected the "
    "permission to list and watch them. Upgrade the operator's chart, whose value "
    "autoscaling.provisioningRequests.enabled grants it, or grant it as in docs/reference/permissions.md"
)
_LOST = ("Failed", "CapacityRevoked", "BookingExpired")
"""Conditions that are True if the autoscaler does not provide the nodes, or no longer keeps them."""


def hold(
    parsed: ParsedJob, draft: Draft, spec: DLJobSpec, target: StoredPlan, config: RenderConfig, now: datetime
) -> bool:
    """Return True if the job must wait without pods for the nodes of the plan ``target``.

    Add to the draft what the job does meanwhile: ask for the nodes, wait, or back off because it does not get them.
    Return False also for a job whose pods run, and for one whose volume is not usable yet.
    """
    observed = parsed.observed
    if target.provisioning_class is None or not quiet(observed):
        return False
    if blocks(volume_ready(observed, spec, target)):
        return False
    templates = pod_templates(observed.job, spec, target, config)
    wanted = provisioning_request(observed.job, target, templates)
    found, timeout_s = observed.provisioning, gang.start_timeout_s(spec, target)
    draft.wanted = 0
    if found is not None and (found.deleting or found.digest != wanted["metadata"]["annotations"][SPEC_ANNOTATION]):
        _delete(found, draft)
        draft.requeue_in(RECREATE_S)
        _wait(draft, target, "the last request is deleted first")
        return True
    problem = _problem(found) if found is not None else None
    if problem is None and _provided(found):
        return False
    if problem is None and not observed.provisioning_readable:
        draft.requeue_in(RECHECK_S)
        _wait_because(draft, UNREADABLE)
        return True
    left_s = timeout_s
    if found is not None:
        left_s -= (now - found.created).total_seconds()
        if problem is None and left_s <= 0:
            problem = f"it was not provisioned within the start time-out of {timeout_s:g} s{_latest(found)}"
        if problem is not None:
            _back_off(parsed, draft, found, problem, now)
            return True
    draft.objects.extend((*support(observed.job, spec, target, config), *templates, wanted))
    draft.requeue_in(left_s)
    _wait(draft, target, f"the pods start when it is provisioned{_latest(found)}")
    return True


def with_present_way(accepted: StoredPlan, config: RenderConfig) -> StoredPlan:
    """Return the plan of a job that waits for nodes, without its request if the installation no longer makes requests.

    An autoscaler adds no nodes for pods that name a request, so these pods must not name one.
    """
    return accepted if config.provisioning_class else accepted.model_copy(update={"provisioning_class": None})


def may_start_earlier(parsed: ParsedJob) -> bool:
    """Return True if a job that waits for new nodes must be planned, because it may have room on existing nodes now.

    Once the nodes are provided, the job waits for these.
    """
    return parsed.observed.capacity_grew and not _provided(parsed.observed.provisioning)


def starts_earlier(parsed: ParsedJob, config: RenderConfig) -> bool:
    """Return True if a job that waits for new nodes starts on existing nodes, with the plan of ``make_plan.decide``.

    Any other plan does not replace that for which the request was made. Otherwise the request would be made again and
    again, and the autoscaler would begin anew each time.
    """
    found = make_plan.decided(parsed, config) if may_start_earlier(parsed) else None
    if not isinstance(found, StoredPlan) or found.new_nodes:
        return False
    assert parsed.spec is not None
    return not blocks(volume_ready(parsed.observed, parsed.spec, found))


def gave_up(parsed: ParsedJob, draft: Draft, now: datetime) -> bool:
    """Return True if all pods of the plan in the draft must stop, because the autoscaler does not keep its nodes.

    Change the draft so that they stop. Pods that have nodes need the request no longer, and neither do the replacements
    of lost pods, so the result is then False.
    """
    found, target, admitted = parsed.observed.provisioning, draft.plan, find(parsed.before.conditions, gang.CONDITION)
    if found is None or target is None or target.provisioning_class is None:
        return False
    if admitted is None or admitted.status is not TRUE or admitted.reason != "Starting":
        return False
    placed = sum(pod.node is not None and not pod.deleting for pod in parsed.observed.pods)
    problem = _problem(found)
    if problem is None or placed >= target.nodes:
        return False
    _back_off(parsed, draft, found, problem, now)
    return True


def clean(parsed: ParsedJob, draft: Draft) -> None:
    """Delete the request of a job that no longer needs it: it has ended or stops, or its plan needs no new nodes."""
    found = parsed.observed.provisioning
    if found is None or any(manifest["kind"] == KIND for manifest in draft.objects):
        return
    needed = draft.plan.provisioning_class is not None if draft.plan is not None else draft.wanted > 0
    if not needed:
        _delete(found, draft)


def _delete(found: ProvisioningSeen, draft: Draft) -> None:
    if not found.deleting and not any(target.kind == KIND for target in draft.deletes):
        draft.deletes.append(Target(KIND, found.name, found.uid))


def _wait(draft: Draft, target: StoredPlan, what: str) -> None:
    _wait_because(draft, f"a ProvisioningRequest asks an autoscaler for the nodes of {target.nodes} pods: {what}")


def _wait_because(draft: Draft, text: str) -> None:
    draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "WaitingForNodes", text))
    draft.verdicts.append(
        Verdict("Running", FALSE, "NotStarted", "the job waits for new nodes; see the condition Admitted")
    )


def _back_off(parsed: ParsedJob, draft: Draft, found: ProvisioningSeen, problem: str, now: datetime) -> None:
    text = f"ProvisioningRequest {found.name}: {problem}"
    gang.back_off(parsed, draft, Verdict(gang.CONDITION, FALSE, "NodesNotProvided", text), now)
    _delete(found, draft)


def _provided(found: ProvisioningSeen | None) -> bool:
    """Return True if the autoscaler provides the nodes of a request, or has provided them."""
    return found is not None and found.conditions.get("Provisioned", (False, "", ""))[0]


def _problem(found: ProvisioningSeen) -> str | None:
    """Return why the autoscaler does not provide the nodes of a request; None if it does, or may still do."""
    for kind in _LOST:
        status, reason, message = found.conditions.get(kind, (False, "", ""))
        if status:
            return f"{kind}: {reason}: {message}"
    return None


def _latest(found: ProvisioningSeen | None) -> str:
    """Return the autoscaler's last message about a request that is not provisioned, for the end of a message."""
    if found is None:
        return ""
    for kind in ("Provisioned", "Accepted"):
        if kind in found.conditions:
            _, reason, message = found.conditions[kind]
            return f"; {reason}: {message}"
    return "; no autoscaler has answered yet"
