"""Train with two updates for each batch. Argument: the number of ranks. Each rank prints why it may not, or its steps."""

import torch
from torch import nn
from torch.optim import SGD

from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import start_process_group
from support.trainer.plans import make_plan


def main() -> None:
    group = start_process_group()
    plan = make_plan(group.size, global_batch=4, epochs=1)
    trainer = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
    model, opt = trainer.wrap(model := nn.Linear(3, 2), SGD(model.parameters(), 0.1))
    try:
        for (x,) in trainer.steps(trainer.loader((torch.rand(12, 3),))):
            for _ in range(2):
                opt.zero_grad()
                model(x).square().mean().backward()
                opt.step()
    except MisuseError as error:
        print(f"after {trainer.step} steps: {error}", flush=True)
    else:
        opt.step()  # after the training
        print(f"{trainer.step} steps", flush=True)
    trainer.close()
    group.close()


main()
