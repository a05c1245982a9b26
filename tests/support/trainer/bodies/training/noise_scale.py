"""Check on every rank the measured noise scale of a linear regression, whose gradient noise is known.

A sample (x, y) with y = x·w* + e has the gradient (x·(w - w*) - e) x at w. The learning rate is 0, so that the mean and
the variance over the data are the same in every step.
"""

import torch
from torch import nn

from dltrain.elastic import team
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import print_on_rank_0, start_process_group
from support.trainer.plans import make_plan

SHARES, STEPS, SAMPLES, WIDTH = (3, 9, 12), 600, 4800, 20
ERROR = 0.1
"""Three times the deviation of the estimate from 600 steps. From every tenth step, it is three times as large."""


def main() -> None:
    group = start_process_group()
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
        trainer = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
        model, optimizer = trainer.wrap(model, torch.optim.SGD(model.parameters(), 0.0))
        for a, b in trainer.steps(trainer.loader((x, y))):
            ((model(a) - b) ** 2 / 2).mean().backward()
            optimizer.step()
        found = trainer.noise
        trainer.close()
        assert found.steps == STEPS // every, found.steps
        assert found.samples is not None and abs(found.samples / exact - 1) <= error, (found.samples, exact)
        print_on_rank_0(group, f"noise scale {found.samples:.4g} of {found.steps} steps, exactly {exact:.4g}")
    group.close()


main()
