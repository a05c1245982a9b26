"""Start ranks: fork a zygote (a process that has imported torch) for a Python command; execute any other command."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from dltrain.host.command_errors import CommandNotFoundError, command_error, missing_script
from dltrain.host.processes import Exit, Process, Reaper
from dltrain.host.tasks import Tasks
from dltrain.launch.injected import is_injected
from dltrain.launch.zygote import can_run

ENDS_S = 1.0
"""Maximum seconds to wait for the end of a zygote (process that forks ranks) that has closed a connection."""


EXIT_CANNOT_START = 126
"""Exit code of a rank that could not be started although its command exists, as in a shell."""


class ForkError(OSError):
    """The zygote, the process that forks ranks, did not fork a rank.

    ``end``: the zygote's exit status, or one with the code EXIT_CANNOT_START if the zygote still runs.
    """

    def __init__(self, message: str, end: Exit) -> None:
        super().__init__(message)
        self.end = end


class Spawner:
    """Start processes for commands. Python commands run in forks of a zygote, a process that has imported torch.

    An injected agent has no zygote, because its Python is not the Python of the ranks.
    """

    def __init__(self, reaper: Reaper, run_dir: Path, env: dict[str, str]) -> None:
        self._reaper = reaper
        self._path = run_dir / "zygote.sock"
        self._env = env
        self._zygote: Process | None = None
        self._watching: Tasks[None] = Tasks()

    @property
    def zygote(self) -> Process | None:
        """The process that forks ranks and learns of their ends; None if it does not run."""
        return self._zygote if self._zygote is not None and not self._zygote.ended.done() else None

    def warm(self) -> None:
        """Start the zygote, from which ranks are forked, if it does not run. Do not wait for its imports.

        Do nothing if this agent is injected.
        """
        if is_injected():
            return
        if self._zygote is not None and not self._zygote.ended.done():
            return
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            listener.listen(128)
            fd = listener.fileno()
            argv = (sys.executable, "-m", "dltrain.launch.zygote", str(fd))
            self._zygote = self._reaper.start(argv, env=self._env, pass_fds=(fd,))

    async def start(self, argv: Sequence[str], *, env: dict[str, str], cwd: str, output: int) -> Process:
        """Start the command ``argv`` in the directory ``cwd``. Write its output to the descriptor ``output``.

        The caller must close its own copy of ``output``. Raise CommandNotFoundError if the command cannot be started in
        this pod, OSError if it could not be started this time, and ForkError if the zygote did not fork it.
        """
        if not is_injected() and is_this_python(argv[0], env) and can_run(tuple(argv[1:])):
            self.warm()
            assert self._zygote is not None
            zygote = self._zygote
            if (why := missing_script(tuple(argv[1:]), cwd)) is not None:
                raise CommandNotFoundError(why)
            try:
                return await self._fork(argv[1:], env, cwd, output)
            except ConnectionError as error:
                raise await _fork_error(zygote, error) from error
        try:
            return self._reaper.start(argv, env=env, output=output, cwd=cwd)
        except OSError as error:
            raise command_error(argv, env, cwd, error) from error

    async def _fork(self, argv: Sequence[str], env: dict[str, str], cwd: str, output: int) -> Process:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._path))
        order = json.dumps({"argv": list(argv), "env": env, "cwd": cwd}).encode() + b"\n"
        connection.setblocking(False)
        sent = socket.send_fds(connection, [order], [output])
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        writer.write(order[sent:])
        try:
            first = await reader.readline()
            if not first:
                raise ConnectionError("the zygote closed the connection")
        except BaseException:
            writer.close()  # Also on cancellation: the zygote then kills the fork.
            raise
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        process = Process(json.loads(first)["pid"], ended)

        async def watch() -> None:
            last = await reader.readline()
            writer.close()
            if not ended.done():
                ended.set_result(Exit.of(json.loads(last)["status"]) if last else Exit(signal=9))

        self._watching.spawn(watch())
        return process


async def _fork_error(zygote: Process, error: ConnectionError) -> ForkError:
    await asyncio.wait({zygote.ended}, timeout=ENDS_S)
    if not zygote.ended.done():
        return ForkError("the zygote, the process that forks ranks, could not fork", Exit(code=EXIT_CANNOT_START))
    end = zygote.ended.result()
    return ForkError(f"the zygote, the process that forks ranks, ended with {end}", end)


def is_this_python(command: str, env: dict[str, str]) -> bool:
    """Return True if ``command`` is this agent's Python interpreter, so that a command can run in a fork of the zygote.

    ``env``: an environment; a ``command`` without a directory is looked up in its PATH.
    """
    own = Path(sys.executable)
    if os.sep in command:
        found = Path(command)
    else:
        places = (Path(place) / command for place in env.get("PATH", "").split(os.pathsep) if place)
        found = next((place for place in places if place.is_file()), own.with_name("nothing"))
    return found == own or (found.parent == own.parent and found.resolve() == own.resolve())
