"""Derive conditions and measurements of a job's run from the coordinator's report and the pods."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from dlcontract import EXIT_BAD_INPUT, SERVERS, Failure, Report, RunPhase, reasons
from dljob.api import Condition, DLJobSpec, DLJobStatus
from dljob.calibrate import Place
from dljob.calibrate.learned import measured_key
from dljob.cluster import quantity
from dljob.job.defaults import is_default
from dljob.job.identity import data_key, profile_key
from dljob.job.observed import Observed
from dljob.job.plan.pod_groups import PodGroup, threads
from dljob.job.plan.request import computation
from dljob.job.plan.stored import StoredPlan
from dljob.job.plan.structure import observed_memory, observed_split_step, observed_structure
from dljob.job.profiles import devices, of_micro_batches
from dljob.job.remaining import start_without_data_s
from dljob.reconcile.desired import RunMeasurements, RunMemory
from dljob.reconcile.failures import failing_uploads, failure_conditions, memory_kills, storage_evictions
from dljob.reconcile.parsed import ParsedJob
from dljob.status import FALSE, RECOVERING, TRUE, Verdict, find, previous

REPORTING = "ReportValid"


def ending(parsed: ParsedJob, now: datetime) -> Verdict | None:
    """Return the verdict Complete or Failed if the job has ended; otherwise None."""
    report, accepted = parsed.report, parsed.accepted
    if report is not None and accepted is not None and report.plan_number == accepted.plan.number:
        if report.phase is RunPhase.SUCCEEDED:
            return _complete(report, accepted.plan.model.framework)
        limit = accepted.plan.backoff_limit
        if report.phase is RunPhase.FAILED:
            return _failed(parsed, report, report.failures - failure_conditions.ignored(accepted), limit)
        if verdict := failure_conditions.ending(parsed, now):
            return verdict
        ignored = failure_conditions.ignored(accepted)
        if report.failures > limit + ignored and not failure_conditions.undecided(parsed):
            text = f"{_count_of_failures(report.failures - ignored, limit)}{_last_failure(report.failure)}"
            return Verdict("Failed", TRUE, "BackoffLimitExceeded", text)
    return memory_kills.ending(parsed) or storage_evictions.ending(parsed) or _no_data(parsed) or _overdue(parsed, now)


def _complete(report: Report, framework: str) -> Verdict:
    """Return the verdict Complete of a job whose training has succeeded.

    Its reason says whether the training made all its steps, reached its target earlier, or stopped because the model no
    longer improved. ``framework``: of its plan.
    """
    stopped = report.outcome.stopped if report.outcome is not None else None
    text = _success(report, framework)
    if stopped is None or stopped.reason not in reasons.OF_COMPLETION:
        return Verdict("Complete", TRUE, "Complete", text)
    reached = stopped.reason == reasons.TARGET_REACHED
    reason = reasons.TARGET_REACHED if reached else reasons.NO_IMPROVEMENT
    return Verdict("Complete", TRUE, reason, f"{stopped.message}; {text}")


def _no_data(parsed: ParsedJob) -> Verdict | None:
    """Return the verdict Failed if a pod found that it cannot fetch the data or script of the current spec; or None.

    An elastic job that has already trained does not fail: only a replacement pod lacks the data, and the job can
    continue on its other pods.
    """
    if parsed.accepted is None or parsed.accepted.spec_digest != parsed.digest:
        return None
    plan, report = parsed.accepted.plan, parsed.report
    trains = report is not None and (report.step > 0 or (plan.model.elastic and report.world_size > 0))
    if trains and plan.min_ranks < len(plan.ranks):
        return None
    for pod in parsed.observed.pods:
        found = pod.fetching
        if not pod.deleting and found is not None and found.exit_code == EXIT_BAD_INPUT:
            text = f"pod {pod.name} could not fetch {found.what}: {found.message} (exit code {EXIT_BAD_INPUT})"
            return Verdict("Failed", TRUE, reasons.BAD_INPUT, text)
    return None


def _success(report: Report, framework: str) -> str:
    """Return the message about a job that is complete. ``framework``: of its plan."""
    if report.outcome is None:
        return f"trained {report.step} steps"
    out = report.outcome
    accuracy = f", accuracy {100 * out.accuracy:.2f} %" if out.accuracy is not None else ""
    checkpoint = f"; last checkpoint {out.checkpoint}" if out.checkpoint else ""
    page = f"; report {out.report}" if out.report else ""
    if out.steps == 0:
        hint = ". A script of spec.trainer.framework DLTrain calls dltrain.init; for others, set Torchrun or MPI"
        hint = hint if framework == "DLTrain" else ""
        return f"the script reported no step, and ended with exit code 0 after {out.seconds:.1f} s{page}{hint}"
    return f"trained {out.steps} steps in {out.seconds:.1f} s{accuracy}{checkpoint}{page}"


def _failed(parsed: ParsedJob, report: Report, failures: int, limit: int) -> Verdict:
    failure = report.failure
    if failure is None:
        return Verdict("Failed", TRUE, "Unknown", "the coordinator reported a failure without a reason; see its log")
    own = failure.reason in reasons.OF_PROGRAM and parsed.spec is not None and parsed.spec.trainer.command
    field = "spec.trainer.command: " if own else ""
    count = f"; {_count_of_failures(failures, limit)}" if 0 < limit < failures else ""
    return Verdict("Failed", TRUE, failure.reason, f"{field}{_describe(failure, count)}")


def _count_of_failures(failures: int, limit: int) -> str:
    return f"the training script failed {failures} times, spec.runPolicy.backoffLimit is {limit}"


def _describe(failure: Failure, more: str = "") -> str:
    """Return a text about a failure: its rank, host, message and exit code, then ``more``, then the end of its log.

    Parts that the failure's message already contains are not repeated.
    """
    message, log = failure.message, failure.log_tail.strip()
    where = f"rank {failure.rank}" if failure.rank is not None and f"rank {failure.rank} " not in message else ""
    where = " on ".join(part for part in (where, failure.host if failure.host not in message else "") if part)
    code = failure.exit_code if "exit code" not in message else None
    return "".join(
        (
            f"{where}: " if where else "",
            message,
            f" (exit code {code})" if code is not None else "",
            more,
            f"; log: {log}" if log and ("\n" in log or message not in log) else "",
        )
    )


def _last_failure(failure: Failure | None) -> str:
    return f"; last failure: {_describe(failure)}" if failure is not None else ""


def active_since(status: DLJobStatus) -> datetime | None:
    """Return the time when the job started or was last resumed, whichever is later.

    Return None while the job is suspended or preempted, and before it has started.
    """
    found = [each for kind in ("Suspended", "Preempted") if (each := find(status.conditions, kind)) is not None]
    if any(each.status is TRUE for each in found):
        return None
    times = [status.start_time, *(each.last_transition_time for each in found if each.status is FALSE)]
    return max((time for time in times if time is not None), default=None)


def deadline(parsed: ParsedJob, now: datetime) -> datetime | None:
    """Return the time at which the job will have been active for ``activeDeadlineSeconds`` and must fail.

    Return None without this limit and for a suspended job. For a job that has not started yet, or that is preempted,
    the limit counts from ``now``.
    """
    if parsed.spec is None or parsed.spec.suspend:
        return None
    limit_s = parsed.spec.run_policy.active_deadline_seconds
    return None if limit_s is None else later(active_since(parsed.before) or now, limit_s)


def later(time: datetime, seconds: float) -> datetime:
    """Return ``time`` plus ``seconds``, which a user has set, but at most the latest time that datetime supports."""
    try:
        return time + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=time.tzinfo)


def _overdue(parsed: ParsedJob, now: datetime) -> Verdict | None:
    end = deadline(parsed, now)
    if end is None or now < end:
        return None
    assert parsed.spec is not None
    return Verdict(
        "Failed", TRUE, "DeadlineExceeded",
        "the job was active for longer than the limit in spec.runPolicy.activeDeadlineSeconds: "
        f"{parsed.spec.run_policy.active_deadline_seconds} s"
        + (", the administrator's default" if is_default(parsed.defaulted, "runPolicy.activeDeadlineSeconds") else ""),
    )  # fmt: skip


def running(parsed: ParsedJob, accepted: StoredPlan) -> Verdict:
    """Return the Running condition of a job whose pods should run: True while its ranks train.

    Otherwise it is False, and its reason says whether pods start, ranks restart, or lost pods are being replaced.
    """
    report = parsed.report
    pods = [pod for pod in parsed.observed.pods if not pod.deleting]
    ready = sum(pod.ready for pod in pods)
    if report is None or report.plan_number != accepted.plan.number:
        was = find(parsed.before.conditions, "Running")
        if was is not None and (was.status is TRUE or was.reason in RECOVERING):  # Its coordinator was on a lost node.
            return Verdict(
                "Running",
                FALSE,
                "PodsLost",
                f"{ready} of {accepted.nodes} pods are ready; lost pods are being replaced",
            )
        return Verdict("Running", FALSE, "Starting", f"{ready} of {accepted.nodes} pods are ready")
    if report.phase is RunPhase.RUNNING:
        if ready == 0:
            return _unready(find(parsed.before.conditions, "Running"), accepted)
        steps = f" of {report.steps}" if report.steps else ""
        planned = len(accepted.plan.ranks)
        of_planned = f" of {planned}" if report.world_size < planned else ""
        on = f" on {report.world_size}{of_planned} ranks" if report.world_size else ""
        return Verdict("Running", TRUE, "Running", f"step {report.step}{steps}{on}")
    if report.phase is RunPhase.RESTARTING:
        text = f"the ranks are restarting{_last_failure(report.failure)}"
        return Verdict("Running", FALSE, "Restarting", f"{text}{_waits_for(report)}")
    words = {RunPhase.WAITING: "waiting for the agents of all pods", RunPhase.LAUNCHING: "ranks are starting"}
    return Verdict("Running", FALSE, "Starting", f"{words.get(report.phase, 'pods are starting')}{_waits_for(report)}")


def _waits_for(report: Report) -> str:
    return f"; {report.waits_for}" if report.waits_for else ""


def _unready(was: Condition | None, accepted: StoredPlan) -> Verdict:
    """Return the Running condition of a job whose report says that ranks run although no pod is ready.

    ``was``: the previous Running condition, if any. If the job was running or recovering, its pods are considered lost.
    Otherwise they are still starting.
    """
    if was is None or (was.status is FALSE and was.reason not in RECOVERING):
        return Verdict("Running", FALSE, "Starting", f"0 of {accepted.nodes} pods are ready")
    if was.reason == "Restarting":
        return Verdict("Running", FALSE, was.reason, was.message)
    return Verdict("Running", FALSE, "PodsLost", "no pod is ready; training continues when lost pods are replaced")


def problem_conditions(parsed: ParsedJob) -> Iterator[Verdict]:
    """Yield the conditions ReportValid, DeviceMismatch (on unplanned devices), WorldSizeRefused, CheckpointsUploaded.

    A job gets each of these conditions when it has the problem for the first time, and keeps it from then on.
    """
    report, before = parsed.report, parsed.before.conditions
    if parsed.report_problem is not None:
        yield Verdict(REPORTING, FALSE, "InvalidNoiseScale" if report else "InvalidReport", parsed.report_problem)
    elif find(before, REPORTING) is not None:
        yield Verdict(REPORTING, TRUE, "Valid", "the reports of the job's coordinator are valid again")
    if report is None:
        return
    if report.mismatches:
        listed = ", ".join(f"rank {m.rank}: {m.planned} planned, {m.found} found" for m in report.mismatches[:8])
        text = (
            f"{len(report.mismatches)} ranks run on a different device than planned ({listed}); "
            "correct the node labels. This run does not update profiles"
        )
        yield Verdict("DeviceMismatch", TRUE, "DeviceMismatch", text)
    elif find(before, "DeviceMismatch") is not None:
        yield Verdict("DeviceMismatch", FALSE, "DevicesAsPlanned", "every rank runs on its planned device")
    if report.refused_sizes:
        yield Verdict("WorldSizeRefused", TRUE, "WorldSizeRefused", _refusal(report, parsed))
    elif find(before, "WorldSizeRefused") is not None:
        yield Verdict("WorldSizeRefused", FALSE, "NotRefused", "the script has not failed on fewer ranks than planned")
    yield from failing_uploads.verdicts(parsed)


def _refusal(report: Report, parsed: ParsedJob) -> str:
    """Return a text about the numbers of ranks on which an elastic script has failed."""
    sizes = ", ".join(str(size.ranks) for size in report.refused_sizes)
    planned = f" of {len(parsed.accepted.plan.ranks)}" if parsed.accepted is not None else ""
    return (
        f"the script failed on {sizes}{planned} ranks: {report.refused_sizes[-1].message}. The job does not try this "
        "again: if it loses pods, it waits for them. Let the script resume with fewer ranks, or set spec.nodes.min to "
        "the fewest nodes with which it can"
    )


def measurements(
    spec: DLJobSpec, report: Report, accepted: StoredPlan | None, observed: Observed
) -> RunMeasurements | None:
    """Return the measurements of a run with which the operator updates profiles, or None.

    Return None without a plan, because only devices that the plan names count. A plan with model parallelism or
    strategy Sharded has at most the time of its steps. A job whose spec lacks fields that describe its training
    (``spec.missing``) has at most the observed structure of its script, on the devices of rank 0. The field
    ``place`` of the result is set only for a plan with one group of pods, without a parameter server and without
    gradient accumulation. The link of a run on one node, or on nodes of one machine, is left out, because it is shared
    memory, and not the network. The link between several device types is left out, too, because it may be the network
    of only one of them, and so are link and place of a run that may span racks or zones, whose network plans add to
    that of the device type. ``observed``: the job at the end of the run, with the nodes of its pods.
    """
    if accepted is None:
        return None
    how = computation(spec, accepted.plan)
    key = measured_key(profile_key(spec), how.precision, how.recomputes)
    if accepted.plan.splits_model or how.strategy == "Sharded":
        split = observed_split_step(spec, report, accepted, observed.machine_nodes)
        return RunMeasurements(key, report, (split[0],), split_step=split[1]) if split is not None else None
    if spec.missing:
        structure = observed_structure(spec, report, accepted)
        first = accepted.plan.ranks[0].device
        if structure is None:
            return None
        return RunMeasurements(profile_key(spec), report, (first,), structure=structure)
    layouts: dict[str, set[tuple[int, int]]] = {}
    for group in accepted.groups:
        if not group.is_gpu:
            layouts.setdefault(group.device, set()).add((threads(spec, group), group.ranks_per_node))
    mixed = {device for device, found in layouts.items() if len(found) > 1}  # The report does not tell them apart.
    measured = set(devices(report)) - mixed
    report = of_micro_batches(report, accepted.plan, how.micro_batches)
    nodes = sum(group.nodes for group in accepted.groups)
    several_types = len({group.device for group in accepted.groups}) > 1
    if nodes <= observed.machine_nodes or several_types or accepted.crosses_border:
        report = report.model_copy(update={"link_latency_s": None, "link_bandwidth_Bps": None})
    planned = tuple(sorted({group.device for group in accepted.groups} & measured))
    place = None
    # Measured steps of several ranks serve to predict steps whose whole backward pass hides communication.
    whole = how.micro_batches == 1
    unlike = accepted.groups[0].is_gpu and 1 < nodes <= observed.machine_nodes  # Steps of GPUs do not name the machine.
    usual = whole and not unlike and not accepted.crosses_border
    if len(accepted.groups) == 1 and accepted.plan.collective not in SERVERS and usual:
        group = accepted.groups[0]
        sharded = how.strategy == "Optimizer"
        place = Place(group.nodes, group.ranks_per_node, accepted.plan.collective, sharded)
    used = {device: next(iter(found)) for device, found in layouts.items() if device in measured}
    cores = {group.device: _used_cores(spec, group, observed) for group in accepted.groups if group.device in used}
    start_s = _undisturbed_start_s(spec, report, observed)
    return RunMeasurements(key, report, planned, place, data_key(spec), used, cores, observed.machine_nodes, start_s)


def _undisturbed_start_s(spec: DLJobSpec, report: Report, observed: Observed) -> float | None:
    """Return the seconds from new pods to the first step of a run, without fetching data; None if it was disturbed.

    The start is disturbed by restarts, by start time-outs, and by shards, which ranks fetch themselves.
    """
    before = previous(observed.job)
    if report.restarts or report.failures or before.start_timeouts or spec.dataset.sharded:
        return None
    return start_without_data_s(before)


def _used_cores(spec: DLJobSpec, group: PodGroup, observed: Observed) -> float:
    """Return how many CPUs each rank of a group on CPUs can keep busy: a fraction if the pod has a part of a CPU.

    It is the number of its threads, but at most its part of the CPUs of the smallest node, and of the pod's CPU limit.
    Plans count the same cores, so that measured watts per CPU times these cores are the power of a rank.
    """
    nodes = {pod.node for pod in observed.pods if pod.group == group.name}
    cpus = [cpu for name, cpu in observed.usable_cpus.items() if name in nodes]
    if spec.resources.cpu_limit:
        cpus.append(float(quantity(spec.resources.cpu_limit)))
    return min([float(threads(spec, group)), *(cpu / group.ranks_per_node for cpu in cpus)])


def shown_structure(parsed: ParsedJob) -> RunMeasurements | None:
    """Return the structure of a running script that its report shows; None if the report shows none.

    The profile gets it before the end of the run, so that the next plan of the job and other jobs with the same script
    have a prediction.
    """
    spec, report, accepted = parsed.spec, parsed.report, parsed.accepted
    if spec is None or report is None or accepted is None or not spec.missing or report.structure is None:
        return None
    return measurements(spec, report, accepted, parsed.observed) if report.plan_number == accepted.plan.number else None


def shown_memory(parsed: ParsedJob, *, failed: bool = False) -> RunMemory | None:
    """Return what the run of a training script has shown about the memory of a pod; None if it is unknown.

    ``failed``: True if the job has just failed. The profile gets it before the end of a run if the next job would
    otherwise begin with too little: if the operator has raised the memory, or if the peak is close to the limit.
    """
    spec, accepted, report = parsed.spec, parsed.accepted, parsed.report
    if spec is None or accepted is None or accepted.spec_digest != parsed.digest:
        return None
    if (found := observed_memory(spec, report, accepted, failed=failed)) is None:
        return None
    over = failed or (report is not None and report.phase is RunPhase.SUCCEEDED)
    raised = accepted.failures is not None and accepted.failures.memory_nbytes > 0
    if not over and not raised and found[1].needed_nbytes <= accepted.least_memory_nbytes:
        return None
    how = computation(spec, accepted.plan)
    key = measured_key(profile_key(spec), how.precision, how.recomputes)
    return RunMemory(key, found[0], parsed.observed.job.namespace, found[1])
