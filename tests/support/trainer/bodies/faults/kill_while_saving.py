"""Repeatedly kill a child process while it saves a checkpoint, and check that the newest checkpoint loads."""

import os
import signal
import sys
from pathlib import Path

import torch

from dltrain.checkpoint.store import Checkpoints, Snapshot

ROUNDS = 8


def save_forever(checkpoints: Checkpoints, announce: int) -> None:
    step = max(checkpoints.steps(), default=0)
    while True:
        step += 1
        checkpoints.save(Snapshot(step, {"w": torch.full((200_000,), float(step))}, {}, {}))
        os.write(announce, b"%d\n" % step)


def main() -> None:
    folder = Path(sys.argv[1])
    checkpoints = Checkpoints(folder, "x", keep=2)
    for round_ in range(ROUNDS):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            save_forever(checkpoints, writing)
        os.close(writing)
        with os.fdopen(reading) as lines:
            announced = [int(lines.readline()) for _ in range(1 + round_ % 3)][-1]
            while not list(folder.glob(".step-*")):
                pass
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        loaded = checkpoints.load()
        assert loaded is not None
        snapshot = loaded.snapshot()
        assert snapshot.step >= announced and snapshot.model["w"][0] == snapshot.step
    sys.stdout.write(f"{ROUNDS} kills survived\n")


main()
