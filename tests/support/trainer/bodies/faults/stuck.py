"""A script whose rank 1 hangs in its third batch, while the others wait for it."""

import time

import torch

import dltrain

t = dltrain.init()
model = torch.nn.Linear(2, 1)
model, opt = t.wrap(model, torch.optim.SGD(model.parameters(), 0.1))


def stuck() -> None:
    time.sleep(3600)


for (x,) in t.steps(t.loader((torch.ones(1200, 2),))):
    if t.rank == 1 and t.step == 2:
        stuck()
    model(x).mean().backward()
    opt.step()
