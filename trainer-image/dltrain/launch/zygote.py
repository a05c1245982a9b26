"""A process that has imported torch and becomes a rank when asked: ``python -m dltrain.launch.zygote FD [PARENT]``.

Started by the agent before anything else, so that the import (more than a second of CPU; five times that at a
quota of 0.2) runs while the pods find each other, and is paid once per pod instead of once per rank and relaunch.
It imports and does nothing more: no tensor is touched and no thread started, so a fork of it is a fresh
interpreter with its modules loaded.

One connection a rank on the Unix socket inherited as FD. The agent sends a JSON line (``Order``) with the rank's
output pipe attached and gets ``{"pid": n}``, then ``{"status": n}`` (as of waitpid). Closing it kills the rank.
Ranks order processes that load data in the same way (``feeding.hatch``), with a descriptor more.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
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

from dltrain.launch.inherited_socket import hand_over

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Order:
    """What a rank is to run: a Python command line after the interpreter, e.g. ``("-m", "dltrain.builtin.rank")``."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


class Serving:
    """The orders under way. Returns an Order from ``run`` only in the forked child, which then carries it out."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.pids: dict[socket.socket, int] = {}

    def run(self) -> Order:
        while True:
            for key, _ in self.selector.select():
                if self.selector.get_map().get(key.fd) is not key:
                    continue  # closed by what was ready with it: a rank ended just as nobody waited for it any more
                handle: Callable[[Any], Order | None] = key.data
                if (order := handle(key.fileobj)) is not None:
                    return order

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        arriving = _Arriving()

        def read(connection: socket.socket) -> Order | None:
            return self._read(connection, arriving)

        self.selector.register(connection, selectors.EVENT_READ, read)

    def _read(self, connection: socket.socket, arriving: "_Arriving") -> Order | None:
        try:
            data, fds, _, _ = socket.recv_fds(connection, 65536, 4)
        except ConnectionError:
            data, fds = b"", []
        arriving.fds += fds
        if not data:
            if (pid := self.pids.get(connection)) is not None:
                kill_group(pid)
            else:
                self._close(connection)
            return None
        arriving.data += data
        if not arriving.data.endswith(b"\n"):
            return None
        return self._fork(connection, arriving)

    def _fork(self, connection: socket.socket, arriving: "_Arriving") -> Order | None:
        fields: dict[str, Any] = json.loads(arriving.data)
        order = Order(tuple(fields["argv"]), fields["env"], fields["cwd"])
        output, *others = arriving.fds
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # too many processes: no reason to end those that run
            os.write(output, f"dltrain: cannot start {' '.join(order.argv)}: {error}\n".encode())
            for fd in arriving.fds:
                os.close(fd)
            self._close(connection)
            return None
        if pid == 0:
            self._leave_to_the_parent()
            become_rank(order, output, parent)
            if others:
                hand_over(others[0])
            return order
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here too, so that the group exists before anyone is told of it
        for fd in arriving.fds:
            os.close(fd)
        self.pids[connection] = pid
        with contextlib.suppress(ConnectionError):
            connection.sendall(b'{"pid": %d}\n' % pid)
        pidfd = os.pidfd_open(pid)

        def ended(_: int) -> None:
            self.selector.unregister(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(pid, 0)
            kill_group(pid)  # whatever the rank left behind, such as data-loading workers
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

    def _leave_to_the_parent(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self.selector.close()


class _Arriving:
    def __init__(self) -> None:
        self.data = b""
        self.fds: list[int] = []


def kill_group(pid: int) -> None:
    """SIGKILL to the process group of a rank; none is left is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent``, its parent, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_rank(order: Order, output: int, parent: int) -> None:
    """Turn this fresh fork into the rank's process: own group, output, environment; it dies with its parent."""
    os.setpgid(0, 0)
    die_with(parent)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
        score.write("1000")  # out of memory, the rank goes and the agent lives to tell
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.cwd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy.random" in sys.modules:  # its global generator was seeded once, for all forks
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        sys.modules["torch"].set_num_threads(max(1, int(threads)))  # OpenMP has read the zygote's already


def run(order: Order) -> None:
    """Run ``-m MODULE …``, ``-c CODE …`` or ``FILE …`` as the interpreter would, in a fresh ``__main__``."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    # Also under the name that workers of multiprocessing give it, taken when that was imported: it was the zygote's.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if "MASTER_ADDR" in os.environ:
        atexit.register(end_gloo_threads)  # first in, so after every exit handler of the program's own
    match without_u(order.argv):
        case ("-m", module, *rest):
            sys.argv = ["-m", *rest]
            sys.path.insert(0, order.cwd)
            sys.modules.pop(module, None)  # imported ahead, now to be run, which runpy would warn about
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # what python -m calls
        case ("-c", code, *rest):
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case (file, *rest):
            sys.argv = [file, *rest]
            path = Path(file).resolve()
            sys.path.insert(0, str(path.parent))
            main.__dict__["__file__"] = file
            exec(compile(path.read_bytes(), file, "exec"), main.__dict__)
        case _:
            raise ValueError("order: found no arguments, expected '-m MODULE', '-c CODE' or FILE")


def end_gloo_threads() -> None:
    """Let go of process groups while their threads can still end.

    gloo's threads drop the Python objects of finished collectives a moment late. When the interpreter is already
    finalizing (CPython up to 3.13), that thread is unwound out of a destructor and the process aborts, in about one of
    five ends of an unmodified DistributedDataParallel script on CPUs. The module that holds the model is cleared here
    instead of by the interpreter a moment later, so that the last reference goes while the threads are joined.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    if distributed.is_initialized():
        distributed.destroy_process_group()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()


def can_run(argv: tuple[str, ...]) -> bool:
    """Whether ``run`` understands a Python command line (of the interpreter's options only -m, -c and -u)."""
    argv = without_u(argv)
    if not argv or Path(argv[0]).is_dir():
        return False
    return not argv[0].startswith("-") or (argv[0] in ("-m", "-c") and len(argv) > 1)


def without_u(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Without a leading -u: a rank's output goes to a pipe line by line anyhow."""
    return argv[1:] if argv[:1] == ("-u",) else argv


def import_ahead() -> None:
    """Import what a rank needs. What cannot be imported is left to the rank, whose error then reaches the user."""
    try:
        from dltrain.launch.preload import preload

        preload()
    except Exception as error:  # noqa: BLE001 - anything that a module's import may raise
        os.write(2, f"zygote: not everything imported ahead: {error!r}\n".encode())
    if (mpi4py := sys.modules.get("mpi4py")) is not None and "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = True, None  # a user's "from mpi4py import MPI" starts MPI as ever


def main() -> None:
    """With DLTRAIN_IMPORT_AHEAD=off nothing is imported ahead: for commands that use no torch.

    PARENT: the process to end with, which may have ended already.
    """
    die_with(int(sys.argv[2]) if len(sys.argv) > 2 else os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    if os.environ.get("DLTRAIN_IMPORT_AHEAD", "on") != "off":
        import_ahead()
    gc.collect()
    gc.freeze()  # forks share these objects' pages as long as no collection writes to them
    order = Serving(listener).run()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    del listener
    run(order)


if __name__ == "__main__":
    main()
