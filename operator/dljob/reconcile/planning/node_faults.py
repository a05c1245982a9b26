"""Attribute failures of a job to nodes, and move a job away from a node that has failed repeatedly.

The reason of the condition NodeFaulty stores the state of a move:

- Replanning: another plan exists without the node, and the pods write a checkpoint and stop. If other jobs have taken
  the devices of that plan meanwhile, the job waits without pods.
- NoOtherNodes: there is no plan without the node, so the job stays.
- Replanned: the job runs on other nodes, or plans may use the node again.
"""

import re
from datetime import datetime

from dlcontract import Report, RunPhase, reasons
from dljob.faults import Fault, FaultKind
from dljob.job.observed import PodSeen
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import make_plan
from dljob.reconcile.rollout import quiet
from dljob.reconcile.volume import blocks, volume_ready
from dljob.render import RenderConfig
from dljob.status import FALSE, TRUE, Verdict, find

CONDITION = "NodeFaulty"
_DEVICE_REASONS = (reasons.DEVICE_FAILED, reasons.DEVICE_MISSING)
_KUBELET = re.compile(
    r"nvml error: (?!insufficient permissions)|driver rpc error|(gpu|device) is lost|fallen off the bus", re.IGNORECASE
)
"""Matches the kubelet's message about a container that cannot start, because the node's GPU or driver does not work."""


def node_faults(parsed: ParsedJob, at: datetime) -> tuple[Fault, ...]:
    """Return the faults of nodes that the report and the pods of the job show now. ``at``: present time.

    A failure of the training script, such as an exit code or too little memory, is never a fault of its node. Nor is
    one that somebody has caused on purpose: a preemption, a drained node, or a node that is removed. As long as the job
    shows a fault, each call returns it with the same key.
    """
    if parsed.finished or parsed.observed.job.deleting:
        return ()
    job, found = parsed.observed.job, []
    report = parsed.report
    if report is not None and (pod := _faulty_pod(parsed, report)) is not None:
        assert report.failure is not None and pod.node is not None
        reason = report.failure.reason
        kind = FaultKind.DEVICE if reason in _DEVICE_REASONS else FaultKind.NETWORK
        # The coordinator counts each failure once, by its reason or as the failure that ends the job.
        key = f"{job.uid}/{reason}/{report.restarts.get(reason, 0)}/{report.failures}"
        found.append(Fault(node=pod.node, kind=kind, key=key, at=at, namespace=job.namespace))
    for pod in parsed.observed.pods:
        if pod.node is None or pod.deleting:
            continue
        if pod.node in parsed.observed.failed_nodes:
            since = parsed.observed.failed_nodes[pod.node].isoformat()
            found.append(Fault(node=pod.node, kind=FaultKind.NOT_READY, key=f"{pod.node}/{since}", at=at))
        elif pod.stuck is not None and _KUBELET.search(pod.stuck.message):
            key = f"{pod.uid}/{pod.restarts}"
            found.append(Fault(node=pod.node, kind=FaultKind.DEVICE, key=key, at=at, namespace=job.namespace))
    return tuple(found)


def _faulty_pod(parsed: ParsedJob, report: Report) -> PodSeen | None:
    """Return the pod whose node probably caused the job's last failure, or None.

    Only failures of a device and pods that could not be reached are attributed to a node. Return None also if the ranks
    have trained since the failure, or if the pod's node is lost or removed: then ``node_faults`` looks at the condition
    of the node itself.
    """
    failure, accepted = report.failure, parsed.accepted
    if failure is None or accepted is None or report.plan_number != accepted.plan.number:
        return None
    if report.phase not in (RunPhase.RESTARTING, RunPhase.FAILED):
        return None
    unreachable = failure.reason == reasons.POD_LOST and failure.unreachable
    if failure.reason not in _DEVICE_REASONS and not unreachable:
        return None
    # With the host's network, the host name of a rank is that of the node.
    pods = [pod for pod in parsed.observed.pods if failure.host in (pod.name, pod.node) and not pod.deleting]
    lost = parsed.observed.lost_nodes
    return next((pod for pod in pods if pod.node is not None and pod.node not in lost), None)


def _to_leave(parsed: ParsedJob) -> list[str]:
    """Return the nodes on which this job has just failed and that plans must not use (``Observed.left_out``).

    A NotReady node is not a reason to move, because the operator replaces the pods on lost nodes anyway.
    """
    faults = node_faults(parsed, parsed.observed.job.created)
    nodes = {fault.node for fault in faults if fault.kind is not FaultKind.NOT_READY}
    return sorted(nodes & parsed.observed.left_out.keys())


def _returned(parsed: ParsedJob) -> list[str]:
    """Return the nodes that the job's pods avoid although plans may use them again; empty if no pod waits for a node.

    A plan names the nodes with repeated faults that its pods must avoid. If such a node is healthy again, a waiting pod
    may find its place there.
    """
    accepted = parsed.accepted
    if accepted is None or not any(pod.unschedulable and not pod.deleting for pod in parsed.observed.pods):
        return []
    return [node for node in accepted.avoid or () if node not in parsed.observed.left_out]


def _moves(parsed: ParsedJob) -> bool:
    found = find(parsed.before.conditions, CONDITION)
    return found is not None and found.status is TRUE and found.reason == "Replanning"


def undecided(parsed: ParsedJob) -> bool:
    """Return True if the job must be planned again, because a node is faulty or because plans may use a node again.

    To make the plan, the operator needs the cluster's free resources (``Observed.view``).
    """
    spec, accepted = parsed.spec, parsed.accepted
    if spec is None or accepted is None or spec.suspend or accepted.spec_digest != parsed.digest:
        return False
    return _moves(parsed) or bool(_to_leave(parsed) or _returned(parsed))


def move(parsed: ParsedJob, draft: Draft, config: RenderConfig) -> StoredPlan | None:
    """Return the plan with which a job leaves a faulty node, or None if the job stays. Add the condition NodeFaulty.

    A job with a pod that fits no node is planned again too, if plans may again use a node that its pods avoid.
    """
    accepted, observed = parsed.accepted, parsed.observed
    if accepted is None or not undecided(parsed) or not make_plan.ready(parsed):
        _reset(parsed, draft)
        return None
    why = _why(parsed)
    found = make_plan.decide(parsed, config)
    if isinstance(found, Infeasible):
        if not (found.transient and quiet(observed)):  # Else the job waits for other nodes, see ``gang.lost``.
            _stay(parsed, draft, f"{found.field}: {found.message}")
        return None
    stopped = quiet(observed)  # Its pods start only on devices that are free now.
    if found.new_nodes and not stopped:
        _stay(parsed, draft, "the other existing nodes cannot run the job")
        return None
    assert parsed.spec is not None
    volume = volume_ready(observed, parsed.spec, found)
    if blocks(volume) and not stopped:
        _stay(parsed, draft, volume.message)
        return None
    if stopped and not blocks(volume):  # Else the move is not over.
        text = f"plan {found.plan.number} runs on other nodes: {found.status.summary}"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Replanned", text))
    elif not stopped:
        draft.verdicts.append(Verdict(CONDITION, TRUE, "Replanning", why))
    return found.model_copy(update={"replans": accepted.replans + 1, "resizes": accepted.resizes})


def _why(parsed: ParsedJob) -> str:
    """Return the text that says why the job moves, for the condition NodeFaulty.

    If the pods are stopping, they no longer show the reason. The text is then the message of the present condition.
    """
    if nodes := _to_leave(parsed):
        listed = ", ".join(str(parsed.observed.left_out[node]) for node in nodes)
        return f"plans leave out nodes with repeated faults: {listed}; the job moves to other nodes"
    if returned := _returned(parsed):
        return f"a pod waits for a node, and new plans may use {', '.join(returned)} again; the job is planned again"
    before = find(parsed.before.conditions, CONDITION)
    return before.message if before is not None else ""


def _stay(parsed: ParsedJob, draft: Draft, problem: str) -> None:
    """Add the condition NodeFaulty of a job that should leave a faulty node, but cannot. ``problem``: why it cannot.

    Do nothing if the job need not leave a node.
    """
    listed = ", ".join(str(parsed.observed.left_out[node]) for node in _to_leave(parsed))
    if listed or _moves(parsed):
        text = (
            f"plans leave out nodes with repeated faults{f': {listed}' if listed else ''}; the job cannot move to "
            f"other nodes and keeps its plan: {problem}"
        )
        draft.verdicts.append(Verdict(CONDITION, TRUE, "NoOtherNodes", text))


def _reset(parsed: ParsedJob, draft: Draft) -> None:
    """Set the condition NodeFaulty from True to False if no pod of the job runs on a node that plans must not use.

    For example, plans may use the node again after some time without faults.
    """
    found = find(parsed.before.conditions, CONDITION)
    if found is None or found.status is not TRUE:
        return
    if not any(pod.node in parsed.observed.left_out for pod in parsed.observed.pods):
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Replanned", "no pod runs on a node that plans leave out"))
