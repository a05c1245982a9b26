"""The Open MPI daemon of one pod, which starts the pod's ranks for mpirun."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dltrain.agent.member.tunnel import Tunnel
from dltrain.host.network_interfaces import interface_of
from dltrain.host.output import Output
from dltrain.host.processes import Process, Reaper
from dltrain.host.tasks import Tasks
from dltrain.launch import commands, loopback


class MpiDaemon:
    """The Open MPI daemon (prted) of this pod. Its connection to mpirun goes through a tunnel of the agents."""

    def __init__(
        self, reaper: Reaper, env: dict[str, str], pod_ip: str, run_dir: Path, tunnel: Callable[[str], Tunnel]
    ) -> None:
        """Store what ``start`` needs. ``env``: the container's environment. ``pod_ip``: address of this pod.

        ``run_dir``: the agent's directory for sockets and temporary files.
        ``tunnel``: a function that opens a tunnel to the mpirun in the pod with a given address, and raises OSError if
        no port can be opened.
        """
        self.process: Process | None = None
        """The daemon's process; None if it does not run."""
        self._reaper, self._env, self._run_dir, self._tunnel = reaper, env, run_dir, tunnel
        self._pod_ip, self._interface = pod_ip, interface_of(pod_ip)
        self._tasks: Tasks[Any] = Tasks()

    def start(self, arguments: tuple[str, ...], host: str, attempt: str, ended: Callable[[int, str], None]) -> None:
        """Run the daemon with the command-line ``arguments`` that mpirun passes. ``host``: address of mpirun's pod.

        ``attempt``: the name of this launch of all ranks. ``ended`` is called with the daemon's exit code and last
        output. If the daemon cannot be started, the exit code is 1 and the output says why.
        """
        tunnel = None
        read_fd, write_fd = os.pipe()
        try:
            library = loopback.library()
            env = commands.mpi_environment(self._env, library, self._interface, attempt, self._run_dir)
            arguments = commands.without_others_settings(arguments, env)
            tunnel = self._tunnel(host)
            arguments = commands.with_launcher_port(arguments, self._pod_ip, tunnel.port)
            command = (str(commands.bin_dir() / "prted"), *arguments)
            process = self.process = self._reaper.start(command, env=env, output=write_fd)
        except (OSError, ValueError) as error:
            os.close(read_fd)
            if tunnel is not None:
                tunnel.close()
            ended(1, f"cannot start the MPI daemon: {error}\n")
            return
        finally:
            os.close(write_fd)
        self._tasks.spawn(self._watch(process, tunnel, Output("[prted] ", read_fd), ended))

    async def _watch(self, process: Process, tunnel: Tunnel, output: Output, ended: Callable[[int, str], None]) -> None:
        end = await process.ended
        tunnel.close()
        await output.drained()
        if self.process is process:
            self.process = None
        ended(end.shell_code, output.tail)
