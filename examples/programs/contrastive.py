"""Contrastive learning with the five lines of dltrain: each sample is compared with those of all ranks (t.gather).

python contrastive.py, or mpirun -n 2 python contrastive.py
"""

import os

import torch
from torch import nn

import dltrain
import dltrain.data

t = dltrain.init(batch=int(os.environ.get("BATCH", "64")), epochs=int(os.environ.get("EPOCHS", "20")))  # 1
digits = dltrain.data.load("digits")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, opt = t.wrap(model, opt)  # 2
if t.rank == 0:
    print(f"resumed from step {t.step}", flush=True)
for x, _ in t.steps(t.loader(digits)):  # 3, 4
    # Two views of each image, with pixels hidden at random: the same image must be the nearest among all images.
    views = [x * (torch.rand_like(x) > 0.3) for _ in range(2)]
    one, other = (t.gather(nn.functional.normalize(model(view), dim=1)) for view in views)
    loss = nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))
    t.log(loss=loss)  # 5
    loss.backward()
    opt.step()
    opt.zero_grad()
