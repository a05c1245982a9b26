"""A script for several ranks that ends torch's process group itself, as scripts for torchrun do.

Arguments: checkpoint folder, collective, strategy.
"""

import sys

import torch
from torch import nn

import dltrain

folder, collective, strategy = sys.argv[1:]
torch.manual_seed(0)
t = dltrain.init(batch=8, epochs=2, collective=collective, strategy=strategy, checkpoints=folder)
network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model, opt = t.wrap(network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
for x, y in t.steps(t.loader((torch.randn(32, 4), torch.randint(2, (32,))))):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
torch.distributed.destroy_process_group()
