"""On every rank, rank 1 kills itself between two ``t.gather`` of a step; the others learn what one process learns."""

import os
import signal

import torch
from torch.nn.functional import cross_entropy, normalize

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import distance, flat, ranks, say
from support.trainer.plans import make_plan


def trained(world: ProcessGroup, shares: list[int]) -> torch.Tensor:
    torch.manual_seed(0)
    data = (torch.randn(120, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64),)
    plan = make_plan(global_batch=12, steps=10, shares=shares)
    trainer = Trainer(plan, world, RankReporter(None), torch.device("cpu"), "cpu")
    net = torch.nn.Linear(8, 16).double()
    net, opt = trainer.wrap(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    for (x,) in trainer.steps(trainer.loader(data)):
        a, b = normalize(net(x)), normalize(net(x.flip(1)))
        a = trainer.gather(a)
        if (trainer.rank, trainer.step) == (1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        likeness = a @ trainer.gather(b).t() * 5
        cross_entropy(likeness, torch.arange(len(a))).backward()
        opt.step()
    assert trainer.alive == max(1, len(shares) - 1)
    return flat(net)


world = ranks()
expected = trained(ProcessGroup(), [12])
off = distance(trained(world, [3, 4, 5]), expected)
assert off < 1e-12, off
say(world, f"off by {off:.1e}")
session.leave(0)  # not world.close(), which waits for all
