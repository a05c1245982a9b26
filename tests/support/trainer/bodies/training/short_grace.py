"""Train until rank 1 alone is asked to stop: ``short_grace.py RANKS FOLDER GRACE_S``. A checkpoint takes 60 s.

With $DLTRAIN_MEMORY, the first rank copies the state there. Each rank prints the step after which it stops.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from dlcontract import ModelRef
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import four_classes, start_process_group
from support.trainer.plans import make_plan, saving

group = start_process_group()
volume, grace_s = Path(sys.argv[2]), float(sys.argv[3])
plan = make_plan(
    group.size,
    global_batch=12,
    steps=1000,
    checkpoint=saving(volume, interval_s=3600.0),
    model=ModelRef(command=("train",)),
)
reporter = RankReporter(None)
trainer = Trainer(plan, group, reporter, torch.device("cpu"), "cpu")
torch.manual_seed(0)
model = nn.Linear(8, 4)
model, opt = trainer.wrap(model, torch.optim.SGD(model.parameters(), 0.1))
first = trainer.step
writer = trainer.checkpoint_manager._writer
if writer is not None:
    writer._durations_s.append(60.0)
try:
    for x, y in trainer.steps(trainer.loader(four_classes(120))):
        if trainer.step == first + 3 and group.rank == 1:
            reporter.ask_to_stop(grace_s)
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
except SystemExit:
    sys.stdout.write(f"rank {group.rank} started at {first} and stopped at {trainer.step}\n")
    sys.stdout.flush()
trainer.close()
group.close()
session.leave(0)
