"""A script for torchrun or MPI that trains nothing: rank 0 saves the step in $DLJOB_CHECKPOINT_DIR, all ranks resume.

Arguments: the steps, the step at which rank 0 saves and then waits until a file (third argument) exists, and a file that
must exist before it saves, and before other ranks begin (default: none).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import dltrain

steps, hold, go, save = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(*sys.argv[4:])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ["RANK"]))
folder = Path(os.environ["DLJOB_CHECKPOINT_DIR"])
saved = folder / "checkpoint" / "step.json"
begin = json.loads(saved.read_text())["step"] if saved.exists() else 0
print(f"rank {rank} starts at step {begin}", flush=True)
while rank != 0 and not save.exists():
    time.sleep(0.02)
for step in range(begin + 1, steps + 1):
    if rank == 0 and step in (hold, steps):
        while not save.exists():
            time.sleep(0.02)
        saved.parent.mkdir(exist_ok=True)
        (saved.parent / "weights.bin").write_bytes(bytes(range(256)) * step)
        saved.write_text(json.dumps({"step": step}))
    dltrain.report(step=step, steps=steps, loss=1 / step)
    while step == hold and not go.exists():
        time.sleep(0.02)
