"""The mpirun process of an attempt (launch of all ranks), and the MPI daemons that the pods' agents run for it."""

import asyncio
import os
import socket
from collections.abc import Callable

from dlcontract import Plan
from dltrain.agent.coordinator.links import Links
from dltrain.agent.job.settings import Settings
from dltrain.host.network_interfaces import interface_of
from dltrain.host.output import Output
from dltrain.host.processes import Exit, Process, Reaper, StoppedProcesses
from dltrain.launch import commands, loopback
from dltrain.protocol import agent_messages as proto


class Mpirun:
    """One mpirun process, which launches the ranks of a plan.

    If mpirun ends by itself, ``ended`` is called with its exit status and last output.
    """

    def __init__(
        self,
        settings: Settings,
        reaper: Reaper,
        env: dict[str, str],
        plan: Plan,
        attempt: str,
        links: Links,
        ended: Callable[[Exit, str], None],
    ) -> None:
        """Start mpirun, which launches the ranks of ``plan``. ``attempt``: the name of this launch.

        ``env``: the container's environment. Raise ValueError if mpirun cannot launch this plan, and OSError if mpirun
        cannot be started. ``ended``: called with (exit status, last output) if mpirun ends by itself.
        """
        self._attempt, self._pods, self._links, self._pod_ip = attempt, plan.pods, links, settings.pod_ip
        self._daemons: dict[str, asyncio.Future[tuple[int, str]]] = {}
        self.port: int | None = None
        """mpirun's port on the loopback interface for the MPI daemons; None until mpirun launches a daemon."""
        command = commands.mpirun_command(plan, settings.pod, socket.gethostname(), as_root=os.geteuid() == 0)
        interface = interface_of(settings.pod_ip)
        env = commands.mpi_environment(env, loopback.library(), interface, attempt, settings.run_dir)
        read_fd, write_fd = os.pipe()
        try:
            self.process: Process = reaper.start(command, env=env, output=write_fd)
        finally:
            os.close(write_fd)
        self._watching = asyncio.create_task(self._watch(Output("[mpirun] ", read_fd), ended))

    async def launch_daemon(self, pod: str, command: str) -> tuple[int, str]:
        """Let the agent of ``pod`` run the MPI daemon, which mpirun would start with ``ssh POD COMMAND``.

        Wait until the daemon ends. Return its (exit code, last output). If the daemon cannot be started, the exit code
        is 1 and the text says why.
        """
        if pod not in self._pods:
            return 1, f"mpirun: found pod {pod}; expected one of the pods {self._pods}\n"
        try:
            arguments = commands.daemon_arguments(command)
            self.port = commands.launcher_port(arguments, self._pod_ip)
        except ValueError as error:
            return 1, f"{error}\n"
        ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._daemons[pod] = ended
        if not self._links.send(pod, proto.StartDaemon(attempt=self._attempt, host=self._pod_ip, arguments=arguments)):
            return 1, f"no connection to pod {pod}\n"
        return await ended

    def daemon_ended(self, pod: str, code: int, tail: str) -> None:
        """Make the pending ``launch_daemon`` call for ``pod`` return (``code``, ``tail``): the daemon has ended.

        Do nothing if no call is pending for ``pod``.
        """
        ended = self._daemons.pop(pod, None)
        if ended is not None and not ended.done():
            ended.set_result((code, tail))

    def end(self) -> None:
        """Kill mpirun without calling the constructor's ``ended``.

        Pending calls of ``launch_daemon`` return (1, ""), as if the daemons had failed.
        """
        self._watching.cancel()
        self.process.kill()
        for pod in list(self._daemons):
            self.daemon_ended(pod, 1, "")

    async def _watch(self, output: Output, ended: Callable[[Exit, str], None]) -> None:
        end = await asyncio.shield(self.process.ended)
        await output.drained()
        ended(end, output.tail)


class Launcher:
    """Start and end mpirun for each attempt (launch of all ranks), one attempt after another."""

    def __init__(self, settings: Settings, reaper: Reaper, env: dict[str, str], links: Links) -> None:
        self._settings, self._reaper, self._env, self._links = settings, reaper, env, links
        self._mpirun: Mpirun | None = None
        self._stopped = StoppedProcesses()

    def start(self, plan: Plan, attempt: str, ended: Callable[[Exit, str], None]) -> None:
        """Start mpirun, which launches the ranks of ``plan``. ``attempt``: the name of this launch.

        ``ended``: called with mpirun's exit status and last output if mpirun ends by itself. Raise ValueError if mpirun
        cannot launch this plan, and OSError if mpirun cannot be started.
        """
        self._mpirun = Mpirun(self._settings, self._reaper, self._env, plan, attempt, self._links, ended)

    async def launch_daemon(self, pod: str, command: str) -> tuple[int, str]:
        """Let the agent of ``pod`` run the MPI daemon, which the current mpirun would start with ``ssh POD COMMAND``.

        Wait until the daemon ends. Return its (exit code, last output). If mpirun does not run or the daemon cannot be
        started, return (1, an error message).
        """
        if self._mpirun is None:
            return 1, "no launch of ranks is in progress\n"
        return await self._mpirun.launch_daemon(pod, command)

    def daemon_ended(self, pod: str, code: int, tail: str) -> None:
        """Record that the MPI daemon of ``pod`` ended with the exit code ``code`` and the last output ``tail``."""
        if self._mpirun is not None:
            self._mpirun.daemon_ended(pod, code, tail)

    @property
    def port(self) -> int | None:
        """The port on the loopback interface where mpirun waits for the MPI daemons.

        None if mpirun does not run or has not launched a daemon.
        """
        return None if self._mpirun is None else self._mpirun.port

    def check_stopped(self, now_s: float) -> None:
        """Kill mpirun if a signal such as SIGSTOP has stopped it for at least 4 s (``host.processes.STOPPED_S``).

        The attempt then fails, and the ranks restart. Call this method regularly. ``now_s``: current time of a
        monotonic clock.
        """
        running = [self._mpirun.process] if self._mpirun is not None else []
        for process in self._stopped.poll(running, now_s):
            process.kill()

    def end(self) -> None:
        """Kill mpirun if it runs. Do not call the function ``ended`` that was passed to ``start``."""
        mpirun, self._mpirun = self._mpirun, None
        if mpirun is not None:
            mpirun.end()
