"""A script for torchrun that resumes with any number of ranks: rank 0 saves the step in $DLJOB_CHECKPOINT_DIR.

Usage: ``elastic_script.py FOLDER [refused=N]``. Rank 0 saves when the folder has a file ``save``, and then deletes that
file. All ranks end when the folder has a file ``end``. ``refused=N``: the script fails at its start with N ranks.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SAVE, END = 1, 2


def main():
    folder, options = Path(sys.argv[1]), dict(argument.split("=") for argument in sys.argv[2:])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.get("refused") == str(size):
        raise ValueError(f"this script needs an odd number of ranks, not {size}")
    saved = Path(os.environ["DLJOB_CHECKPOINT_DIR"], "step")
    step = int(saved.read_text()) if saved.exists() else 0
    dist.init_process_group("gloo")
    batches = torch.tensor(int(os.environ["DLJOB_LOCAL_BATCH_SIZE"]))
    dist.all_reduce(batches)
    restarts, whole = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["DLJOB_GLOBAL_BATCH_SIZE"]
    print(f"rank {rank} of {size} starts at step {step}, batch {batches} of {whole}, restarts {restarts}", flush=True)
    told = torch.zeros(1)
    while told != END:
        time.sleep(0.05)
        step += 1
        told[0] = SAVE * (folder / "save").exists() or END * (folder / "end").exists()
        dist.broadcast(told, 0)
        if told == SAVE and rank == 0:
            saved.parent.mkdir(exist_ok=True)
            saved.write_text(str(step))
            (folder / "save").unlink()
    dist.destroy_process_group()


main()
