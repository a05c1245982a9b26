"""Tests of scripts with ``dltrain.init`` that fork, directly or by multiprocessing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dltrain.protocol.rank_messages import SOCKET_ENV, Failed, Finished
from support.trainer.listener import Listener

TRAINING = """
import multiprocessing, os, signal, sys
import torch
import dltrain

t = dltrain.init(batch=4, steps=2)
model, opt = t.wrap(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), 0.1))
for x, y in t.steps(t.loader((torch.zeros(8, 2), torch.zeros(8, 1)))):
    if t.step == 1:
        fork()
    (model(x) - y).square().mean().backward()
    opt.step()
"""
FORKS = """
def fork():
    child = os.fork()
    if not child:
        {}
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
TERMINATES = """
def fork():
    context = multiprocessing.get_context("fork")
    mine, others = context.Pipe()
    child = context.Process(target=lambda: (others.send(1), signal.pause()), daemon=True)
    child.start()
    mine.recv()
    child.terminate()
    child.join(5)
    print(child.exitcode, flush=True)
    child.kill()
"""


@pytest.mark.parametrize(
    ("fork", "status"),
    [
        (FORKS.format("sys.exit(3)"), "3"),
        (FORKS.format('raise ValueError("in the child")'), "1"),
        (TERMINATES, "-15"),
    ],
    ids=["exits", "fails", "is terminated"],
)
def test_fork_is_not_the_rank(fork: str, status: str, tmp_path: Path) -> None:
    """Fixed bugs: its error was reported as that of the rank, and SIGTERM did not end it, so that Pools hung."""
    (tmp_path / "train.py").write_text(TRAINING.replace("\nt = ", f"{fork}\nt = ", 1))
    with Listener(tmp_path) as listener:
        env = {**os.environ, SOCKET_ENV: listener.path}
        ended = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert (ended.returncode, ended.stdout) == (0, f"{status}\n"), ended.stderr
        listener.wait_for(Finished, 1)
    assert not listener.of(Failed)
    assert "dltrain: " not in ended.stderr, "the child says nothing in the name of the rank"
    assert ("ValueError: in the child" in ended.stderr) == (status == "1")
