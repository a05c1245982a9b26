"""Reconcile jobs: observe, decide, apply. Many jobs are reconciled at the same time, but each job only once at a time.

The controller is level-triggered: a key in the queue names a job to reconcile, not what changed.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from pydantic import ValidationError

from dljob.api import DLProfileStatus
from dljob.controller.metrics import PHASES, Metrics
from dljob.controller.work_queue import WorkQueue
from dljob.job.observed import Observed, Rejected
from dljob.job.profiles import learned
from dljob.kube import ApiError, Cache, JobKey, Kube, RejectedError, WarningEvents
from dljob.kube.client import complete_all
from dljob.kube.view import Reservation
from dljob.kube.warning_events import RECHECK_S
from dljob.planner import Learned
from dljob.reconcile import Desired, needs_view, parse_observed, reconcile
from dljob.render import RenderConfig
from dljob.status import is_true, previous

log = logging.getLogger("dljob")


SLOW_S = 5.0


def utc_now() -> datetime:
    return datetime.now(UTC)


class Controller:
    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        warning_events: WarningEvents,
        queue: WorkQueue[JobKey],
        config: RenderConfig,
        metrics: Metrics,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._kube, self._cache, self._warning_events, self._queue = kube, cache, warning_events, queue
        self._config, self._metrics, self._now = config, metrics, now
        self._planning = asyncio.Lock()
        """Lock for planning. If two jobs were planned at the same time, both plans could use the same free nodes."""
        self._reservations: dict[JobKey, tuple[Reservation, ...]] = {}
        self._uids: dict[JobKey, str] = {}

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
            log.warning("%s/%s: the API server rejected %s; retrying in %.1f s", *key, refusal, delay_s)
        except ApiError as error:
            delay_s = self._queue.failed(key)
            self._metrics.reconciles.labels("error").inc()
            log.warning("%s/%s: %s; retrying in %.1f s", *key, error, delay_s)
        except Exception:  # An error in one job must not stop the others.
            delay_s = self._queue.failed(key)
            self._metrics.reconciles.labels("error").inc()
            log.exception("%s/%s: reconcile failed; retrying in %.1f s", *key, delay_s)
        else:
            self._queue.succeeded(key)
            self._metrics.reconciles.labels("ok").inc()
            if requeue_s is not None:
                self._queue.add_after(key, requeue_s)
        took_s = monotonic() - began
        self._metrics.reconcile_s.observe(took_s)
        if took_s > SLOW_S:
            log.warning("%s/%s: a reconcile took %.1f s; is the API server slow?", *key, took_s)

    async def _reconcile(self, key: JobKey) -> float | None:
        observed = self._cache.observe(key)
        if observed is None:
            self._gone(key)
            return None
        self._uids[key] = observed.job.uid
        observed, troubled = await self._warning_events.added_to(observed, self._now())
        if troubled:
            self._queue.add_after(key, RECHECK_S)
        parsed = None if observed.job.deleting else parse_observed(observed)
        if needs_view(observed, parsed):
            async with self._planning:
                others = [p for other, made in self._reservations.items() if other != key for p in made]
                view = await self._kube.view(observed.job, others)
                observed = replace(observed, view=view, learned=self._learned())
                desired = reconcile(observed, self._config, self._now(), parsed)
                self._reserve(key, desired)
            planned = desired.status is not None and is_true(desired.status.conditions, "Planned")
            self._metrics.plans.labels("accepted" if planned else "infeasible").inc()
        else:
            desired = reconcile(observed, self._config, self._now(), parsed)
        try:
            await self._do(observed, desired)
        except RejectedError as refusal:
            rejected = replace(observed, rejected=Rejected(refusal.kind, refusal.name, refusal.message))
            await self._publish(rejected, reconcile(rejected, self._config, self._now(), parsed))
            raise
        self._settle(key)
        return desired.requeue_after_s

    async def _do(self, observed: Observed, desired: Desired) -> None:
        job, kube = observed.job, self._kube
        if desired.delete_job:
            log.info("%s/%s: runPolicy.ttlSecondsAfterFinished has passed; deleting the job", *job.key)
            await kube.delete_job(job)
            return
        before = previous(observed.job)
        if desired.secret is not None:
            secret = kube.ensure_secret(job, desired.secret, self._config.cluster_domain, self._now())
            await complete_all([secret, kube.apply(job, [m for m in desired.objects if m["kind"] != "StatefulSet"])])
        if await kube.apply(job, desired.objects):
            # Watches report only changes. Check again later, in case nothing changes.
            self._queue.add_after(job.key, RECHECK_S)
        await complete_all(kube.scale(job, item.name, item.replicas) for item in desired.scales)
        await complete_all(kube.delete(job, target) for target in desired.deletes)
        if desired.measurements is not None:
            await kube.update_profiles(desired.measurements, self._now())
        await self._publish(observed, desired)
        if desired.status is not None:
            self._metrics.record_transition(before, desired.status)

    async def _publish(self, observed: Observed, desired: Desired) -> None:
        """Write the events and then the status.

        If the operator crashes between the two, it writes the events again after its restart. They are counted twice
        but never lost.
        """
        for event in desired.events:
            log.info("%s/%s: %s: %s", *observed.job.key, event.reason, event.message)
            await self._kube.record_event(observed.job, event, self._now())
        if desired.status is not None:
            await self._kube.write_status(observed.job, desired.status.manifest())

    def _reserve(self, key: JobKey, desired: Desired) -> None:
        """Reserve the resources of a new plan, so that other jobs are not planned on them.

        ``_settle`` drops the reservation when the scheduler has placed the pods.
        """
        if desired.plan is None:
            return
        self._reservations[key] = tuple(
            Reservation(g.device, g.nodes, g.ranks_per_node, g.cpu_m / 1000, desired.plan.memory_nbytes)
            for g in desired.plan.groups
        )

    def _settle(self, key: JobKey) -> None:
        """Drop the reservation of a job if all its pods have nodes or no pods are needed."""
        reservations = self._reservations.get(key)
        if reservations is None:
            return
        observed = self._cache.observe(key)
        wanted = sum(item.replicas for item in observed.sets) if observed else 0
        placed = sum(pod.node is not None for pod in observed.pods) if observed else 0
        if placed >= wanted:
            del self._reservations[key]

    def _gone(self, key: JobKey) -> None:
        self._queue.forget(key)
        self._reservations.pop(key, None)
        if uid := self._uids.pop(key, None):
            self._kube.forget(key, uid)

    def _learned(self) -> dict[tuple[str, str], Learned]:
        return {
            (profile["spec"]["model"], profile["spec"]["device"]): found
            for profile in self._cache.profiles()
            if (found := _learned(profile)) is not None
        }

    def count_jobs(self) -> None:
        """Set the gauges of jobs by phase and of the queue's depth."""
        counts = dict.fromkeys(PHASES, 0)
        for job in self._cache.jobs():
            phase = (job.status or {}).get("phase") or "Pending"
            if phase in counts:
                counts[phase] += 1
        for phase, number in counts.items():
            self._metrics.jobs.labels(phase).set(number)
        self._metrics.queue_depth.set(len(self._queue))


def _learned(profile: Mapping[str, Any]) -> Learned | None:
    """Return the measured constants of a DLProfile; None if its status is invalid, for example after a manual edit."""
    try:
        return learned(DLProfileStatus.model_validate(profile.get("status") or {}))
    except ValidationError as error:
        log.warning("DLProfile %s is ignored: %s", profile["metadata"]["name"], error)
        return None
