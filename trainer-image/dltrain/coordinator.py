"""The coordinator of a job: gathers its pods, launches the ranks, watches, ends and relaunches them, and reports.

It runs in the agent of the plan's first pod. Everything that happens arrives in one queue, is taken in by ``_take``,
and the procedure in ``_coordinate`` waits on conditions over what is known, so that there is one thread of events
and no callback decides anything. If its pod goes, the members end their ranks and wait: the StatefulSet brings the
pod back, and its new coordinator takes a higher term. Users: ``agent``.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable

from dljob.contract import Failure, Outcome, Plan, Report, RunPhase
from dltrain import agentproto as proto
from dltrain import finished, launch
from dltrain.diagnosis import World, delay_s, diagnose
from dltrain.exchange import Reporter
from dltrain.interfaces import interface_of
from dltrain.ledger import Ledger
from dltrain.links import Connected, LinkEvent, Links, Lost, Said
from dltrain.localranks import Output
from dltrain.messages import Failed, Finished, Mark, Step
from dltrain.processes import Process, Reaper
from dltrain.settings import Settings
from dltrain.tls import Identity

log = logging.getLogger(__name__)

TICK_S = 0.5
SETTLE_S = 0.5
"""After the first sign of trouble: time for the cause to arrive after its echo."""
FAREWELL_S = 10.0
"""After the result: time for all ranks to end by themselves."""
END_S = 10.0
LEAVE_MARGIN_S = 3.0
"""Of a pod's grace period, kept for ending what did not end by itself."""
TERMINAL = (RunPhase.SUCCEEDED, RunPhase.FAILED)


class SupersededError(Exception):
    """Another coordinator holds a higher term: this one must end."""


class _ReplannedError(Exception):
    """A plan with another digest arrived."""


class _LeavingError(Exception):
    """This pod was told to stop."""


class Coordinator:
    """Coordinates one plan after another, from ``run`` on, until it is told to leave or superseded."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        reaper: Reaper,
        env: dict[str, str],
        reporter: Reporter,
        plan: Plan,
        previous: Report | None,
    ) -> None:
        self.boot = uuid.uuid4().hex
        self.settings, self.reaper, self.env, self.reporter = settings, reaper, env, reporter
        self.plan = plan
        self.ledger = Ledger(plan, previous)
        self.done = asyncio.Event()
        self.reporter.compose = lambda: self.ledger.report(time.time())
        self._previous = previous
        self._events: asyncio.Queue[LinkEvent | Plan | None] = asyncio.Queue()
        self._links = Links(identity.client, settings.agent_port, self._events.put_nowait)
        self._assigned: set[str] = set()
        self._away: set[str] = set()
        self._prepared: set[str] = set()
        self._ending: set[str] = set()
        self._ticked_s = 0.0
        self._world: World | None = None
        self._worlds = 0
        self._fruitless = 0
        self._mpirun: Process | None = None
        self._daemons: dict[str, asyncio.Future[tuple[int, str]]] = {}
        self._leaving = False
        self._stopping = False
        self._new_plan: Plan | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # What others ask of it

    def replan(self, plan: Plan) -> None:
        """A newer plan: from its own pod's agent, which watches."""
        self._events.put_nowait(plan)

    def leave(self) -> None:
        """This pod was told to stop: stop the world, then be ``done``."""
        self._leaving = True
        self._events.put_nowait(None)

    async def launch_daemon(self, host: str, command: str) -> tuple[int, str]:
        """In the place of ``ssh HOST COMMAND``: until the peer's MPI daemon ends; its exit code and last output."""
        world, pod = self._world, host
        if world is None or pod not in self.plan.pods:
            return 1, f"no world is being launched, or {host} is not one of {self.plan.pods}\n"
        try:
            arguments = launch.daemon_arguments(command)
        except ValueError as error:
            return 1, f"{error}\n"
        ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._daemons[pod] = ended
        if not self._links.send(pod, proto.StartDaemon(world=world.name, arguments=arguments)):
            return 1, f"no connection to pod {pod}\n"
        return await ended

    # The procedure

    async def run(self) -> None:
        """Returns after ``leave``. Raises SupersededError."""
        try:
            while True:
                try:
                    await self._coordinate()
                except _ReplannedError:
                    await self._stop_world(self.plan.grace_s)
                    self._adopt()
        except _LeavingError:
            self._phase(self.ledger.phase if self.ledger.phase in TERMINAL else RunPhase.STOPPED)
            await self._stop_world(max(1.0, self.plan.grace_s - LEAVE_MARGIN_S))
            self.reporter.urge()
        finally:
            self._end_mpirun()
            await self._links.close()
            self.done.set()

    async def _coordinate(self) -> None:
        """One plan, up to its end and beyond: afterwards it stays, since a restarted pod wants to know."""
        self._links.want(self._hosts())
        if (outcome := finished.read(self.plan)) is not None:
            self.ledger.outcome = outcome
            await self._idle(RunPhase.SUCCEEDED)
        previous, self._previous = self._previous, None
        if previous is not None and previous.uid == self.plan.uid:
            if previous.phase in TERMINAL and previous.plan_digest == self.plan.digest():
                await self._idle(previous.phase)
            if previous.phase in (RunPhase.LAUNCHING, RunPhase.RUNNING, RunPhase.RELAUNCHING):
                self._count("CoordinatorLost")
        while True:
            await self._gather()
            world = await self._launch()
            if await self._went_well(world):
                await self._succeed(world)
            if world.left:
                await self._stop_world(max(1.0, self.plan.grace_s - LEAVE_MARGIN_S))
            failure = diagnose(world)
            await self._end_world()
            await self._after(failure, world)

    async def _went_well(self, world: World) -> bool:
        """Watch a world until it is over, or until what went wrong with it can be told."""
        await self._until(lambda: world.succeeded or world.troubled or world.outcome is not None)
        if world.troubled:
            await self._until(lambda: world.succeeded, SETTLE_S)
        if world.outcome is None and not world.succeeded:
            return False
        await self._until(lambda: world.over, FAREWELL_S)
        return True

    async def _gather(self) -> None:
        """Until every pod of the plan is connected, has the plan, and is not about to leave."""
        if self.ledger.phase is not RunPhase.RELAUNCHING:
            self._phase(RunPhase.WAITING)
        await self._until(lambda: self._assigned - self._away >= set(self.plan.pods))
        self.ledger.mark_start(agents_up_unix_s=time.time())

    async def _launch(self) -> World:
        self._worlds += 1
        world = World(self.plan, f"{self.ledger.term}.{self._worlds}", time.monotonic())
        self._world, self._stopping = world, False
        self.ledger.begin_world()
        self._prepared.clear()
        self._links.send_all(proto.Prepare(world=world.name))
        await self._until(lambda: self._prepared >= set(self.plan.pods) or world.troubled)
        if world.troubled:
            return world
        self.ledger.mark_start(launched_unix_s=time.time())
        if self.ledger.phase is not RunPhase.RELAUNCHING:
            self._phase(RunPhase.LAUNCHING)
        if self.plan.model.framework == "Torchrun":
            self._links.send_all(proto.StartRanks(world=world.name))
        else:
            self._start_mpirun(world)
        return world

    async def _succeed(self, world: World) -> None:
        seconds = time.monotonic() - world.started_s
        step = self.ledger.report(time.time()).step
        outcome = self.ledger.outcome = world.outcome or Outcome(steps=step, seconds=seconds)
        finished.write(self.plan, outcome)
        self.ledger.failure = None
        await self._end_world()
        await self._idle(RunPhase.SUCCEEDED)

    async def _after(self, failure: Failure, world: World) -> None:
        """Count, tell, and wait before the next launch; or give up."""
        log.warning("%s: %s", failure.reason, failure.message)
        self.ledger.failure = failure
        self.ledger.failures += failure.counts
        if not failure.retry or self.ledger.failures > self.plan.backoff_limit:
            await self._idle(RunPhase.FAILED)
        self._count(failure.reason)
        self._fruitless = 0 if world.progressed or not failure.counts else self._fruitless + 1
        self._phase(RunPhase.RELAUNCHING)
        await self._until(lambda: False, delay_s(self._fruitless))

    async def _idle(self, phase: RunPhase) -> None:
        """Nothing more to do under this plan."""
        self._phase(phase)
        await self._until(lambda: False)

    async def _stop_world(self, grace_s: float) -> None:
        """Let the ranks checkpoint and end, then end what is left."""
        world = self._world
        if world is not None:
            self._stopping = True
            self._links.send_all(proto.StopRanks(world=world.name, grace_s=grace_s))
            ranks = self.plan.ranks
            await self._until(lambda: all(world.gone(rank) for rank in ranks), grace_s, interruptible=False)
        await self._end_world()

    async def _end_world(self) -> None:
        """Nothing of the world is left on any pod that can be reached."""
        world, self._world = self._world, None
        self._end_mpirun()
        if world is None:
            return
        waiting = self._links.connected
        self._links.send_all(proto.EndWorld(world=world.name))
        self._ending = waiting
        await self._until(lambda: not self._ending & self._links.connected, END_S, interruptible=False)

    # What is known

    async def _until(
        self, condition: Callable[[], bool], within_s: float | None = None, *, interruptible: bool = True
    ) -> bool:
        """Take in events until the condition holds (True) or the time is over (False).

        Raises _LeavingError and _ReplannedError where interruptible, SupersededError at any time.
        """
        deadline_s = None if within_s is None else time.monotonic() + within_s
        while True:
            if interruptible and self._leaving:
                raise _LeavingError
            if interruptible and self._new_plan is not None:
                raise _ReplannedError
            if condition():
                return True
            left_s = TICK_S if deadline_s is None else min(TICK_S, deadline_s - time.monotonic())
            if left_s <= 0:
                return False
            try:
                async with asyncio.timeout(left_s):
                    self._take(await self._events.get())
            except TimeoutError:
                pass
            while not self._events.empty():
                self._take(self._events.get_nowait())
            self._tick()

    def _tick(self) -> None:
        if time.monotonic() - self._ticked_s < TICK_S:
            return
        self._ticked_s = time.monotonic()
        world = self._world
        if world is not None and not self._stopping and world.outcome is None and world.hung is None:
            world.hung = self.ledger.silent_rank(time.monotonic())

    def _take(self, event: LinkEvent | Plan | None) -> None:
        match event:
            case Plan():
                self._planned(event)
            case Connected(pod, welcome):
                self._welcome(pod, welcome)
            case Lost(pod, why):
                self._assigned.discard(pod)
                self._away.discard(pod)
                if self._world is not None:
                    self._world.lost.setdefault(pod, why)
                self._daemon_ended(pod, 1, why)
            case Said(pod, line):
                self._said(pod, line)

    def _planned(self, plan: Plan) -> None:
        if plan.uid != self.plan.uid or plan.number < self.plan.number or plan == self.plan:
            return
        if plan.digest() != self.plan.digest():
            self._new_plan = plan
            return
        self.plan = self.ledger.plan = plan  # the same training under a new number or term
        self.ledger.term = max(self.ledger.term, plan.term)
        self._assign_all()
        self.reporter.urge()

    def _adopt(self) -> None:
        """Go over to the new plan: everyone of the old one learns it, those without a rank in it idle."""
        assert self._new_plan is not None
        self.plan, self._new_plan = self._new_plan, None
        if self.ledger.phase is RunPhase.FAILED:
            self.ledger.failures, self.ledger.failure = 0, None
        self.ledger.plan = self.plan
        self.ledger.term = max(self.ledger.term, self.plan.term)
        self.ledger.phase = RunPhase.WAITING
        self._fruitless = 0
        self._assign_all()

    def _welcome(self, pod: str, welcome: proto.Welcome) -> None:
        if welcome.term >= self.ledger.term and welcome.obeys not in ("", self.boot):
            if self._worlds:
                raise SupersededError(f"pod {pod} obeys term {welcome.term}, this coordinator has {self.ledger.term}")
            self.ledger.term = welcome.term + 1
            self._assign_all()
        else:
            self._assign(pod)

    def _assign_all(self) -> None:
        for pod in self._links.connected:
            self._assign(pod)

    def _assign(self, pod: str) -> None:
        self._assigned.discard(pod)
        assign = proto.Assign(
            coordinator=self.settings.pod,
            boot=self.boot,
            term=self.ledger.term,
            digest=self.plan.digest(),
            plan=self.plan.to_json(),
        )
        self._links.send(pod, assign)
        self._links.send(pod, proto.PhaseNow(phase=self.ledger.phase))

    def _said(self, pod: str, line: proto.Line) -> None:
        world = self._world
        match line:
            case proto.Assigned() if line.digest == self.plan.digest():
                self._assigned.add(pod)
            case proto.Refused():
                raise SupersededError(f"pod {pod}: {line.why}")
            case proto.Leaving():
                self._away.add(pod)
                if world is not None:
                    world.left.add(pod)
            case proto.WorldEnded():
                self._ending.discard(pod)
            case _ if world is None or getattr(line, "world", None) != world.name:
                return
            case proto.Prepared():
                self._prepared.add(pod)
            case proto.RankUp():
                world.up.add(line.rank)
                if self.plan.model.command and len(world.up) == len(self.plan.ranks):
                    self._running()
            case proto.RankNews():
                self._news(line, world)
            case proto.RankEnded():
                world.ended[line.rank] = line
                self.ledger.forget_rank(line.rank)
            case proto.DaemonEnded():
                self._daemon_ended(pod, line.exit_code, line.tail)

    def _news(self, line: proto.RankNews, world: World) -> None:
        news = line.news
        if news.rank in world.ended:
            return
        transition = self.ledger.hear(news, time.monotonic())
        match news:
            case Step():
                world.progressed = True
                self._running()
            case Mark(what="first_step"):
                self._running()
            case Failed():
                world.failures.append((news.rank, news.failure))
            case Finished() if news.rank == 0:
                world.outcome = news.outcome
        if transition:
            self.reporter.urge()

    # What it does

    def _hosts(self) -> dict[str, str]:
        hosts = {rank.pod: rank.host for rank in self.plan.ranks}
        return {pod: self.settings.pod_ip if pod == self.settings.pod else host for pod, host in hosts.items()}

    def _start_mpirun(self, world: World) -> None:
        own = socket.gethostname()
        command = launch.mpirun_command(self.plan, self.settings.pod, own, as_root=os.geteuid() == 0)
        world.launcher_runs = True
        interface = interface_of(self.settings.pod_ip)
        env = launch.mpi_environment(self.env, interface, world.name, self.settings.run_dir)
        read_fd, write_fd = os.pipe()
        mpirun = self._mpirun = self.reaper.start(command, env=env, output=write_fd)
        os.close(write_fd)
        output = Output("[mpirun] ", read_fd)

        async def watch() -> None:
            end = await mpirun.ended
            await output.drained()
            if self._mpirun is mpirun:
                world.launcher, world.launcher_tail, world.launcher_runs = end, output.tail, False

        task = asyncio.create_task(watch())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_mpirun(self) -> None:
        mpirun, self._mpirun = self._mpirun, None
        if mpirun is not None:
            mpirun.kill()
        for pod in list(self._daemons):
            self._daemon_ended(pod, 1, "the world ended")

    def _daemon_ended(self, pod: str, code: int, tail: str) -> None:
        ended = self._daemons.pop(pod, None)
        if ended is not None and not ended.done():
            ended.set_result((code, tail))

    def _running(self) -> None:
        if self.ledger.phase in (RunPhase.LAUNCHING, RunPhase.RELAUNCHING):
            self._phase(RunPhase.RUNNING)

    def _count(self, cause: str) -> None:
        self.ledger.restarts = dict(Counter(self.ledger.restarts) + Counter([cause]))

    def _phase(self, phase: RunPhase) -> None:
        if phase is not self.ledger.phase:
            log.info("phase %s", phase)
        self.ledger.phase = phase
        self._links.send_all(proto.PhaseNow(phase=phase))
        self.reporter.urge()
