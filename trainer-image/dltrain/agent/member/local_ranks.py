"""Start, stop and kill the ranks of one pod, receive their messages, and copy their output to the log.

The run directory has two Unix sockets: ``ranks.sock`` for the messages of ranks (``protocol.rank_messages``), and
``local.sock`` for the shims that stand in for processes of Open MPI (``launch.shim``).
"""

import asyncio
import logging
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dlcontract import MAX_LOG_TAIL, MAX_OUTPUT, Plan, Rank
from dltrain.agent.member.mpi_daemon import MpiDaemon
from dltrain.agent.member.rank_watch import RankWatch, Watched
from dltrain.agent.member.running_rank import Running
from dltrain.agent.member.staged_checkpoints import StagedCheckpoints
from dltrain.agent.member.tunnel import Tunnel
from dltrain.host import cgroup
from dltrain.host.command_errors import CANNOT_START, NOT_FOUND, CommandNotFoundError
from dltrain.host.log_files import LogFiles
from dltrain.host.network_interfaces import interface_of
from dltrain.host.output import Output, available
from dltrain.host.processes import Exit, Process, Reaper
from dltrain.host.tasks import Tasks
from dltrain.launch import commands, rank_environment
from dltrain.launch.refused_launchers import write_refused_launchers
from dltrain.launch.shim import ATTEMPT_ENV, parse_request
from dltrain.launch.spawn import EXIT_CANNOT_START, ForkError, Spawner
from dltrain.protocol import rank_messages
from dltrain.protocol.agent_messages import DaemonEnded, RankEnded, RankLog, RankUp, RankUpdate
from dltrain.protocol.rank_messages import Hello, Observed, Step, invalid_message, rank_message_adapter
from dltrain.protocol.volume_layout import logs_directory

log = logging.getLogger(__name__)
Event = RankUp | RankUpdate | RankLog | RankEnded | DaemonEnded | Watched
DaemonLauncher = Callable[[str, str], Awaitable[tuple[int, str]]]
"""A function that runs the MPI daemon on another pod, in place of ssh: (host, shell command) → (exit code, last
output)."""

SHARED_MEMORY = Path("/dev/shm")
STOPPED_POLL_S = 0.5
WRITE_S = 0.2
"""Time in seconds that a hung rank has to write the stacks of its threads to its log."""


class LocalRanks:
    """The ranks of this pod in the current attempt, which is one launch of the plan's ranks.

    ``emit`` is called with every event of these ranks, in order.
    """

    def __init__(
        self,
        *,
        pod: str,
        pod_ip: str,
        run_dir: Path,
        memory: Path,
        env: dict[str, str],
        reaper: Reaper,
        emit: Callable[[Event], None],
        tunnel: Callable[[str], Tunnel],
    ) -> None:
        self.run_dir, self.memory = run_dir, memory
        self.running: dict[int, Running] = {}
        self.last_ranks: dict[int, Running] = {}
        self.log_files = LogFiles()
        self.launch_daemon: DaemonLauncher | None = None
        self.spawner = Spawner(reaper, run_dir, env)
        self.attempt = ""
        self._pod, self._interface = pod, interface_of(pod_ip)
        self._env, self._emit = env, emit
        self.watch = RankWatch(emit)
        self._daemon = MpiDaemon(reaper, env, pod_ip, run_dir, tunnel)
        self.staged = StagedCheckpoints(reaper, env, pod, self.plan_file, emit)
        self._plan: Plan | None = None
        self._tasks, self._starting = Tasks[Any](), Tasks[Process]()
        self._coming: dict[int, asyncio.Event] = {}
        self._oom_kills: int | None = None
        self._replaced: frozenset[str] = frozenset()  # Names that the log has (``_log_replaced``).

    @property
    def plan_file(self) -> Path:
        return self.run_dir / "plan.json"

    @property
    def busy(self) -> bool:
        return bool(self.running or self._starting) or self._daemon.process is not None

    async def listen(self) -> None:
        """Open two Unix sockets: one for the ranks, one for the programs that mpirun runs in place of ranks and ssh.

        The sockets stay open until the process ends.
        """
        for name, handler in (("ranks.sock", self._read_rank), ("local.sock", self._serve_shim)):
            path = self.run_dir / name
            path.unlink(missing_ok=True)
            await asyncio.start_unix_server(handler, path, limit=2**22)
        self._tasks.spawn(self._watch_ranks())

    async def _watch_ranks(self) -> None:
        """Look at the ranks every ``STOPPED_POLL_S`` seconds (``RankWatch``). Never return."""
        while True:
            await asyncio.sleep(STOPPED_POLL_S)
            ranks = {run.process: run.rank.rank for run in self.running.values()}
            helpers = {self._daemon.process: "the MPI daemon", self.spawner.zygote: "the zygote"}
            self.watch.poll(self.attempt, ranks, helpers)

    async def begin(self, attempt: str, plan: Plan) -> None:
        """Kill the processes of the previous attempt (launch of all ranks), and prepare this pod for a new attempt.

        ``attempt``: the name of the new attempt. ``plan``: the plan that the ranks read from ``plan_file``.
        """
        await self.end()
        self.attempt, self._plan = attempt, plan
        commands.session_dir(self.run_dir).mkdir(mode=0o700)
        if plan.model.framework == "MPI":
            write_refused_launchers(self.run_dir)
        temporary = self.plan_file.with_suffix(".new")
        temporary.write_text(plan.to_json())
        temporary.replace(self.plan_file)
        self.last_ranks = {}
        self.log_files.begin(logs_directory(plan), len(plan.ranks))
        for rank in self.ranks_here():
            self.log_files.write(rank.rank, f"=== attempt {attempt}, pod {self._pod}\n".encode())
        self._oom_kills = cgroup.oom_kills()
        self.watch.begin()

    async def end(self) -> None:
        """Kill the ranks and the MPI daemon, and wait until they have ended."""
        attempt, self.attempt = self.attempt, ""
        for starting in self._starting:
            starting.cancel()
        for started in list(self._coming.values()):
            await started.wait()  # Before that, a rank that starts right now is not among the running ones.
        ending = [*(run.process for run in self.running.values()), *filter(None, [self._daemon.process])]
        for process in ending:
            process.kill()
        await self.staged.end()
        if ending:
            log.info("attempt %s ends; killed %d processes", attempt, len(ending))
            await asyncio.gather(*(process.ended for process in ending))
        finished = [run.finished for run in self.running.values() if run.finished is not None]
        await asyncio.gather(*finished, return_exceptions=True)  # The next attempt must not fail again as this one.
        self._clear_mpi()

    def _clear_mpi(self) -> None:
        """Remove files of killed MPI and NCCL processes, and their shared memory, which counts as the pod's memory."""
        shutil.rmtree(commands.session_dir(self.run_dir), ignore_errors=True)
        for pattern in (f"sm_segment.{socket.gethostname()}.{os.getuid()}.*", "nccl-*"):
            for segment in SHARED_MEMORY.glob(pattern):
                with suppress(OSError):  # The segment belongs to another user.
                    segment.unlink()

    def stop(self, grace_s: float, *, progressed: bool | None, at_step: int | None = None) -> None:
        """Ask the ranks of this pod to checkpoint and exit. Kill those that still run after ``grace_s`` seconds.

        ``progressed``: True if any rank of the job has completed a step in this attempt. Every rank is then asked,
        because all ranks write a checkpoint together. If False, ranks that have not completed a step are killed at
        once, because they have nothing to save. If None, it is unknown, and these ranks continue until a second call,
        requested by the coordinator, decides.

        Ranks of a script without ``dltrain.init`` get SIGTERM. If the script calls ``dltrain.stop_requested``, its
        ranks are asked to stop after ``at_step`` steps instead, once the coordinator has chosen this number.
        """
        self.staged.stopping = True
        for run in self.running.values():
            if run.writer is None or run.needs_sigterm:
                run.process.terminate()
            elif run.only_reports and progressed is None:
                pass  # The coordinator's request has the step, which must be the same on all ranks.
            elif run.trains or progressed:
                run.ask_to_stop(run.writer, grace_s, at_step)
            elif progressed is False:
                run.process.kill()
            asyncio.get_running_loop().call_later(grace_s, run.process.kill)

    def explain(self) -> None:
        """Make the connected ranks write their stacks to their logs. Then emit the end of each rank's log (RankLog)."""
        for run in self.running.values():
            if run.writer is not None:
                run.process.send_alone(rank_messages.WHERE)
            self._tasks.spawn(self._report_log(run, self.attempt))

    async def _report_log(self, run: Running, attempt: str) -> None:
        await asyncio.sleep(WRITE_S)
        self._emit(RankLog(attempt=attempt, rank=run.rank.rank, tail=run.output.tail))

    def start_daemon(self, arguments: tuple[str, ...], host: str) -> None:
        """Run the Open MPI daemon, and emit DaemonEnded when it ends.

        ``arguments``: the daemon's command line from mpirun. ``host``: address of mpirun's pod.
        """
        attempt = self.attempt

        def ended(exit_code: int, tail: str) -> None:
            self._emit(DaemonEnded(attempt=attempt, exit_code=exit_code, tail=tail))

        self._daemon.start(arguments, host, attempt, ended)

    async def start_rank(self, rank: Rank, attempt: str, mpi: dict[str, str] | None = None) -> Running:
        """Start one rank and return it. Emit events for its start and end.

        ``mpi``: environment variables from the Open MPI daemon; None: started without MPI. Raise ValueError if
        ``attempt``, the launch that requested the rank, has ended, and OSError if the command cannot be started.
        """
        plan = self._plan
        if attempt != self.attempt or plan is None:
            raise ValueError(f"attempt {attempt} has ended")
        env = rank_environment.rank_environment(
            self._env, plan, rank, self.plan_file, self.run_dir / "ranks.sock", self.memory
        )
        # Without this variable, torch starts one thread for each core of the node.
        env.setdefault("OMP_NUM_THREADS", str(cgroup.threads(int(env["LOCAL_WORLD_SIZE"]))))
        env = rank_environment.torch_network(self._interface) | env
        if mpi is not None:
            env |= mpi | commands.mpi_network(self._interface)
        env |= rank_environment.framework_environment(plan, rank, attempt, env, self.run_dir)
        self._log_replaced(rank_environment.replaced_variables(self._env, env))
        script, folder = commands.rank_command(plan, env), str(Path.cwd())
        read_fd, write_fd = os.pipe()
        start = self.spawner.start(script.command, env=env | dict(script.env), cwd=folder, output=write_fd)
        starting = self._starting.spawn(start)
        started = self._coming[rank.rank] = asyncio.Event()
        await asyncio.wait({starting})  # The zygote, which forks the rank, answers only after its imports.
        os.close(write_fd)
        started.set()  # Coroutines that wait for this event resume after this function has returned.
        if starting.cancelled() or starting.exception() is not None:
            text = available(read_fd)
            os.close(read_fd)
        if starting.cancelled():
            raise ValueError(f"attempt {attempt} has ended")
        if isinstance(error := starting.exception(), ForkError) and text:
            raise ForkError(f"{error}: {text}", error.end)
        process = starting.result()
        run = self.running[rank.rank] = self.last_ranks[rank.rank] = Running(
            rank, process, Output(f"[rank {rank.rank}] ", read_fd, partial(self.log_files.write, rank.rank))
        )
        self._emit(RankUp(attempt=attempt, rank=rank.rank, pid=process.pid))
        run.finished = self._tasks.spawn(self._finish(run, attempt))
        return run

    def _log_replaced(self, names: frozenset[str]) -> None:
        """Log each of the names of variables that the job sets without effect once. Values may be secrets."""
        if new := sorted(names - self._replaced):
            self._replaced |= names
            log.warning(rank_environment.REPLACED, ", ".join(new))

    def start_all(self) -> None:
        """Start this pod's ranks directly, without MPI. If a rank cannot be started, report that it ended."""
        for rank in self.ranks_here():
            self._tasks.spawn(self._start_one(rank, self.attempt))

    async def _start_one(self, rank: Rank, attempt: str) -> None:
        try:
            await self.start_rank(rank, attempt)
        except ValueError as error:
            log.info("did not start rank %d: %s", rank.rank, error)
        except OSError as error:
            self._emit(self._not_started(attempt, rank.rank, error))

    def ranks_here(self) -> list[Rank]:
        return [] if self._plan is None else [rank for rank in self._plan.ranks if rank.pod == self._pod]

    async def _finish(self, run: Running, attempt: str) -> Exit:
        end = await run.process.ended
        await run.output.drained()
        killed = self._out_of_memory(end)
        end = await self.staged.rank_ended(attempt, run.rank.rank, end, is_last=len(self.running) == 1)
        self.watch.report_memory(attempt)
        if self.running.get(run.rank.rank) is run:
            del self.running[run.rank.rank]
        self._emit(
            RankEnded(
                attempt=attempt,
                rank=run.rank.rank,
                exit_code=end.code,
                signal=end.signal,
                out_of_memory=killed,
                tail=run.output.tail,
                output=run.output.end[-MAX_OUTPUT:],
            )
        )
        return end

    def _out_of_memory(self, end: Exit) -> bool:
        """Return True if the kernel killed a process with the exit status ``end`` because the pod's memory ran out."""
        kills, before = cgroup.oom_kills(), self._oom_kills
        return end.shell_code == 128 + 9 and kills is not None and before is not None and kills > before

    def _not_started(self, attempt: str, rank: int, error: OSError) -> RankEnded:
        """Return the exit record of a rank that could not be started because of ``error``.

        If the zygote, the process that forks ranks, ended, the record has its exit status. If this pod can never start
        the command, the exit code is 127, otherwise EXIT_CANNOT_START. ``attempt``: name of the launch.
        """
        code = NOT_FOUND if isinstance(error, CommandNotFoundError) else EXIT_CANNOT_START
        end = error.end if isinstance(error, ForkError) else Exit(code=code)
        return RankEnded(
            attempt=attempt,
            rank=rank,
            exit_code=None if end.signal is not None else end.code or EXIT_CANNOT_START,
            signal=end.signal,
            out_of_memory=self._out_of_memory(end),
            tail=f"{CANNOT_START}{error}"[:MAX_LOG_TAIL],
        )

    async def _read_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept the messages of one rank until it closes the connection. Ignore those of ranks that run elsewhere."""
        run: Running | None = None
        try:
            while line := await reader.readline():
                try:
                    message = rank_message_adapter.validate_json(line)
                except ValidationError as error:
                    log.warning("closed a rank's connection to the agent: %s", invalid_message(error))
                    break
                if isinstance(message, Observed) and message.rank in self.running:
                    self._emit(RankUpdate(attempt=self.attempt, message=message))
                    continue
                if isinstance(message, Hello) or (run is None and isinstance(message, Step) and message.reported):
                    if message.rank in self._coming:
                        await self._coming[message.rank].wait()  # A fork may connect before the zygote reports it.
                    run = self.running.get(message.rank)
                    if run is not None:
                        run.writer = writer
                if run is None or message.rank != run.rank.rank:
                    log.warning(
                        "ignored a message of rank %d; expected messages of this pod's running ranks", message.rank
                    )
                    continue
                run.add(message, time.time())
                self._emit(RankUpdate(attempt=self.attempt, message=message))
        except ConnectionError:
            pass  # The rank died; the end of its process is reported separately.
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
                    expected = "the request rank, or daemon on the coordinator's pod"
                    how = f"exit 1\nshim: found the request {arguments[:2]}; expected {expected}\n"
            writer.write(how.encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The shim was killed, so nothing waits for the answer.
        finally:
            writer.close()

    async def _shim_rank(self, variables: dict[str, str], reader: asyncio.StreamReader) -> str:
        attempt, number = variables.pop(ATTEMPT_ENV, ""), int(variables.get("PMIX_RANK", "-1"))
        rank = next((r for r in self.ranks_here() if r.rank == number), None)
        if rank is None:
            mine = [rank.rank for rank in self.ranks_here()]
            return f"exit 1\nshim: found rank {number}; expected one of this pod's ranks {mine}\n"
        try:
            run = await self.start_rank(rank, attempt, variables)
        except ValueError as error:
            return f"exit 1\nshim: {error}\n"
        except OSError as error:
            ended = self._not_started(attempt, number, error)
            self._emit(ended)
            return f"exit {ended.exit_code or 127}\n"
        assert run.finished is not None
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({gone, run.finished}, return_when=asyncio.FIRST_COMPLETED)
        if not run.finished.done():
            run.process.kill()
        gone.cancel()
        end = await run.finished
        return f"exit {end.code}\n" if end.signal is None else f"signal {end.signal}\n"
