"""A script without ``dltrain.init`` that reports its steps, and resumes from a checkpoint of its own.

Usage: ``reporting_script.py STEPS PACE_S [KEY=VALUE…]``. ``fail_step=N`` ends rank 0 with exit code 1 at that step, once per
checkpoint directory. ``silent_rank=N`` lets that rank hang after its second step. ``reporter=N``: only that rank reports.
``heed=1``: the ranks ask whether to stop, and then end after a checkpoint.
``hold=N``: each rank waits at that step until the checkpoint directory has a file ``go``.
"""

import os
import sys
import time
from pathlib import Path

import dltrain


def main():
    steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
    options = dict(argument.split("=", 1) for argument in sys.argv[3:])
    rank = os.environ["RANK"]
    folder = Path(os.environ["DLJOB_CHECKPOINT_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    saved, failed = folder / f"step-of-rank-{rank}", folder / "failed"
    step = int(saved.read_text()) if saved.exists() else 0
    print(f"rank {rank} starts at step {step}", flush=True)
    while step < steps:
        time.sleep(pace_s)
        step += 1
        written = saved.with_suffix(".new")
        written.write_text(str(step))
        written.replace(saved)  # A rank may be killed at any time, and the next one reads the file.
        if options.get("reporter", rank) == rank:
            dltrain.report(step=step, steps=steps, loss=1 / step + int(rank), samples=60)
        if rank == "0" and str(step) == options.get("fail_step") and not failed.exists():
            failed.touch()
            sys.exit(1)
        if "heed" in options and dltrain.stop_requested():
            print(f"rank {rank} stops at step {step}", flush=True)
            return
        while str(step) == options.get("hold") and not (folder / "go").exists():
            time.sleep(0.05)
        if rank == options.get("silent_rank") and step == 2:
            hang()
    if options.get("reporter", rank) == rank:
        dltrain.report(step=step, steps=steps, accuracy=0.25 + int(rank) / 2, bleu=30 + int(rank))


def hang():
    print("silent from now on", flush=True)
    time.sleep(3600)


main()
