"""A process that has imported torch and forks ranks on request: ``python -m dltrain.launch.zygote FD [PARENT]``.

The agent starts the zygote before anything else. The zygote's imports take more than a second of CPU time, which lasts
five times as long under a quota of 0.2 CPUs. They run while the pods connect, once per pod instead of once per rank and
restart. The zygote creates no tensor and starts no thread, so each fork is like a fresh interpreter with loaded
modules.

Each rank has one connection on the Unix socket that is inherited as FD. The agent sends a JSON line (``Order``) and
attaches the rank's output pipe. The zygote answers ``{"pid": n}`` and, when the rank ends, ``{"status": n}``, a waitpid
status. Closing the connection kills the rank.

A rank requests its data-loading workers in the same way, but attaches a second descriptor, a socket to the worker
(``data.feeding.forking``).
"""

import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dltrain.host.command_errors import CANNOT_START, NOT_FOUND, missing, without_u
from dltrain.launch.inherited_socket import hand_over
from dltrain.protocol.rank_variables import OBSERVE_ENV
from dltrain.startup import gloo_threads, imports, nested_launcher

MPI_PROGRAM_ENV = "DLTRAIN_MPI_LIBRARY"
"""Name of the environment variable with the path of the MPI library, for the ranks of an MPI program."""
COMPATIBILITY = Path(__file__).parents[1] / "compatibility"
"""Folder with dltrain's own versions of other packages, such as ``horovod``. Installed packages take precedence."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Order:
    """A Python command to run in a fork: its arguments, environment and directory.

    ``argv``: the interpreter's arguments, such as ``("-m", "dltrain.builtin.rank")``.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


class Serving:
    """Fork a child for each ``Order`` (a command to run) that the agent sends.

    ``run`` returns only in a child, with the Order that the child must execute.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.pids: dict[socket.socket, int] = {}

    def run(self) -> Order:
        while True:
            for key, _ in self.selector.select():
                if self.selector.get_map().get(key.fd) is not key:
                    continue  # Another event of this round has closed it.
                handle: Callable[[Any], Order | None] = key.data
                if (order := handle(key.fileobj)) is not None:
                    return order

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        partial = _PartialRequest()

        def read(connection: socket.socket) -> Order | None:
            return self._read(connection, partial)

        self.selector.register(connection, selectors.EVENT_READ, read)

    def _read(self, connection: socket.socket, partial: "_PartialRequest") -> Order | None:
        try:
            data, fds, _, _ = socket.recv_fds(connection, 65536, 4)
        except ConnectionError:
            data, fds = b"", []
        partial.fds += fds
        if not data:
            if (pid := self.pids.get(connection)) is not None:
                kill_group(pid)
            else:
                self._close(connection)
            return None
        partial.data += data
        if not partial.data.endswith(b"\n"):
            return None
        return self._fork(connection, partial)

    def _fork(self, connection: socket.socket, partial: "_PartialRequest") -> Order | None:
        fields: dict[str, Any] = json.loads(partial.data)
        order = Order(tuple(fields["argv"]), fields["env"], fields["cwd"])
        output, *others = partial.fds
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # Too many processes: the running ranks must continue.
            os.write(output, f"dltrain: cannot start {' '.join(order.argv)}: {error}\n".encode())
            for fd in partial.fds:
                os.close(fd)
            self._close(connection)
            return None
        if pid == 0:
            self._close_inherited()
            become_rank(order, output, parent)
            if others:
                hand_over(others[0])
            return order
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # The child does the same; done here, too, so that the group exists before the answer.
        for fd in partial.fds:
            os.close(fd)
        self.pids[connection] = pid
        with contextlib.suppress(ConnectionError):
            connection.sendall(b'{"pid": %d}\n' % pid)
        pidfd = os.pidfd_open(pid)

        def ended(_: int) -> None:
            self.selector.unregister(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(pid, 0)
            kill_group(pid)  # Kill processes that the rank left, such as data-loading workers.
            with contextlib.suppress(ConnectionError):
                connection.sendall(b'{"status": %d}\n' % status)
            del self.pids[connection]
            self._close(connection)

        self.selector.register(pidfd, selectors.EVENT_READ, ended)
        return None

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection)
        connection.close()

    def _close_inherited(self) -> None:
        """Close the sockets of the zygote in the forked child."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self.selector.close()


class _PartialRequest:
    def __init__(self) -> None:
        self.data = b""
        self.fds: list[int] = []


def kill_group(pid: int) -> None:
    """Send SIGKILL to a rank's process group. Do nothing if the group has no process left.

    ``pid``: the rank's process id, which is also the id of its group.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when the process ``parent`` ends. Exit if this parent has already ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_rank(order: Order, output: int, parent: int) -> None:
    """Turn this forked process into the rank of ``order``: set its process group, output, environment and directory.

    ``output``: descriptor for the rank's output. ``parent``: process id of the zygote. The kernel kills the rank when
    the zygote ends.
    """
    os.setpgid(0, 0)
    die_with(parent)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
        score.write("1000")  # If memory runs out, the kernel kills the rank and not the agent.
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.cwd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.orig_argv[:] = [sys.executable, *order.argv]
    if "numpy.random" in sys.modules:  # Otherwise all forks share one seed.
        sys.modules["numpy.random"].seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
        if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
            torch.set_num_threads(max(1, int(threads)))  # OpenMP has already read the zygote's value.


def run_mpi_program(order: Order, library: str) -> None:
    """Run an order as ``run`` does, but after an error end the process without MPI_Finalize.

    MPI_Finalize waits for all ranks, and the other ranks wait for the one that failed, so the program would hang. The
    agent reports the exit code, and the coordinator then ends the other ranks. ``library``: path of the MPI library. It
    is loaded here for mpi4py, because the dynamic loader does not read a fork's LD_LIBRARY_PATH.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    try:
        run(order)
    except SystemExit as end:
        if end.code is None or end.code == 0:
            raise
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # noqa: T201
        _end_now(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001 - any error ends the program
        sys.excepthook(*sys.exc_info())
        _end_now(1)


def _end_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def run(order: Order) -> None:
    """Run an order's Python command in this process as the interpreter would, in a fresh ``__main__``.

    The command is ``-m MODULE …``, ``-c CODE …`` or ``FILE …``. If the file is a launcher such as /usr/bin/torchrun, an
    interpreter replaces this process and runs the launcher's script.

    An error of the script is shown as by the interpreter, without the frames of this module, and raised as SystemExit.
    """
    nested_launcher.replace_launcher(os.environ, b"".join(os.fsencode(word) + b"\0" for word in ("", *order.argv)))
    nested_launcher.replace_launches(os.environ)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    # multiprocessing stored the zygote's main module as __mp_main__ when it was imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if str(COMPATIBILITY) not in sys.path:
        sys.path.append(str(COMPATIBILITY))
    if "MASTER_ADDR" in os.environ:
        gloo_threads.end_at_exit()
    try:
        _run_as_main(order, main)
    except (SystemExit, KeyboardInterrupt):  # The interpreter ends with the code, and by the signal.
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        _show(error)
        raise SystemExit(1) from None


def _show(error: BaseException) -> None:
    """Show an error that ends the script, with the frames of the script alone."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    sys.excepthook(type(error), error, traceback)


def _run_as_main(order: Order, main: types.ModuleType) -> None:
    match without_u(order.argv):
        case ("-m", module, *rest):
            sys.argv = ["-m", *rest]
            sys.path.insert(0, order.cwd)
            sys.modules.pop(module, None)  # runpy warns about a module that is already imported.
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # python -m calls this.
        case ("-c", code, *rest):
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case (file, *rest):
            sys.argv = [file, *rest]
            path = Path(file).absolute()  # As in an interpreter: it stays valid if the script changes its directory.
            if not path.exists():
                print(f"{CANNOT_START}{missing(path)}", file=sys.stderr)  # noqa: T201
                sys.exit(NOT_FOUND)
            sys.path.insert(0, str(path.resolve().parent))
            main.__dict__["__file__"] = str(path)
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(path))
            exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
        case _:
            raise ValueError("order: found no arguments; expected '-m MODULE', '-c CODE' or FILE")


def can_run(argv: tuple[str, ...]) -> bool:
    """Return True if ``run`` supports a Python command line: a file, or the interpreter's options -m, -c and -u.

    ``argv``: the arguments without the interpreter.
    """
    argv = without_u(argv)
    if not argv or Path(argv[0]).is_dir():
        return False
    return not argv[0].startswith("-") or (argv[0] in ("-m", "-c") and len(argv) > 1)


def import_ahead() -> None:
    """Import the modules that ranks need, before the first rank is forked.

    If an import fails, print the error and continue. A rank that needs the module then repeats the import.
    """
    try:
        from dltrain.launch.preload import preload

        preload()
    except Exception as error:  # noqa: BLE001 - an import may raise any exception
        os.write(2, f"zygote: cannot preload all modules ({error!r}); the ranks import the others\n".encode())
    if (mpi4py := sys.modules.get("mpi4py")) is not None and "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = True, None  # A script's "from mpi4py import MPI" starts MPI.


def main() -> None:
    """Fork a process for each requested command, until the parent process ends. Each fork runs its command.

    The first command-line argument is the descriptor of the socket for requests. The optional argument PARENT is the
    process id of the parent. The zygote ends at once if that process has already ended. ``DLTRAIN_IMPORT_AHEAD=off``
    skips the imports, for commands that do not use torch.
    """
    die_with(int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # Imports make few objects that a collection could free, and collections take 7 % of their time.
    if os.environ.get("DLTRAIN_IMPORT_AHEAD", "on") != "off":
        import_ahead()
    gc.enable()
    gc.collect()
    gc.freeze()  # Forks share the pages of these objects until a collection writes to them.
    order = Serving(listener).run()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    del listener
    if os.environ.get(OBSERVE_ENV):
        from dltrain.observation import observer

        observer.start(os.environ, imports.after_import)
    if (library := os.environ.get(MPI_PROGRAM_ENV)) is not None:
        run_mpi_program(order, library)
    else:
        run(order)


if __name__ == "__main__":
    main()
