"""On every rank: workers at their own pace. One is as slow as can be: it waits within its steps for the others.

Arguments: ranks, the bound or 'none', and a file where ranks show each other how far they are. Without a bound, the
slow worker's first step lasts until the others have done all of theirs. Within one, each of its steps lasts until the
others are as far ahead as they may be, and its first until they have said three times that they still wait.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dltrain.asynchronous import training
from dltrain.builtin.evaluation import mean_loss
from dltrain.comm.core.waiting import wait_until
from dltrain.models import InputShape, build
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import flat, ranks
from support.trainer.plans import make_plan

STEPS, SIGNS = 12, 3


def main() -> None:
    world = ranks()
    bound = None if sys.argv[2] == "none" else int(sys.argv[2])
    workers = world.size - 1
    board = np.memmap(sys.argv[3], dtype=np.int64, mode="r+", shape=(2, workers))
    done, signs = board
    plan = make_plan(
        world.size, shares=[8] * workers + [0], global_batch=8 * workers, steps=STEPS, collective="ParameterServer",
        synchronization="Asynchronous" if bound is None else "StaleSynchronous", staleness_bound=bound,
    )  # fmt: skip
    reporter = RankReporter(None)
    reporter.rank = world.rank
    trainer = Trainer(plan, world, reporter, torch.device("cpu"), "cpu")
    slow, me = world.rank == 0, world.rank
    seen: list[int] = []

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        """Of the batch; begins a step and ends it."""
        step = trainer.step
        ahead = step - int(done.min())
        seen.append(ahead)
        assert bound is None or ahead <= bound, f"rank {me} began step {step}, {ahead} ahead of the slowest"
        if slow and bound is None and step == 0:
            wait_until(lambda: bool((done[1:] == STEPS).all()))
        if slow and bound is not None:
            wait_until(lambda: bool((done[1:] >= min(step + bound + 1, STEPS)).all()))
            wait_until(lambda: step > 0 or bool((signs[1:] >= SIGNS).all()))
        loss = mean_loss(model(batch[0]), batch[1])
        done[me] = step + 1  # before the server hears of it, so that it never knows more than the board
        return loss

    progress, alive = trainer.progress, trainer.progress.alive

    def sign() -> None:
        alive()
        if me < workers and 0 < done[me] < STEPS:
            signs[me] += 1

    progress.alive = sign  # type: ignore[method-assign]
    torch.manual_seed(0)
    net = build("mlp", InputShape((64,), 10))
    data = (torch.rand(40, 64), torch.arange(40) % 10)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    training.train(trainer, net, optimizer, trainer.loader(data), loss_of, lambda: None, alive_s=0.02)
    mine = flat(net).numpy().tobytes()
    assert world.broadcast(mine, world.size - 1) == mine, "all end with the server's parameters"
    furthest = max(row[0] for row in world.gather([max(seen, default=0)]))
    assert furthest == (STEPS - 1 if bound is None else bound), f"the furthest was {furthest} steps ahead"
    if slow:
        sys.stdout.write(f"{workers} workers, at most {furthest:.0f} steps apart\n")
    trainer.close()
    world.close()


main()
