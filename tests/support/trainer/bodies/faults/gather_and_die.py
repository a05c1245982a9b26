"""Kill rank 1 between two ``t.gather`` of a step, and check that the others learn the same as one process."""

import os
import signal

import torch
from torch.nn.functional import cross_entropy, normalize

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import distance, flat, print_on_rank_0, start_process_group
from support.trainer.plans import make_plan


def trained(group: ProcessGroup, shares: list[int]) -> torch.Tensor:
    torch.manual_seed(0)
    data = (torch.randn(120, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64),)
    plan = make_plan(global_batch=12, steps=10, shares=shares)
    trainer = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
    net = torch.nn.Linear(8, 16).double()
    net, opt = trainer.wrap(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    for (x,) in trainer.steps(trainer.loader(data)):
        a, b = normalize(net(x)), normalize(net(x.flip(1)))
        net.register_buffer("positions", torch.arange(trainer.step + 1), persistent=False)  # as models do in forward
        a = trainer.gather(a)
        if (trainer.rank, trainer.step) == (1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        likeness = a @ trainer.gather(b).t() * 5
        cross_entropy(likeness, torch.arange(len(a))).backward()
        opt.step()
    assert trainer.alive == max(1, len(shares) - 1)
    return flat(net)


group = start_process_group()
expected = trained(ProcessGroup(), [12])
off = distance(trained(group, [3, 4, 5]), expected)
assert off < 1e-12, off
print_on_rank_0(group, f"off by {off:.1e}")
session.leave(0)  # group.close() would wait for the killed rank
