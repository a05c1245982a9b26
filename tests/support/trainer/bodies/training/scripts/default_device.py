"""A training script that sets torch's default device: ``default_device.py DEVICE``. Its model is on the CPU.

Rank 0 prints a digest of the trained parameters.
"""

import hashlib
import sys

import torch
from torch import nn

import dltrain

torch.set_default_device(sys.argv[1])
t = dltrain.init(batch=12, epochs=1)
with torch.device("cpu"):
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(30, 6), torch.randint(3, (30,))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, opt = t.wrap(model, opt)
for inputs, targets in t.steps(t.loader((x.numpy(), y.numpy()))):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    t.log(loss=loss)
    loss.backward()
    t.clip_gradients(1.0)
    opt.step()
if t.rank == 0:
    flat = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("trained", hashlib.sha256(flat).hexdigest(), flush=True)
