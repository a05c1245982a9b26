"""Main module of the command ``dljob-operator``, which runs the operator.

Only environment variables configure the operator; the module ``settings`` lists them.
"""

import asyncio
import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import aiohttp

from dljob.app.health import serve
from dljob.app.logging import set_up
from dljob.app.optional_apis import pod_group_api, provisioning_api, until_changed
from dljob.app.settings import Settings
from dljob.controller.connection import TOKEN, connect, keep_token_fresh
from dljob.controller.controller import Controller
from dljob.controller.hardware_probes import HardwareProbes
from dljob.controller.metrics import Metrics
from dljob.controller.planning.background import Planning
from dljob.controller.planning.process import PlannerProcess
from dljob.controller.queues import Queues
from dljob.controller.tasks import end_of, run_until_one_ends
from dljob.controller.watches import LABELLED, WATCHED, Watches
from dljob.controller.work_queue import WorkQueue
from dljob.job.log_fields import log_fields
from dljob.job.observed import JOB_LABEL
from dljob.job.plan.first_plans import FirstMeasurements
from dljob.kube import Api, ApiError, Cache, JobKey, Kube, NodeFaults, PlanKeySecret, WarningEvents
from dljob.kube.background import BackgroundLoop
from dljob.kube.kinds import DLJOB, PROFILE
from dljob.kube.leader import Leader, LeaseLostError
from dljob.kube.objects.cache import utc_now
from dljob.render.helpers.probe import configured
from dljob.status.pace import ProgressPace

log = logging.getLogger("dljob")

API_RECHECK_S = 1.0
STUCK_S = 300.0
"""Seconds after which a reconcile of one job counts as stuck, so that /healthz fails and the operator is restarted.

Each request of a reconcile has a time limit, so that no working reconcile takes this long.
"""
BLOCKED_S = 60.0
GARBAGE_THRESHOLDS = (10_000, 10, 10)
"""Numbers of new containers and of collections after which Python looks for garbage, see ``gc.set_threshold``.

The operator makes hardly any cycles. With Python's own 700, and 3,000 jobs, decoding the lists at the start caused 59
full collections and a quarter of the processor time of a restart. With these, there are three to five.
"""


class Operator:
    """The operator: creates, runs and stops the health server, the watches, the workers and the leader election."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metrics, self._cache = Metrics(), Cache(queues=settings.queues, architectures=settings.node_architectures)
        self._queue: WorkQueue[JobKey] = WorkQueue(self._cache.runs)
        self._queue.pause()
        self._waits_for: str | None = "the API server"
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._leader: Leader | None = None
        self._beat_at: float | None = None
        """Monotonic time in seconds at which ``_beat`` last ran in the main event loop; None before its first run."""
        self._controller: Controller | None = None
        self._watches: Watches | None = None
        self._queues: Queues | None = None
        self._planning: Planning | None = None

    async def run(self) -> None:
        """Run the operator until the process gets a signal to stop.

        If one of the operator's tasks ends before that, stop all others and raise the error that ended it.
        """
        settings, connection = self._settings, connect()
        async with AsyncExitStack() as stack:
            background = stack.enter_context(BackgroundLoop("lease and probes"))
            lease_session = await background.run(_opened(connection.session))
            stack.push_async_callback(lambda: background.run(lease_session.close()))
            leader = Leader(
                Api(lease_session, connection.server, self._metrics.requested),
                settings.namespace,
                settings.identity,
                settings.lease_name,
                settings.watch_namespaces,
            )
            self._leader = leader if settings.leader_election else None
            session = await stack.enter_async_context(connection.session())
            may_write = leader.leads if settings.leader_election else None
            api = Api(session, connection.server, self._metrics.requested, may_write)
            server = serve(settings.metrics_port, self._metrics, self._ill, self._not_ready, self._scraped)
            runner = await background.run(server)
            stack.push_async_callback(lambda: background.run(runner.cleanup()))
            version = await self._kinds_served(api)
            log.info("API server %d.%d at %s", *version, connection.server)
            self._waits_for = "the API server to say if it serves PodGroups"
            served = await pod_group_api(api, settings.pod_groups)
            self._waits_for = "the API server to say if it serves ProvisioningRequests"
            provisioning = await provisioning_api(api, settings.provisioning)
            config = settings.render(pod_group_api=served, provisions=provisioning is not None)
            if not settings.job_defaults.empty:
                log.info("defaults of jobs: %s", json.dumps(settings.job_defaults.manifest()))
            # A replica that does not lead may create the key, too: only one of them succeeds.
            unled = Api(session, connection.server, self._metrics.requested)
            plan_key = PlanKeySecret(unled, settings.namespace, f"{settings.lease_name}-plan-key", self._cache.plans)
            self._waits_for = plan_key.description
            await plan_key.load()
            kube = Kube(
                api, self._cache, settings.resync_s, settings.watch_namespaces, plan_key=plan_key,
                all_pods=settings.count_all_pods,
            )  # fmt: skip
            node_faults = NodeFaults(
                api, self._cache, settings.namespace, f"{settings.lease_name}-node-faults", settings.fault_policy
            )
            planner = PlannerProcess(
                config,
                self._metrics.planner_failures.inc,
                about=lambda key: log_fields(key, self._cache.job(key)),
            )
            stack.push_async_callback(planner.close)
            measurements = FirstMeasurements(monotonic)
            self._planning = planning = Planning(
                self._cache, planner.plan, self._queue.add, self._metrics, measurements=measurements,
                policy=settings.queue_policy, together=settings.assigns_together,
            )  # fmt: skip
            if settings.queues:
                self._queues = Queues(api, self._cache, settings.watch_namespaces, self._queue.add, settings.silence_s)
            queues = self._queues
            self._controller = Controller(
                kube, self._cache, WarningEvents(api), self._queue, config, self._metrics, planning,
                share_profiles=settings.share_profiles, node_faults=node_faults, queues=queues,
                pace=ProgressPace(settings.progress_writes_per_s, monotonic),
            )  # fmt: skip
            self._watches = watches = Watches(
                self._cache, self._queue, api, settings.watch_namespaces, connection.session, planning.capacity_changed,
                all_pods=settings.count_all_pods, silence_s=settings.silence_s,
                more=settings.provisioning if provisioning is not None else (),
            )  # fmt: skip
            await stack.enter_async_context(watches.session)
            if settings.leader_election:
                stack.push_async_callback(lambda: background.run(leader.release()))
            probes = None
            if settings.probes:
                probes = HardwareProbes(
                    api, self._cache, settings.namespace, configured(config, settings.probe_priority_class), utc_now,
                    self._metrics, kube.events.record_about_node, measurements, planning.capacity_changed,
                    gpus=settings.probe_gpus, links=settings.probe_links,
                )  # fmt: skip
            tasks = {
                "heartbeat": self._beat(),
                "work": self._work(self._controller, planning, planner, watches, background, queues, probes),
                "watches": watches.reflect(),
                "resync": self._resync(kube, node_faults, plan_key),
            }
            if queues is not None:
                tasks["Kueue"] = queues.run()
            if settings.pod_groups:
                tasks["PodGroups"] = until_changed(api, settings.pod_groups, served, settings.resync_s)
            if settings.provisioning:
                what = "ProvisioningRequests"
                tasks[what] = until_changed(api, settings.provisioning, provisioning, settings.resync_s, what)
            if TOKEN.exists():
                tasks["token"] = keep_token_fresh(session, watches.session, lease_session)
            own = asyncio.create_task(run_until_one_ends(tasks), name="tasks")
            own.add_done_callback(self._ended)

            async def end() -> None:
                self._stop.set()
                own.cancel()
                await asyncio.gather(own, return_exceptions=True)

            stack.push_async_callback(end)
            await watches.run(settings.identity, self._stop, end)
        if self._failure is not None:
            raise self._failure

    async def _kinds_served(self, api: Api) -> tuple[int, int]:
        """Wait until the API server serves DLJob and DLProfile. Return the (major, minor) version of the API server.

        kopf must start afterwards, because it would not notice kinds that appear later.
        """
        while True:
            try:
                version = await api.version()
                for kind in (DLJOB, PROFILE):
                    self._waits_for = f"the CustomResourceDefinition of {kind.kind}"
                    await api.page(kind, None, "", 1, "")
            except ApiError as error:
                # An operator that is limited to some namespaces must not list a kind in all namespaces. The code 403
                # still shows that the kind exists.
                if error.code == 403:
                    return version
                log.warning("waiting for %s (%s); asking again in %.0f s", self._waits_for, error, API_RECHECK_S)
                await asyncio.sleep(API_RECHECK_S)
            else:
                return version

    async def _work(
        self,
        controller: Controller,
        planning: Planning,
        planner: PlannerProcess,
        watches: Watches,
        background: BackgroundLoop,
        queues: Queues | None,
        probes: HardwareProbes | None,
    ) -> None:
        """Wait until the cache holds all objects. Then run the planner and the workers that reconcile jobs.

        With leader election, they run only while this operator is the leader (holds the Lease). After it has lost the
        Lease, they stop, and the operator waits until it becomes the leader again. The queue is empty meanwhile, and
        then gets all jobs.
        """
        self._waits_for = "the first lists of objects"
        await watches.synced()
        if queues is not None:
            await queues.looked.wait()
        self._waits_for = None
        leader = self._leader
        while True:
            if leader is not None:
                await background.run(leader.acquire())
            self._metrics.leader.set(1)
            controller.begin()
            self._queue.resume(job.key for job in self._cache.jobs())
            tasks: dict[str, Coroutine[Any, Any, Any]] = {"planning": _planning(planner, planning)}
            for i in range(self._settings.concurrency):
                tasks[f"worker {i}"] = controller.work()
            if probes is not None:
                tasks["hardware probes"] = probes.run()
            if leader is not None:
                tasks["Lease"] = background.run(leader.hold())
            try:
                await run_until_one_ends(tasks)
            except LeaseLostError as error:
                log.warning("this operator no longer leads (%s); it waits until it holds the Lease again", error)
            finally:
                self._metrics.leader.set(0)
                self._queue.pause()
            await planner.close()

    async def _beat(self) -> None:
        """Record the time in ``_beat_at`` each second, until cancelled.

        If the recorded time is more than ``BLOCKED_S`` seconds old, ``_ill`` reports that the event loop is blocked.
        """
        while True:
            self._beat_at = monotonic()
            await asyncio.sleep(1.0)

    async def _resync(self, kube: Kube, node_faults: NodeFaults, plan_key: PlanKeySecret) -> None:
        """Remove objects from the cache whose deletion the watches missed, and queue every job, until cancelled.

        This is repeated every ``resync_s`` seconds. Each time, also read the key that signs plans again. The leader
        also deletes expired profiles, and expired parts of the record of node faults.
        """
        while True:
            await asyncio.sleep(self._settings.resync_s)
            await plan_key.refresh()
            for kind in WATCHED:
                try:
                    for key in await kube.prune(kind, JOB_LABEL if kind in LABELLED else ""):
                        self._queue.add(key)
                except ApiError as error:
                    if error.forbidden and kind is not DLJOB:
                        continue  # The watch of this kind has logged once that the permission is missing.
                    log.warning(
                        "cached %s could not be compared with the API server (%s); trying again in %.0f s",
                        kind.plural, error, self._settings.resync_s,
                    )  # fmt: skip
            for job in self._cache.jobs():
                self._queue.add(job.key)
            if self._leader is None or self._leader.leads():
                try:
                    await kube.expire_profiles(utc_now())
                except ApiError as error:
                    log.warning(
                        "expired profiles were not deleted (%s); trying again in %.0f s", error, self._settings.resync_s
                    )
                await node_faults.tidy(utc_now())

    def _ended(self, own: asyncio.Task[Any]) -> None:
        """Stop the operator if its tasks have ended although nothing has stopped them. Do nothing otherwise.

        ``own``: the task that runs all others. It calls this when it ends. The operator's Deployment then starts the
        operator again.
        """
        if self._stop.is_set():
            return
        self._failure = end_of(own)
        log.error("the operator stops: %s", self._failure)
        self._stop.set()

    def _ill(self) -> str | None:
        """Return why the process must be restarted, for /healthz; None if it works.

        Reasons are a task that has failed, a blocked event loop, watches that have died, and work that is stuck.
        """
        if self._failure:
            return str(self._failure)
        beat_at = self._beat_at
        silent_s = 0.0 if beat_at is None else monotonic() - beat_at
        if silent_s > BLOCKED_S:
            return f"the event loop has been blocked for {silent_s:.0f} s"
        others = self._queues.reflectors if self._queues is not None else ()
        return (
            (self._watches and self._watches.dead(others))
            or (self._planning and self._planning.stuck(STUCK_S))
            or (self._leader and self._leader.stuck(STUCK_S))
            or self._queue.stuck(STUCK_S)
        )

    def _not_ready(self) -> str | None:
        if self._waits_for is None:
            return (self._leader and self._leader.blocked_by) or self._ill()
        lists = self._watches and self._watches.unsynced()
        return f"waiting for {self._waits_for}{f': {lists}' if lists else ''}"

    def _scraped(self) -> None:
        if self._controller is not None:
            self._controller.count_jobs()


async def _opened(session: Callable[[], aiohttp.ClientSession]) -> aiohttp.ClientSession:
    """Call ``session``, and return the session that it creates. The session uses the event loop that runs this.

    A session can be used only in the event loop in which it was created.
    """
    return session()


async def _planning(planner: PlannerProcess, planning: Planning) -> None:
    """Start the process that computes plans, and then plan jobs until cancelled.

    The process is started before the first job needs a plan, so that the job does not wait for the start.
    """
    await planner.start()
    await planning.run()


def main() -> None:
    """Run the operator until a signal stops it. Exit with 1 on invalid settings or if a part of the operator failed."""
    try:
        gc.set_threshold(*GARBAGE_THRESHOLDS)
        settings = Settings.of(os.environ)
        set_up(settings.log_level, settings.log_format)
        asyncio.run(Operator(settings).run())
    except ValueError as error:
        sys.exit(f"dljob-operator: {error}")
    except Exception as error:  # noqa: BLE001 - the last stop
        log.error("the operator ends because of an error: %s: %s", type(error).__name__, error)
        sys.exit(1)


if __name__ == "__main__":
    main()
