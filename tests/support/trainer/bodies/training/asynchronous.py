"""Train asynchronously with a worker that is as slow as possible, because it waits for the others in its steps.

Arguments: ranks, the staleness bound or 'none', and a file in which ranks share their progress. Without a bound, the
first step of the straggler lasts until the others have finished. With a bound, each of its steps lasts until the others
are ahead by the bound, and its first step until they have sent three heartbeats while waiting.
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
from support.trainer.bodies.harness import flat, start_process_group
from support.trainer.plans import make_plan

STEPS, HEARTBEATS = 12, 3


def main() -> None:
    group = start_process_group()
    bound = None if sys.argv[2] == "none" else int(sys.argv[2])
    workers = group.size - 1
    board = np.memmap(sys.argv[3], dtype=np.int64, mode="r+", shape=(2, workers))
    done, heartbeats = board
    plan = make_plan(
        group.size, shares=[8] * workers + [0], global_batch=8 * workers, steps=STEPS, collective="ParameterServer",
        synchronization="Asynchronous" if bound is None else "StaleSynchronous", staleness_bound=bound,
    )  # fmt: skip
    reporter = RankReporter(None)
    reporter.rank = group.rank
    trainer = Trainer(plan, group, reporter, torch.device("cpu"), "cpu")
    slow, me = group.rank == 0, group.rank
    leads: list[int] = []

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of the batch. The call marks the begin and the end of a step."""
        step = trainer.step
        ahead = step - int(done.min())
        leads.append(ahead)
        assert bound is None or ahead <= bound, f"rank {me} began step {step}, {ahead} ahead of the slowest"
        if slow and bound is None and step == 0:
            wait_until(lambda: bool((done[1:] == STEPS).all()))
        if slow and bound is not None:
            wait_until(lambda: bool((done[1:] >= min(step + bound + 1, STEPS)).all()))
            wait_until(lambda: step > 0 or bool((heartbeats[1:] >= HEARTBEATS).all()))
        loss = mean_loss(model(batch[0]), batch[1])
        done[me] = step + 1  # before the update is sent, so that the server is never ahead of the board
        return loss

    progress, alive = trainer.progress, trainer.progress.alive

    def count_heartbeat() -> None:
        alive()
        if me < workers and 0 < done[me] < STEPS:
            heartbeats[me] += 1

    progress.alive = count_heartbeat  # type: ignore[method-assign]
    torch.manual_seed(0)
    net = build("mlp", InputShape((64,), 10))
    data = (torch.rand(40, 64), torch.arange(40) % 10)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    training.train(trainer, net, optimizer, trainer.loader(data), loss_of, lambda: None, alive_s=0.02)
    mine = flat(net).numpy().tobytes()
    assert group.broadcast(mine, group.size - 1) == mine, "all ranks end with the server's parameters"
    furthest = max(row[0] for row in group.gather([max(leads, default=0)]))
    assert furthest == (STEPS - 1 if bound is None else bound), f"the furthest was {furthest} steps ahead"
    if slow:
        sys.stdout.write(f"{workers} workers, at most {furthest:.0f} steps apart\n")
    trainer.close()
    group.close()


main()
