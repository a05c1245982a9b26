"""Your own training script with dltrain: five lines, marked below. It runs in three ways:

python examples/scripts/train_five_lines.py
mpirun -n 2 python examples/scripts/train_five_lines.py
in a DLJob with spec.trainer.command: [python, train_five_lines.py]; the manifest then sets batch and epochs
"""

import torch
from torch.nn.functional import cross_entropy

import dltrain

t = dltrain.init(batch=120, epochs=10)  # 1

digits = dltrain.data.load("digits")
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

model, opt = t.wrap(model, opt)  # 2
loader = t.loader(digits)  # 3
for x, y in t.steps(loader):  # 4
    loss = cross_entropy(model(x), y)
    t.log(loss=loss)  # 5: optional, for status and plots
    loss.backward()
    opt.step()

x, y = digits.test(torch.arange(digits.test_samples).numpy())
with torch.no_grad():
    t.log(accuracy=(model(x).argmax(1) == y).double().mean().item())
