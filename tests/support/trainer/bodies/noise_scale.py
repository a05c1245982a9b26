"""On every rank: linear regression, whose gradients' noise is known, and what the trainer measures of it.

Of a sample (x, y) with y = x·w* + e the gradient at w is (x·(w - w*) - e) x. The parameters stay where they are, so the
mean and the variance over the data are those of every step.
"""

import torch
from torch import nn

from dltrain.elastic import team
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import ranks, say
from support.trainer.plans import make_plan

SHARES, STEPS, SAMPLES, WIDTH = (3, 9, 12), 600, 4800, 20
ERROR = 0.1
"""Three times what the estimate of 600 steps varies by; every tenth alone: three times more."""


def main() -> None:
    world = ranks()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = x @ torch.full((WIDTH, 1), WIDTH**-0.5) + torch.randn(SAMPLES, 1, generator=generator)
    gradients = -y * x  # at w = 0
    mean = gradients.mean(0)
    exact = float(((gradients - mean) ** 2).sum(1).mean() / (mean @ mean))
    for every, error in ((1, ERROR), (10, 3 * ERROR)):
        team.stride = lambda _, every=every: every
        model = nn.Linear(WIDTH, 1, bias=False)
        nn.init.zeros_(model.weight)
        plan = make_plan(shares=list(SHARES), global_batch=sum(SHARES), steps=STEPS)
        trainer = Trainer(plan, world, RankReporter(None), torch.device("cpu"), "cpu")
        model, optimizer = trainer.wrap(model, torch.optim.SGD(model.parameters(), 0.0))
        for a, b in trainer.steps(trainer.loader((x, y))):
            ((model(a) - b) ** 2 / 2).mean().backward()
            optimizer.step()
        found = trainer.noise
        trainer.close()
        assert found.steps == STEPS // every, found.steps
        assert found.samples is not None and abs(found.samples / exact - 1) <= error, (found.samples, exact)
        say(world, f"noise scale {found.samples:.4g} of {found.steps} steps, exactly {exact:.4g}")
    world.close()


main()
