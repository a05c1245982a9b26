"""The agent of a pod. It is a member of its job, and in one pod also the coordinator.

Every agent obeys the coordinator. The agent of the plan's first pod is also the coordinator, which launches and
restarts all ranks of the job. If that pod is lost, the agent of the next pod takes over.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from functools import partial
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from dlcontract import Plan, RunPhase
from dltrain.agent import log_lines
from dltrain.agent.coordinator.coordinator import TERMINAL, Coordinator
from dltrain.agent.coordinator.membership import SupersededError
from dltrain.agent.coordinator.observed_job import ObservedJob
from dltrain.agent.health import Health
from dltrain.agent.job import tls
from dltrain.agent.job.exchange import ConfigMaps, Exchange, Files, ReportWriter
from dltrain.agent.job.kube_api import KubeApi
from dltrain.agent.job.settings import Settings, complete_environment
from dltrain.agent.job.shrink import shrink_plan
from dltrain.agent.member.local_ranks import LocalRanks
from dltrain.agent.member.member import Member
from dltrain.agent.member.staged_checkpoints import claimed_term
from dltrain.agent.member.tunnel import Tunnel, is_tunnel, serve
from dltrain.agent.metrics import TrainerCollector
from dltrain.host.processes import Reaper
from dltrain.launch import loopback
from dltrain.protocol.agent_messages import MAX_LINE
from dltrain.protocol.rank_messages import EXIT_BAD_INPUT, EXIT_STOPPED
from dltrain.record.job_logs import LIMIT_NBYTES, packed
from dltrain.record.ledger import Ledger

log = logging.getLogger(__name__)
LAST_REPORT_S = 2.0
LAST_LOGS_S = 2.0
TAKEOVER_S = 0.5
"""Time in seconds that a pod waits before it replaces a lost coordinator, for each pod that precedes it in the plan.

An earlier live pod can therefore take over first."""
DEFAULT_GRACE_S = 30.0


class Agent:
    """The agent of one pod: a process that controls the pod's ranks and serves their metrics.

    In one pod of a job, the agent is also the coordinator, which launches and restarts the ranks of all pods.
    """

    def __init__(self, settings: Settings, env: dict[str, str], identity: tls.Identity, exchange: Exchange) -> None:
        self.settings, self.env, self.identity, self.exchange = settings, env, identity, exchange
        self.reaper = Reaper()
        self.reporter = ReportWriter(exchange)
        self.member = Member(settings.pod, settings.uid)
        self.local = self.member.local = LocalRanks(
            pod=settings.pod,
            pod_ip=settings.pod_ip,
            run_dir=settings.run_dir,
            memory=settings.memory_dir / f"dltrain-{settings.uid}",
            env=env,
            reaper=self.reaper,
            emit=self.member.emit,
            tunnel=partial(Tunnel, context=identity.tunnel, agent_port=settings.agent_port, pod_ip=settings.pod_ip),
        )
        self.coordinator: Coordinator | None = None
        self._acting = False
        """True while this pod coordinates the job in place of the plan's first pod, which is lost."""
        self._told_to_stop = asyncio.Event()

    async def run(self) -> int:
        """Run the agent until SIGTERM. Return the exit code for its process."""
        self.local.spawner.warm()
        loop = asyncio.get_running_loop()
        trying = loop.run_in_executor(None, loopback.library)  # A launch then need not wait for its subprocess.
        trying.add_done_callback(
            lambda tried: tried.cancelled() or tried.exception()
        )  # A launch through MPI reports the error.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop.set)
        await self.local.listen()
        await asyncio.start_server(
            self._serve, self.settings.pod_ip, self.settings.agent_port, ssl=self.identity.server, limit=MAX_LINE
        )
        registry = CollectorRegistry()
        registry.register(TrainerCollector(self.member, self.local, self._ledger))
        await Health(registry, self._unready).listen(self.settings.pod_ip, self.settings.metrics_port)
        log.info("agent of pod %s is up", self.settings.pod)
        stop = asyncio.create_task(self._told_to_stop.wait())
        work: list[asyncio.Task[Any]] = [stop, asyncio.create_task(self.reporter.run())]
        if may_coordinate(self.settings):
            work.append(asyncio.create_task(self._coordinate()))
        work.append(asyncio.create_task(self._stand_by()))
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        if stop not in done:
            (ended,) = done
            await self.local.end()
            ended.result()
            raise AssertionError(
                "agent: found a background task that has ended; expected all tasks to run until SIGTERM. Report this "
                "bug"
            )
        return await self._leave()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not is_tunnel(writer):
            await self.member.serve(reader, writer)
            return
        port = None if self.coordinator is None else self.coordinator.job.launcher.port
        await serve(reader, writer, port, self.settings.pod_ip)

    def running(self) -> tuple[int, str]:
        """Return (number of the current plan, name of the current attempt), which each line of the log shows.

        The number is 0 if there is no plan yet. The name is empty if no attempt (launch of all ranks) runs.
        """
        plan = self.member.plan if self.coordinator is None else self.coordinator.job.plan
        return 0 if plan is None else plan.number, self.local.attempt

    def _ledger(self) -> Ledger | None:
        return None if self.coordinator is None else self.coordinator.job.ledger

    async def _stand_by(self) -> None:
        """Become the job's coordinator when the current one is lost, unless an earlier pod of the plan does so.

        This method does not return.
        """
        member = self.member
        while True:
            await member.orphaned.wait()
            if not (place := succession(member.plan, member.phase, self.settings.pod)) or self._told_to_stop.is_set():
                await asyncio.sleep(TAKEOVER_S)
                continue
            await asyncio.sleep(TAKEOVER_S * place)
            if not member.orphaned.is_set():
                continue
            log.warning("pod %s is lost; taking over as coordinator", member.plan.pods[0] if member.plan else "")
            self._acting = True
            try:
                await self._coordinate(acting=True)
            except SupersededError as error:
                log.info("this pod is no longer the coordinator: %s", error)
            finally:
                self._acting = False
                self.coordinator = self.local.launch_daemon = self.reporter.compose = None

    async def _coordinate(self, *, acting: bool = False) -> None:
        """Wait for plans, and coordinate the job while this pod is the first pod of the newest plan, or if ``acting``.

        ``acting``: True if this pod replaces the plan's first pod, which is lost. This method ends only by an
        exception. It raises SupersededError if another coordinator has taken over the job.
        """
        running: asyncio.Task[None] | None = None
        plans = self.exchange.plans()
        coming = asyncio.ensure_future(anext(plans))
        try:
            while True:
                waiting: set[asyncio.Future[Any]] = {coming} if running is None else {coming, running}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if running is not None and running.done():
                    running.result()
                    running = None
                if not coming.done():
                    continue
                plan = coming.result()
                coming = asyncio.ensure_future(anext(plans))
                log.info(
                    "plan %d (%s), %d ranks in %d pods", plan.number, plan.digest(), len(plan.ranks), len(plan.pods)
                )
                running = await self._follow(plan, running, acting)
        finally:
            coming.cancel()

    async def _follow(
        self, plan: Plan, running: "asyncio.Task[None] | None", acting: bool
    ) -> "asyncio.Task[None] | None":
        first = acting or (plan.pods[0] == self.settings.pod and not self._acting)
        if self.coordinator is not None and running is not None:
            if first:
                self.coordinator.replan(plan)
                return running
            self.coordinator.leave()
            await running
            await self.reporter.last(LAST_REPORT_S)
            self.coordinator = self.local.launch_daemon = self.reporter.compose = None
        if not first or self._told_to_stop.is_set():
            return None
        previous = await self.exchange.previous_report()
        claimed = await claimed_term(self.reaper, self.env, plan, self.settings.run_dir / "asked-plan.json")
        if claimed >= plan.term:
            plan = plan.model_copy(update={"term": claimed + 1})
        job = ObservedJob(
            self.settings, self.identity, self.reaper, self.env, self.reporter, plan, previous, acting=acting
        )
        coordinator = self.coordinator = Coordinator(job, previous, lambda: self.exchange.allowance)
        self.local.launch_daemon = coordinator.launch_daemon
        return asyncio.create_task(coordinator.run())

    async def _leave(self) -> int:
        """Stop this pod's ranks within the grace period, because of SIGTERM, and return the exit code of the agent.

        On the coordinator's pod, stop the ranks of all pods, and write the job's last report.
        """
        plan, busy = self.member.plan, bool(self.local.running)
        grace_s = (plan.grace_s if plan is not None else DEFAULT_GRACE_S) - 1.0
        deadline_s = time.monotonic() + grace_s
        log.info("received SIGTERM; %s; exiting within %.0f s", "ranks checkpoint" if busy else "no rank runs", grace_s)
        self.member.leave()
        if self.coordinator is not None:
            self.coordinator.leave()
            try:
                async with asyncio.timeout(grace_s):
                    await self.coordinator.done.wait()
            except TimeoutError:
                log.warning("ranks of other pods still run at the end of the grace period; exiting without them")
                self.coordinator.publish_stop()
            await self.reporter.last(LAST_REPORT_S)
        else:
            self.local.stop(grace_s, progressed=None if self.member.has_coordinator else False)
            while self.local.busy and time.monotonic() < deadline_s:
                await asyncio.sleep(0.02)
        await self.local.end()
        await self._store_remaining_outputs()
        await self.local.log_files.flush(LAST_LOGS_S)
        return EXIT_STOPPED if self.local.ranks_here() and self.member.phase not in TERMINAL else 0

    async def _store_remaining_outputs(self) -> None:
        """Store the output of this pod's ranks that a lost coordinator may not have stored, if no other has come."""
        plan, outputs = self.member.plan, self.member.unstored_outputs
        if plan is None or not outputs:
            return
        log.info("no coordinator is connected; storing the output of %d ranks of this pod", len(outputs))
        # All pods may do this, so that the files of all must fit in one ConfigMap.
        files = packed(outputs, LIMIT_NBYTES // len(plan.pods))
        await self.reporter.add_outputs(files, self.member.ended_attempt)

    def _unready(self) -> str | None:
        plan, phase = self.member.plan, self.member.phase
        if plan is None:
            return "no plan yet"
        if phase in TERMINAL:
            return None
        mine = self.local.ranks_here()
        missing = [rank.rank for rank in mine if rank.rank not in self.local.running]
        if any(rank.pod == self.settings.pod for rank in plan.ranks) and (missing or not mine):
            ranks = f"ranks {missing}" if missing else "the ranks of this pod"
            return f"{ranks} are not running; the job is in the phase {phase or RunPhase.WAITING}"
        return None


def succession(plan: Plan | None, phase: RunPhase | None, pod: str) -> int:
    """Return the position (1 is the first) of ``pod`` in the order in which pods replace a lost coordinator.

    ``phase``: the job's phase. ``plan`` and ``phase`` are None if this pod has not received them yet.

    Return 0 if ``pod`` must not replace the coordinator: if it is the plan's first pod or not in the plan, or if the
    job has not started, is over, or cannot continue without the first pod. Also return 0 for a plan with fewer than
    three pods, because one of two pods cannot distinguish a lost pod from a network partition.
    """
    if (
        plan is None
        or len(plan.pods) < 3
        or pod not in plan.pods[1:]
        or phase not in (RunPhase.RUNNING, RunPhase.RESTARTING)
    ):
        return 0
    return plan.pods.index(pod) if shrink_plan(plan, plan.pods[1:]) is not None else 0


def may_coordinate(settings: Settings) -> bool:
    """Return True if this pod can be the first pod of a plan: its name ends in "-0", or no Kubernetes API is used.

    The first pod coordinates the job and therefore watches for plans. Other pods watch for plans only while they
    replace a lost first pod, which limits the load of the API server.
    """
    return not settings.use_api or settings.pod.endswith("-0")


def _exchange(settings: Settings) -> Exchange:
    if settings.use_api:
        return ConfigMaps(KubeApi.in_cluster(settings.namespace), settings.job)
    assert settings.plan_file is not None and settings.report_file is not None, "Settings.of checks this"
    return Files(settings.plan_file, settings.report_file)


async def _run(settings: Settings, lines: log_lines.LogLines) -> NoReturn:
    settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    agent = Agent(settings, complete_environment(os.environ), tls.load(settings.tls_dir), _exchange(settings))
    lines.uid, lines.running = settings.uid, agent.running
    code = await agent.run()
    sys.stdout.flush()
    os._exit(code)  # All processes of the container end with PID 1, so an orderly shutdown would only take time.


def run() -> NoReturn:
    """Run the agent with settings from the environment, and end the process with one of the exit codes of ``main``."""
    lines = log_lines.set_up()
    try:
        settings = Settings.of(os.environ)
        asyncio.run(_run(settings, lines))
    except SupersededError as error:
        log.error("superseded: %s", error)
        code = 1
    except ValueError as error:
        log.error("%s", error)
        code = EXIT_BAD_INPUT
    sys.exit(code)
