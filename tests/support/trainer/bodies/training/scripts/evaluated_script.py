"""A script with dltrain.init that evaluates its held-out data on all ranks. Argument: a folder for the run report."""

import os
import sys

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import dltrain

os.environ["DLTRAIN_REPORT"] = sys.argv[1]
t = dltrain.init(batch=12, epochs=4)
iris = dltrain.data.load("iris")
model, opt = t.wrap(model := torch.nn.Linear(4, 3), torch.optim.SGD(model.parameters(), lr=0.1))
held_out = t.loader(iris.test(np.arange(iris.test_samples)))
for x, y in t.steps(t.loader(iris)):
    loss = cross_entropy(model(x), y)
    t.log(loss=loss)
    loss.backward()
    opt.step()
with torch.no_grad():
    found = dltrain.evaluate(((model(x), y) for x, y in t.held_out(held_out)), labels=iris.labels)
    right = t.sum([sum(int((model(x).argmax(1) == y).sum()) for x, y in t.held_out(held_out))])[0]
assert found is not None and found.classification is not None and found.samples == iris.test_samples, found
assert found.classification.accuracy == right / iris.test_samples, (found, right)
t.log(accuracy=found.classification.accuracy)
