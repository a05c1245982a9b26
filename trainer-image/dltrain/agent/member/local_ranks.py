"""The ranks of one pod: started, listened to, stopped and ended; their output passed on.

Two Unix sockets in the run directory: ``ranks.sock`` (``messages``: news from ranks, Stop to them) and
``local.sock`` (``shim``: processes that Open MPI thinks it runs here).
"""

import asyncio
import logging
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dlcontract import Plan, Rank
from dltrain.agent.member.running_rank import Running
from dltrain.host import cgroup
from dltrain.host.output import Output
from dltrain.host.processes import Exit, Process, Reaper, Stillness
from dltrain.launch import commands
from dltrain.launch.shim import WORLD_ENV, parse_request
from dltrain.launch.spawn import Spawner
from dltrain.protocol import rank_messages
from dltrain.protocol.agent_messages import DaemonEnded, RankEnded, RankLog, RankNews, RankStopped, RankUp
from dltrain.protocol.rank_messages import Hello, news_adapter

log = logging.getLogger(__name__)
T = TypeVar("T")
Event = RankUp | RankNews | RankStopped | RankLog | RankEnded | DaemonEnded
DaemonLauncher = Callable[[str, str], Awaitable[tuple[int, str]]]
"""(host, shell command) → exit code and last output of the daemon: what stands in for ssh."""

SHARED_MEMORY = Path("/dev/shm")
LOOK_S = 0.5
WRITE_S = 0.2
"""For a rank to write down where it is."""


class LocalRanks:
    """The current world in this pod. ``emit`` gets every event, in order."""

    def __init__(
        self,
        *,
        pod: str,
        interface: str,
        run_dir: Path,
        memory: Path,
        env: dict[str, str],
        reaper: Reaper,
        emit: Callable[[Event], None],
    ) -> None:
        self.run_dir, self.memory = run_dir, memory
        self.running: dict[int, Running] = {}
        self.last_ranks: dict[int, Running] = {}
        self.launch_daemon: DaemonLauncher | None = None
        self.spawner = Spawner(reaper, run_dir, env)
        self.world = ""
        self._pod, self._interface, self._env, self._reaper, self._emit = pod, interface, env, reaper, emit
        self._plan: Plan | None = None
        self._daemon: Process | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: set[asyncio.Task[Process]] = set()
        self._coming: dict[int, asyncio.Event] = {}
        self._oom_kills: int | None = None

    @property
    def plan_file(self) -> Path:
        return self.run_dir / "plan.json"

    @property
    def busy(self) -> bool:
        return bool(self.running or self._starting) or self._daemon is not None

    async def listen(self) -> None:
        """Open both sockets; they live as long as the process."""
        for name, handler in (("ranks.sock", self._hear_rank), ("local.sock", self._serve_shim)):
            path = self.run_dir / name
            path.unlink(missing_ok=True)
            await asyncio.start_unix_server(handler, path, limit=2**22)
        self._keep(self._look_for_stopped())

    async def _look_for_stopped(self) -> None:
        """For ever: a rank that is stopped (SIGSTOP) is told of, whatever it was busy with; a daemon is killed, which
        ends the world.
        """
        stillness = Stillness()
        while True:
            await asyncio.sleep(LOOK_S)
            ranks = {run.process: run.rank.rank for run in self.running.values()}
            daemon = [self._daemon] if self._daemon is not None else []
            for process, stopped_s in stillness.look([*ranks, *daemon], time.monotonic()).items():
                if process in ranks:
                    self._emit(RankStopped(world=self.world, rank=ranks[process], stopped_s=stopped_s))
                else:
                    log.warning("the MPI daemon was stopped %.0f s ago and is killed", stopped_s)
                    process.kill()

    async def begin(self, world: str, plan: Plan) -> None:
        """A new world with this plan; what is left of the one before is killed."""
        await self.end()
        self.world, self._plan = world, plan
        commands.session_dir(self.run_dir).mkdir(mode=0o700)
        temporary = self.plan_file.with_suffix(".new")
        temporary.write_text(plan.to_json())
        temporary.replace(self.plan_file)
        self.last_ranks = {}
        self._oom_kills = cgroup.oom_kills()

    async def end(self) -> None:
        """Kill the ranks and the MPI daemon, wait until they are gone."""
        world, self.world = self.world, ""
        for starting in self._starting:
            starting.cancel()
        ending = [run.process for run in self.running.values()]
        if self._daemon is not None:
            ending.append(self._daemon)
        for process in ending:
            process.kill()
        if ending:
            log.info("world %s ends: %d processes killed", world, len(ending))
            await asyncio.gather(*(process.ended for process in ending))
        for run in list(self.running.values()):
            if run.finished is not None:
                await run.finished
        self._clear_mpi()

    def _clear_mpi(self) -> None:
        """Remove what a killed MPI leaves: its files, and shared memory that would count against the pod's limit."""
        shutil.rmtree(commands.session_dir(self.run_dir), ignore_errors=True)
        for pattern in (f"sm_segment.{socket.gethostname()}.{os.getuid()}.*", "nccl-*"):
            for segment in SHARED_MEMORY.glob(pattern):
                with suppress(OSError):  # another's
                    segment.unlink()

    def stop(self, grace_s: float, *, progressed: bool | None) -> None:
        """Ask the ranks to checkpoint and end; those with nothing to save end at once, all after ``grace_s``.

        ``progressed``: whether any rank of the world has made a step, so that there is something to save for all, also
        for those whose own step was not heard of yet. None: the coordinator knows, and will say so in a moment.
        A rank that never spoke to us is a program of its own: it gets SIGTERM.
        """
        for run in self.running.values():
            if run.writer is None:
                run.process.send(15)
            elif run.trains or progressed:
                run.ask_to_stop(run.writer, grace_s)
            elif progressed is False:
                run.process.kill()
            asyncio.get_running_loop().call_later(grace_s, run.process.kill)

    def explain(self) -> None:
        """Have the ranks that speak to us write down where they are, and tell how their logs end then."""
        for run in self.running.values():
            if run.writer is not None:
                run.process.send_alone(rank_messages.WHERE)
            self._keep(self._tell_log(run, self.world))

    async def _tell_log(self, run: Running, world: str) -> None:
        await asyncio.sleep(WRITE_S)
        self._emit(RankLog(world=world, rank=run.rank.rank, tail=run.output.tail))

    def start_daemon(self, arguments: tuple[str, ...]) -> None:
        """Run Open MPI's daemon; its end is an event."""
        world = self.world
        read_fd, write_fd = os.pipe()
        env = commands.mpi_environment(self._env, self._interface, world, self.run_dir)
        argv = (str(commands.bin_dir() / "prted"), *commands.without_others_settings(arguments, env))
        try:
            daemon = self._daemon = self._reaper.start(argv, env=env, output=write_fd)
        finally:
            os.close(write_fd)
        output = Output("[prted] ", read_fd)

        async def watch() -> None:
            end = await daemon.ended
            await output.drained()
            if self._daemon is daemon:
                self._daemon = None
            self._emit(DaemonEnded(world=world, exit_code=end.shell_code, tail=output.tail))

        self._keep(watch())

    async def start_rank(self, rank: Rank, world: str, mpi: dict[str, str] | None = None) -> Running:
        """Start one rank; its start and its end are events. ``mpi``: what Open MPI's daemon set for it.

        Raises ValueError for a world that has ended, OSError where the command cannot be started.
        """
        plan = self._plan
        if world != self.world or plan is None:
            raise ValueError(f"world {world} has ended")
        read_fd, write_fd = os.pipe()
        env = commands.rank_environment(self._env, plan, rank, self.plan_file, self.run_dir / "ranks.sock", self.memory)
        # Of its own accord torch starts as many as the node has cores.
        env.setdefault("OMP_NUM_THREADS", str(cgroup.threads(int(env["LOCAL_WORLD_SIZE"]))))
        env = commands.torch_network(self._interface) | env
        if mpi is not None:
            env |= mpi | commands.mpi_network(self._interface)
        start = self.spawner.start(commands.rank_command(plan), env=env, cwd=str(Path.cwd()), output=write_fd)
        starting = self._keep(start, self._starting)
        known = self._coming[rank.rank] = asyncio.Event()
        await asyncio.wait({starting})  # the zygote answers when its imports are done
        os.close(write_fd)
        known.set()  # those who wait for it go on after this function has
        if starting.cancelled() or starting.exception() is not None:
            os.close(read_fd)
        if starting.cancelled():
            raise ValueError(f"world {world} has ended")
        process = starting.result()
        run = self.running[rank.rank] = self.last_ranks[rank.rank] = Running(
            rank, process, Output(f"[rank {rank.rank}] ", read_fd)
        )
        self._emit(RankUp(world=world, rank=rank.rank, pid=process.pid))
        run.finished = self._keep(self._finish(run, world))
        return run

    def start_all(self) -> None:
        """Start this pod's ranks directly, without MPI. One that cannot be started is reported as ended."""
        for rank in self.ranks_here():
            self._keep(self._start_one(rank, self.world))

    async def _start_one(self, rank: Rank, world: str) -> None:
        try:
            await self.start_rank(rank, world)
        except ValueError as error:
            log.info("rank %d not started: %s", rank.rank, error)
        except OSError as error:
            self._emit(RankEnded(world=world, rank=rank.rank, exit_code=127, tail=f"cannot start: {error}"))

    def ranks_here(self) -> list[Rank]:
        return [] if self._plan is None else [rank for rank in self._plan.ranks if rank.pod == self._pod]

    async def _finish(self, run: Running, world: str) -> Exit:
        end = await run.process.ended
        await run.output.drained()
        kills, before = cgroup.oom_kills(), self._oom_kills
        killed = end.shell_code == 128 + 9 and kills is not None and before is not None and kills > before
        if self.running.get(run.rank.rank) is run:
            del self.running[run.rank.rank]
        self._emit(
            RankEnded(
                world=world,
                rank=run.rank.rank,
                exit_code=end.code,
                signal=end.signal,
                out_of_memory=killed,
                tail=run.output.tail,
            )
        )
        return end

    async def _hear_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        run: Running | None = None
        try:
            while line := await reader.readline():
                try:
                    news = news_adapter.validate_json(line)
                except ValidationError as error:
                    log.warning("news not understood, connection closed: %s", error)
                    break
                if isinstance(news, Hello):
                    if news.rank in self._coming:
                        await self._coming[news.rank].wait()  # a fork may speak before the zygote tells of it
                    run = self.running.get(news.rank)
                    if run is not None:
                        run.writer = writer
                if run is None or news.rank != run.rank.rank:
                    log.warning("news of rank %d, which does not run here, ignored", news.rank)
                    continue
                run.latest[type(news)] = news
                run.heard_unix_s = time.time()
                self._emit(RankNews(world=self.world, news=news))
        except ConnectionError:
            pass  # it died; its process tells
        finally:
            if run is not None and run.writer is writer:
                run.writer = None
            writer.close()

    async def _serve_shim(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            arguments, variables = parse_request(await reader.readexactly(int(await reader.readexactly(8))))
            match arguments:
                case ["rank"]:
                    how = await self._shim_rank(variables, reader)
                case ["daemon", host, *words] if self.launch_daemon is not None:
                    code, text = await self.launch_daemon(host, " ".join(words))
                    how = f"exit {code}\n{text}"
                case _:
                    how = f"exit 1\nshim: this agent cannot do {arguments[:2]}\n"
            writer.write(how.encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the shim was killed; nobody waits for the answer
        finally:
            writer.close()

    async def _shim_rank(self, variables: dict[str, str], reader: asyncio.StreamReader) -> str:
        world, number = variables.pop(WORLD_ENV, ""), int(variables.get("PMIX_RANK", "-1"))
        rank = next((r for r in self.ranks_here() if r.rank == number), None)
        if rank is None:
            mine = [rank.rank for rank in self.ranks_here()]
            return f"exit 1\nshim: rank {number} is not this pod's; the plan gives it {mine}\n"
        try:
            run = await self.start_rank(rank, world, variables)
        except ValueError as error:
            return f"exit 1\nshim: {error}\n"
        except OSError as error:
            self._emit(RankEnded(world=world, rank=number, exit_code=127, tail=f"cannot start: {error}"))
            return "exit 127\n"
        assert run.finished is not None
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({gone, run.finished}, return_when=asyncio.FIRST_COMPLETED)
        if not run.finished.done():
            run.process.kill()
        gone.cancel()
        end = await run.finished
        return f"exit {end.code}\n" if end.signal is None else f"signal {end.signal}\n"

    def _keep(self, work: Coroutine[Any, Any, T], among: "set[asyncio.Task[T]] | None" = None) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        tasks = self._tasks if among is None else among
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task
