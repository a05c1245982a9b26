"""Train parameters of two dtypes, and kill rank 1 in a step. The others continue, and compare with one process.

Argument: the number of ranks.
"""

import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import distance, flat, print_on_rank_0, start_process_group
from support.trainer.bodies.several.exactness import SAMPLES, STEPS, WIDTH, Alone, Branches
from support.trainer.plans import make_plan

KILLED_AT, SHARES = 4, [3, 4, 5]


def train(t: Any, data: tuple[Tensor, ...]) -> nn.Module:
    model: nn.Module = Branches(torch.float64)
    model, opt = t.wrap(model, SGD(model.parameters(), 0.1, momentum=0.9))
    for (x,) in t.steps(t.loader(data)):
        if t.step == KILLED_AT and t.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return model


def main() -> None:
    group = start_process_group()
    data = (torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7)),)
    whole = train(Alone(sum(SHARES)), data)
    plan = make_plan(shares=SHARES, global_batch=sum(SHARES), steps=STEPS, collective="Ring", min_ranks=1)
    found = train(Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu"), data)
    off = distance(flat(found), flat(whole))
    assert off <= 2e-6, off
    print_on_rank_0(group, f"off by {off:.1e}")
    sys.stdout.flush()
    session.leave(0)


main()
