"""A script that trains with the sharded digits of its job. Argument: shards, other or held-out (two mistakes)."""

import sys

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import dltrain

t = dltrain.init()
digits = dltrain.data.load(t.dataset_path)
network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, digits.shape.classes))
model, opt = t.wrap(network, torch.optim.SGD(network.parameters(), lr=0.1))
loader = t.loader((torch.zeros(1437, 64), torch.zeros(1437).long()) if sys.argv[1] == "other" else digits)
for x, y in t.steps(loader):
    loss = cross_entropy(model(x), y)
    t.log(loss=loss)
    loss.backward()
    opt.step()
held_out = loader if sys.argv[1] == "held-out" else t.loader(digits.test(np.arange(digits.test_samples)))
with torch.no_grad():
    right = t.sum([sum(int((model(x).argmax(1) == y).sum()) for x, y in t.held_out(held_out))])[0]
t.log(accuracy=right / digits.test_samples)
