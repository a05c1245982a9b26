"""Train or resume a model on all ranks, and print each rank's peak memory: ``resume_memory.py RANKS FOLDER STRATEGY``.

The first run trains and saves a checkpoint. The second run resumes from it and ends before its first step.
"""

import re
import sys
from pathlib import Path

import torch
from torch import nn

from dlcontract import ModelRef
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import start_process_group
from support.trainer.plans import make_plan, saving

WIDTH, LAYERS, STEPS = 1280, 10, 2  # so large that what libraries need does not matter


def memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


group = start_process_group()
folder = Path(sys.argv[2])
shares = [1] * group.size
plan = make_plan(
    global_batch=group.size, steps=STEPS, shares=shares, checkpoint=saving(folder), parallelism=sys.argv[3],
    model=ModelRef(command=("train",)),
)  # fmt: skip
torch.ones(64, 64) @ torch.ones(64, 64)
optim = torch.optim.Adam([nn.Parameter(torch.ones(2))])  # imports what an optimizer needs
optim.step()
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
began = memory("VmRSS")
trainer = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
model, opt = trainer.wrap(model, torch.optim.Adam(model.parameters(), 1e-4, foreach=False))
resumed = trainer.step == STEPS
if not resumed:
    for (x,) in trainer.steps(trainer.loader((torch.ones(group.size * STEPS, WIDTH),))):
        model(x).square().mean().backward()
        opt.step()
peak = (memory("VmHWM") - began) / sum(p.numel() for p in model.parameters())
sys.stdout.write(f"{'resume' if resumed else 'train'} rank {group.rank} peak {peak:.1f} bytes per parameter\n")
sys.stdout.flush()
trainer.close()
group.close()
session.leave(0)
