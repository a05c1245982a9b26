"""Tests of data-loading worker processes of real ranks: equal training, failures, and their end."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dltrain.launch.zygote import Order, Serving, _PartialRequest
from dltrain.protocol import rank_messages
from support.trainer.listener import Listener
from support.trainer.plans import make_plan, write
from support.trainer.ranks import BODIES, ROOT, alone, command, end, environment, run, start

SCRIPT = BODIES / "training/data/feeding.py"
WITHIN_S = 240.0


@pytest.mark.mpi
@pytest.mark.long
def test_ranks_train_the_same_with_workers_though_shares_move_and_a_rank_dies(tmp_path: Path) -> None:
    """Runs with and without workers are bit-identical and match one process, because augmentation does not depend on
    the rank and no sample is lost or repeated. Reading samples does not change what the script draws itself."""

    def results(*arguments: str) -> dict[str, Any]:
        plan = make_plan(2, shares=[6, 6], global_batch=12, epochs=3, min_ranks=1)
        folder = tmp_path / "-".join(arguments)
        folder.mkdir()
        with Listener(folder) as listener:
            process = start(
                command(2, SCRIPT, *arguments, ulfm=True),
                DLTRAIN_PLAN=write(plan, folder),
                DLTRAIN_SOCKET=listener.path,
            )
            output = end(process, 60).output
            assert {message.alive for message in listener.of(rank_messages.Shrunk)} == {(0,)}, output
        return found_in(output)

    with_worker, without_worker = (results(workers, "disturb") for workers in ("1", "0"))
    assert with_worker == without_worker and len(without_worker["digests"]) == 25, "24 steps, one of them twice"
    one = found_in(run(alone(SCRIPT, "0", "none")).output)
    assert np.allclose(without_worker["parameters"], one["parameters"], rtol=0, atol=1e-6)
    assert without_worker["drawn"] == one["drawn"] and len(one["drawn"]) == 24


def found_in(output: str) -> dict[str, Any]:
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(("what", "message"), [
    ("raise", "dltrain.protocol.errors.SampleError: sample 7 of the dataset: OSError: cannot read picture-7.png"),
    ("kill", r"data worker [01] of 2 ended with signal 9 \(SIGKILL\) while it loaded a batch"),
])  # fmt: skip
def test_reason_of_a_worker_failure_is_reported(what: str, message: str, tmp_path: Path) -> None:
    with Listener(tmp_path) as listener:
        assert run(alone(SCRIPT, "2", what), DLTRAIN_SOCKET=listener.path).code == 1
        listener.wait_for(rank_messages.Failed, 1)
    (failed,) = listener.of(rank_messages.Failed)
    assert failed.failure.reason == "TrainingError" and "\n" not in failed.failure.message
    assert re.search(message, failed.failure.message), failed.failure.message
    assert "in __getitem__" in failed.failure.log_tail or what == "kill"


def test_workers_end_when_their_rank_is_killed() -> None:
    process = start([sys.executable, str(SCRIPT), "2", "hold"])
    assert process.stdout is not None
    while "holding" not in (line := process.stdout.readline()):
        assert line, "the process ended"
    family = descendants(process.pid)
    assert len(family) == 3, "a zygote and two workers"
    process.kill()
    process.communicate()
    wait_until_ended(family)


def test_workers_of_a_rank_in_a_pod_are_forks_of_the_zygote(tmp_path: Path) -> None:
    """They need no second import, and end when their rank is killed."""
    path = str(tmp_path / "zygote.sock")
    with socket.socket(socket.AF_UNIX) as listener, Listener(tmp_path) as agent:
        listener.bind(path)
        listener.listen()
        fd = listener.fileno()
        zygote = subprocess.Popen(
            [sys.executable, "-m", "dltrain.launch.zygote", str(fd)], env=environment(), pass_fds=(fd,)
        )
        order = Order((str(SCRIPT), "2", "hold"), environment(DLTRAIN_SOCKET=agent.path), str(ROOT))
        reading, writing = os.pipe()
        with socket.socket(socket.AF_UNIX) as connection, os.fdopen(reading) as output:
            connection.connect(path)
            fields = {"argv": order.argv, "env": order.env, "cwd": order.cwd}
            socket.send_fds(connection, [json.dumps(fields).encode() + b"\n"], [writing])
            os.close(writing)
            rank = json.loads(connection.recv(4096))["pid"]
            while "holding" not in (line := output.readline()):
                assert line, "the process ended"
            family = descendants(zygote.pid)
            assert len(family) == 3 and rank in family and not descendants(rank)
        wait_until_ended(family)
        zygote.kill()
        zygote.wait()


def test_zygote_exits_if_its_parent_has_ended() -> None:
    """This happens if a rank is killed while it starts a zygote."""
    with socket.socket(socket.AF_UNIX) as listener:
        fd = listener.fileno()
        others = str(os.getppid())
        command = [sys.executable, "-m", "dltrain.launch.zygote", str(fd), others]
        assert subprocess.run(command, env=environment(), pass_fds=(fd,), timeout=WITHIN_S, check=False).returncode == 1


def test_zygote_reports_a_failed_fork_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork fails if the pod has too many processes. Running ranks must not end because of it."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()

    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with socket.socket(socket.AF_UNIX) as listener, ours, os.fdopen(reading) as output:
        serving, partial = Serving(listener), _PartialRequest()
        partial.data, partial.fds = json.dumps({"argv": ["-m", "x"], "env": {}, "cwd": "/"}).encode(), [writing]
        assert serving._fork(theirs, partial) is None
        assert output.read() == "dltrain: cannot start -m x: [Errno 11] Resource temporarily unavailable\n"
        assert ours.recv(1) == b"", "the closed connection tells the client"
        serving.selector.close()


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children = {int(child) for child in path.read_text().split()}
        found |= children.union(*(descendants(child) for child in children))
    return found


def wait_until_ended(pids: set[int]) -> None:
    """Wait until no process runs. A zombie counts as ended."""
    deadline = time.monotonic() + WITHIN_S
    while left := {pid for pid in pids if running(pid)}:
        assert time.monotonic() < deadline, f"{left} are still running"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
