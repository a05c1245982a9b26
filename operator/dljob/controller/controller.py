"""Reconcile jobs: observe, decide, apply. Many jobs are reconciled at the same time, but each job only once at a time.

The controller is level-triggered: a key in the queue names a job to reconcile, not what changed.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from time import monotonic
from typing import Any

from dljob.api.overrides import secrets
from dljob.controller.job_counts import count_jobs
from dljob.controller.job_events import JobEvents
from dljob.controller.lessons import Lessons
from dljob.controller.metrics import PHASES, Metrics
from dljob.controller.planning.answers import RECONCILE_S, PlanningError
from dljob.controller.planning.background import Planning
from dljob.controller.queues import Queues
from dljob.controller.work_queue import WorkQueue
from dljob.job.log_fields import log_fields
from dljob.job.observed import JobSeen, Observed
from dljob.job.waiting import first_status_in_s
from dljob.kube import ApiError, Cache, JobKey, Kube, NodeFaults, RejectedError, WarningEvents, Written, rejected_object
from dljob.kube.applying import RECOVERY_RESYNC_S, complete_all, has_plan, recovers
from dljob.kube.events.warning_events import RECHECK_S
from dljob.kube.objects.cache import utc_now
from dljob.planner import Infeasible
from dljob.reconcile import (
    Desired,
    ParsedJob,
    failed,
    needs_view,
    node_faults,
    parse_observed,
    reconcile,
    with_pace,
    with_secrets,
)
from dljob.render import RenderConfig
from dljob.status import Event, previous
from dljob.status.pace import ProgressPace, only_progress

log = logging.getLogger("dljob")
SLOW_S = 5.0
NAME_RECHECK_S = 10.0
"""Seconds between attempts to apply a job's objects while an object with one of their names has another owner."""
DELETION_RECHECK_S = 1.0
"""Seconds between such attempts if the other owner is an earlier job of the same name, whose objects are deleted."""
WHILE_PLANNING = -1.0
"""Result of a reconcile, in place of a delay, if it must wait for a plan: the key is queued when the plan is made."""


class Controller:
    def __init__(
        self, kube: Kube, cache: Cache, warning_events: WarningEvents, queue: WorkQueue[JobKey], config: RenderConfig,
        metrics: Metrics, planning: Planning, now: Callable[[], datetime] = utc_now, *, share_profiles: bool = False,
        node_faults: NodeFaults, pace: ProgressPace, queues: Queues | None = None,
    ) -> None:  # fmt: skip
        """``share_profiles``: True: plans use the measurements of all namespaces. False: only of their own namespace.

        ``queues``: access to Kueue; None: the queue labels of jobs have no effect.
        """
        self._queues, self._node_faults = queues, node_faults
        self._kube, self._cache, self._warning_events, self._queue = kube, cache, warning_events, queue
        self._config, self._metrics, self._now = config, metrics, now
        self._planning, self._pace = planning, pace
        self._events = JobEvents(kube, queue, now)
        self._lessons = Lessons(kube, now, shared=share_profiles)

    async def work(self) -> None:
        """Run one worker: process keys from the queue forever."""
        while True:
            key = await self._queue.get()
            self._metrics.queue_depth.set(len(self._queue))
            try:
                await self.process(key)
            finally:
                self._queue.done(key)

    async def process(self, key: JobKey) -> None:
        """Reconcile one job. After an error, log it and retry the job later, so that other jobs are not affected."""
        began = monotonic()
        try:
            requeue_s = await self._reconcile(key)
        except RejectedError as refusal:
            delay_s = self._queue.failed(key)
            self._metrics.reconciles.labels("rejected").inc()
            log.warning("the API server rejected %s; retrying in %.1f s", refusal, delay_s, extra=self._about(key))
        except ApiError as error:
            delay_s = self._queue.failed(key)
            self._metrics.reconciles.labels("error").inc()
            log.warning("%s; retrying in %.1f s", error, delay_s, extra=self._about(key))
        except Exception as error:  # An error in one job must not stop the others.
            delay_s = self._queue.failed(key)
            self._metrics.reconciles.labels("error").inc()
            log.exception("reconcile failed; retrying in %.1f s", delay_s, extra=self._about(key))
            await self._report(key, error)
        else:
            self._metrics.reconciles.labels("ok").inc()
            if requeue_s is not WHILE_PLANNING:  # Otherwise, what failed before may fail again with the new plan.
                self._queue.succeeded(key)
                if requeue_s is not None:
                    self._queue.add_after(key, requeue_s)
        took_s = monotonic() - began
        self._metrics.reconcile_s.observe(took_s)
        if took_s > SLOW_S:
            log.warning("a reconcile took %.1f s; check the latency of the API server", took_s, extra=self._about(key))

    def _about(self, key: JobKey) -> dict[str, object]:
        return log_fields(key, self._cache.job(key))

    async def _report(self, key: JobKey, error: Exception) -> None:
        """Report an error of the operator itself in the job's conditions."""
        observed = self._cache.observe(key)
        if observed is None or observed.job.deleting:
            return
        try:
            await self._publish(observed, failed(observed, f"{type(error).__name__}: {error}", self._now()))
        except Exception as again:  # noqa: BLE001 - the log has the first error
            text = "the operator's error is only in this log: the job's condition with the error was not written (%s)"
            log.warning(text, again, extra=self._about(key))

    async def _reconcile(self, key: JobKey) -> float | None:
        await self._kube.identify_sets(key)
        observed = await self._kube.observe(key)
        if observed is None:
            self._gone(key)
            return None
        await self._events.restore(observed.job)
        if self._planning.still_waits(key, observed):
            return RECONCILE_S
        observed = replace(observed, preemption=self._planning.preemption(key))
        if self._queues is not None:
            observed = await self._queues.added_to(observed)
        observed, troubled = await self._warning_events.added_to(observed, self._now())
        if troubled:
            self._queue.add_after(key, RECHECK_S)
        parsed = None if observed.job.deleting else await self._parsed(observed)
        if parsed is not None:
            observed = self._with_priority_class(await self._with_left_out(parsed), parsed)
            parsed = with_pace(replace(parsed, observed=observed), self._now())
            unplanned = None if needs_view(observed, parsed, self._now()) else parsed
            grew = self._planning.capacity_grew(key, unplanned)
            observed = self._planning.added_to(replace(observed, capacity_grew=grew))
            parsed = replace(parsed, observed=observed)
        failure = None
        if parsed is not None and needs_view(observed, parsed, self._now()):
            try:
                parsed = replace(parsed, decision=self._planning.decision(key, parsed))
            except PlanningError as error:
                failure = error
            if parsed.decision is None and not (observed.plan or observed.sets or observed.pods):
                if failure is not None:
                    raise failure
                if (delay_s := first_status_in_s(observed.job, self._now())) != 0:
                    if delay_s is not None:
                        self._queue.add_after(key, delay_s)
                    return WHILE_PLANNING
            if isinstance(parsed.decision, Infeasible):
                observed = replace(observed, place=self._planning.place(key), outlook=self._planning.outlook(key))
        else:
            self._planning.settle(key)
        desired = reconcile(observed, self._config, self._now(), parsed)
        if failure is not None:  # Its condition is written instead.
            desired = replace(desired, status=None, events=())
        try:
            await self._do(observed, desired, parsed)
        except RejectedError as refusal:
            self._planning.refused(key)
            rejected = replace(observed, rejected=(found := rejected_object(refusal)))
            await self._publish(rejected, reconcile(rejected, self._config, self._now(), parsed))
            if found.being_deleted:
                return DELETION_RECHECK_S
            if found.taken:
                self._queue.add_after(key, NAME_RECHECK_S)
            raise
        if failure is not None:
            raise failure
        if parsed is not None and isinstance(parsed.decision, Infeasible):
            self._planning.wait(key, self._cache.observe(key))
        return desired.requeue_after_s

    async def _parsed(self, observed: Observed) -> ParsedJob:
        """Parse the job. The result has no spec if the installation does not allow its pod overrides or its Secrets."""
        job, policy = observed.job, self._config.overrides
        parsed = parse_observed(observed, policy, self._config.job_defaults)
        if policy.unlimited(annotated=job.may_override) or parsed.asked is None or parsed.finished:
            return parsed
        names = dict.fromkeys(use.name for use in secrets(parsed.asked))  # In the order in which they are checked.
        # While all pods are ready, nothing new reads a Secret.
        if not names or parsed.asked.suspend or (parsed.accepted and len(observed.ready_pods) >= parsed.accepted.nodes):
            return parsed
        return with_secrets(parsed, await self._kube.usable_secrets(job.namespace, names))

    async def _with_left_out(self, parsed: ParsedJob) -> Observed:
        """Record the node faults that the job's state shows, and report nodes that are left out of plans from now on.

        Return the observed state of the job with all nodes that its plans must leave out.
        """
        observed, job, now = parsed.observed, parsed.observed.job, self._now()
        if not self._node_faults.on or parsed.finished:
            return observed
        noted = await self._node_faults.note(node_faults(parsed, now), now)
        for fault in noted.faults:
            self._metrics.node_faults.labels(fault.kind.value).inc()
            log.warning("%s on node %s", fault.kind.value, fault.node, extra=self._about(job.key))
        for entry in noted.left_out:
            whom = f"jobs of namespace {entry.namespace}" if entry.namespace else "all jobs"
            text = f"new plans of {whom} leave out node {entry}; see docs/explanation/fault-tolerance.md"
            log.warning("%s", text, extra=self._about(job.key))
            event = Event("Warning", "NodeLeftOut", text)
            self._events.add(job.key, event)
            await self._events.post_about_node(entry.node, event)
        return replace(observed, left_out=await self._node_faults.left_out(job.namespace, now))

    def _with_priority_class(self, observed: Observed, parsed: ParsedJob) -> Observed:
        """Return the observed state with ``lacks_priority_class`` set if the job's PriorityClass does not exist."""
        name = parsed.asked.scheduling.priority_class_name if parsed.asked is not None else None
        lacking = self._cache.priority_classes.lacks(name)
        return replace(observed, lacks_priority_class=name) if name is not None and lacking else observed

    async def _do(self, observed: Observed, desired: Desired, parsed: ParsedJob | None) -> None:
        job, kube = observed.job, self._kube
        if desired.delete_job:
            log.info("runPolicy.ttlSecondsAfterFinished has passed; deleting the job", extra=self._about(job.key))
            await kube.delete_job(job)
            return
        before = previous(job) if parsed is None else parsed.before
        error = await self._apply(observed, desired)
        if has_plan(self._cache, job, desired.objects):
            # Pods are stopped and fenced even if an object of the job was rejected.
            await complete_all(kube.scale(job, item) for item in desired.scales)
            await complete_all(kube.delete(job, target) for target in desired.deletes)
        if error is not None:
            await complete_all([kube.look_again(job, desired.objects)], wait_only=True)
            raise error
        late = await self._lessons.learn_all(job, desired.measurements, desired.memory)
        if desired.workload is not None and self._queues is not None:
            try:
                await self._queues.change(job, desired.workload)
            except ApiError as failure:  # Kueue's webhook may be down.
                late.append(failure)
        if await self._publish(observed, desired) and desired.status is not None:
            self._metrics.record_transition(before, desired.status, observed.job.namespace)
        try:
            if await kube.look_again(job, desired.objects):  # After the status, which is more urgent.
                self._queue.add_after(job.key, RECHECK_S)
        except RejectedError:
            self._queue.add(job.key)  # That applies the object first, and begins with the status that is written now.
        if (failed_late := next(filter(None, late), None)) is not None:
            raise failed_late  # The status is written, and the rest is tried again.

    async def _apply(self, observed: Observed, desired: Desired) -> Exception | None:
        """Create the job's Secret and apply its objects. Return the first error, without raising it, or None.

        If all pods are ready, the Secret exists already. It is then not sent again, because a quota might reject it.
        """
        job, kube = observed.job, self._kube
        up = desired.plan is not None and len(observed.ready_pods) >= desired.plan.nodes
        results: list[Any] = []
        if desired.secret is not None and not up:
            domain, started = self._config.cluster_domain, bool(observed.sets)
            secret = kube.ensure_secret(job, desired.secret, domain, self._now(), started=started)
            support = [item for item in desired.objects if item["kind"] != "StatefulSet"]
            results = await complete_all([secret, kube.apply(job, support)], wait_only=True)
        if not any(isinstance(result, Exception) for result in results):
            results += await complete_all([kube.apply(job, desired.objects)], wait_only=True)
        if (again := any(isinstance(result, int) and result for result in results)) or recovers(job):
            # Watches report only changes. Check again later, in case nothing changes.
            self._queue.add_after(job.key, RECHECK_S if again else RECOVERY_RESYNC_S)
        return next((result for result in results if isinstance(result, Exception)), None)

    async def _publish(self, observed: Observed, desired: Desired) -> bool:
        """Write the events and then the status. An event that cannot be written does not prevent the status.

        Return False if the status is not stored: it is not its turn, or the job is gone. What has happened since the
        last status must then not be counted, because a later reconcile starts from the same status.

        If the operator crashes between the two, it writes the events again after its restart. They are counted twice
        but never lost.
        """
        job = observed.job
        for event in desired.events:
            log.info("%s: %s", event.reason, event.message, extra=self._about(job.key))
        await self._events.post(job, desired.events)
        status = desired.status.manifest() if desired.status is not None else None
        if status is None or not self._may_write(job, status):
            return False
        written = await self._kube.write_status(job, status)
        if written is Written.AND_CHANGED:
            self._queue.add(job.key)
        return written is not Written.NOT

    def _may_write(self, job: JobSeen, status: dict[str, Any]) -> bool:
        """Return False if the status differs only in progress, and it is not the job's turn. It is then tried later."""
        if job.status != status and only_progress(job.status, status):
            if wait_s := self._pace.wait_s(job.key, waits=not self._cache.runs(job.key)):
                self._queue.add_after(job.key, wait_s)
            return not wait_s
        self._pace.forget(job.key)
        return True

    def begin(self) -> None:
        """Begin to lead: forget what another operator may have sent meanwhile.

        The next reconcile of each job posts its lost events again, and looks at all its objects.
        """
        self._events.begin()
        self._lessons.begin()
        self._kube.forget_all()

    def _gone(self, key: JobKey) -> None:
        self._queue.forget(key)
        self._planning.forget(key)
        self._events.forget(key)
        self._pace.forget(key)
        self._lessons.forget(key)
        self._kube.forget(key)

    def count_jobs(self) -> None:
        """Set the gauges of jobs by phase, deadlines, forecasts, left-out nodes, and of the work queue's depth."""
        found = count_jobs(self._cache.jobs(), PHASES)
        self._metrics.count_deadlines(found.deadlines, found.slacks_s)
        self._metrics.count_forecasts(found.forecasts)
        for phase, number in found.phases.items():
            self._metrics.jobs.labels(phase).set(number)
        self._metrics.count_left_out(self._node_faults.active(self._now()))
        self._metrics.queue_depth.set(len(self._queue))
