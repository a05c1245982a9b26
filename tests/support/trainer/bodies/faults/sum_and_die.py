"""Kill rank 1 in the first of two micro-batches, and check that the others learn the same as one process."""

import os
import signal

import torch
from torch.nn.functional import cross_entropy

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import distance, flat, four_classes, print_on_rank_0, start_process_group
from support.trainer.plans import make_plan


def trained(group: ProcessGroup, shares: list[int]) -> torch.Tensor:
    torch.manual_seed(0)
    plan = make_plan(global_batch=12, steps=10, shares=shares, micro_batches=2)
    trainer = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
    net = torch.nn.Linear(8, 4).double()
    net, opt = trainer.wrap(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    step, counts = 0, [0] * 10
    for x, y in trainer.steps(trainer.loader(four_classes(120, torch.float64)), accumulate=True):
        counts[trainer.step] += 1
        if (trainer.rank, trainer.step, counts[trainer.step]) == (1, 4, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.sum([1.0])  # the survivors learn of the loss here, before their first backward pass of the step
        opt.zero_grad()
        cross_entropy(net(x), y).backward()
        opt.step()
        step = trainer.step
    assert trainer.alive == max(1, len(shares) - 1) and step == 10
    if len(shares) > 1:
        # A survivor's share grows by half, so from then on it needs more micro-batches of the same size.
        assert counts[:4] == [2] * 4 and counts[5:] == [3] * 5, counts
    return flat(net)


group = start_process_group()
expected = trained(ProcessGroup(), [12])
off = distance(trained(group, [4, 4, 4]), expected)
assert off < 1e-12, off
print_on_rank_0(group, f"off by {off:.1e}")
session.leave(0)  # group.close() would wait for the killed rank
