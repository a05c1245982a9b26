"""Run real ranks of the built-in trainer on this machine, without agents."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlcontract import CheckpointRef, DatasetRef, Plan, Rank, Role
from dltrain.protocol.rank_messages import PLAN_ENV, SOCKET_ENV

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(str(ROOT / part) for part in ("operator", "operator/contract", "trainer-image", "."))
"""Lets a rank import dljob, dlcontract, dltrain and the benchmarks."""
RANK = ("-m", "dltrain.builtin.rank")


def local_plan(shares: Sequence[int], **fields: Any) -> Plan:
    """Return a plan of CPU ranks on digits with these fixed local batch sizes, no checkpoints.

    A local batch size of 0 is that of a parameter server. ``fields`` override fields of the plan.
    """
    defaults: dict[str, Any] = {
        "job": "benchmark",
        "namespace": "local",
        "uid": "benchmark",
        "number": 1,
        "ranks": tuple(
            Rank(
                rank=r,
                pod=f"local-{r}",
                host="127.0.0.1",
                group="cpu",
                device="cpu",
                share=share,
                role=Role.WORKER if share else Role.SERVER,
            )
            for r, share in enumerate(shares)
        ),
        "global_batch": sum(shares),
        "dataset": DatasetRef(name="digits"),
        "checkpoint": CheckpointRef(enabled=False),
        "rebalance": False,
    }
    return Plan(**defaults | fields)


def mpirun(count: int, *settings: str) -> list[str]:
    """Return the ``mpirun`` command for ``count`` ranks, which may exceed the number of cores."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    place = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return [str(Path(sys.prefix, "bin", "mpirun")), *root, *place, *settings, "-n", str(count)]


def run_captured(
    todo: Plan, folder: Path, launcher: Sequence[str] = (), module: Sequence[str] = RANK, **env: str
) -> str:
    """Run the plan's ranks to their end and return their output. Raise CalledProcessError if they fail.

    ``module``: the arguments of python that start a rank.
    """
    path = folder / "plan.json"
    path.write_text(todo.to_json(), encoding="utf-8")
    here = {PLAN_ENV: str(path), "PYTHONPATH": PYTHONPATH}
    command = [*launcher, sys.executable, *module]
    return subprocess.run(
        command, env={**os.environ, **here, **env}, capture_output=True, text=True, timeout=300, check=True
    ).stderr


def run_with_messages(
    todo: Plan,
    command: Sequence[str],
    on_message: Callable[[str], None],
    timeout_s: float,
    env: Mapping[str, str],
    stdout: int | None = None,
) -> None:
    """Run ``command`` and call ``on_message``, from several threads, with each line that a rank sends to its agent.

    Raise SystemExit if the ranks fail or time out.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = Path(folder, "plan.json")
        path.write_text(todo.to_json(), encoding="utf-8")
        server.bind(f"{folder}/agent")
        server.listen(len(todo.ranks))
        threading.Thread(target=_accept, args=(server, on_message), daemon=True).start()
        here = {PLAN_ENV: str(path), SOCKET_ENV: f"{folder}/agent"}
        process = subprocess.Popen(command, env={**os.environ, **here, **env}, stdout=stdout, start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"{len(todo.ranks)} ranks did not finish within {timeout_s:g} s") from None
    if code:
        raise SystemExit(f"{len(todo.ranks)} ranks exited with code {code}")


def _accept(server: socket.socket, on_message: Callable[[str], None]) -> None:
    """Accept connections until the server is closed."""

    def read(connection: socket.socket) -> None:
        with connection, connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                on_message(line)

    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=read, args=(connection,), daemon=True).start()
