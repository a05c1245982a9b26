"""A training script whose dataset draws random numbers: ``feeding.py WORKERS EVENT``.

The script prints digests of this rank's batches, what it draws itself in each step, and the parameters at the end. EVENT is ``none``, ``disturb`` (shares
change during training, and later rank 1 kills itself), ``raise`` (sample 7 cannot be read), ``kill`` (sample 7 kills its
worker) or ``hold`` (the script pauses). It needs no guard (``if __name__ == "__main__"``), because workers do not run the
script again.
"""

import hashlib
import json
import os
import random
import signal
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

import dltrain

WORKERS, EVENT = int(sys.argv[1]), sys.argv[2]
SAMPLES = 90


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """A dataset of the script with noise from three random generators."""

    def __init__(self) -> None:
        self.x = torch.rand(SAMPLES, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7 and EVENT == "raise":
            raise OSError("cannot read picture-7.png")
        if index == 7 and EVENT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        noise = torch.rand(16) + torch.from_numpy(np.random.rand(16)).float() + random.random()
        return self.x[index] + noise, index % 10


t = dltrain.init(batch=12, epochs=3)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = t.wrap(model, opt)
loader = t.loader(Noisy(), workers=WORKERS, collate_fn=lambda samples: Pair(*default_collate(samples)))
digests, drawn = [], {}
for batch in t.steps(loader):
    assert isinstance(batch, Pair)
    drawn[t.step] = random.random(), np.random.rand()
    digests.append(hashlib.sha256(batch.x.numpy().tobytes() + batch.y.numpy().tobytes()).hexdigest()[:8])
    if EVENT == "hold" and t.step == 3:
        print("holding", flush=True)
        signal.pause()
    if EVENT == "disturb" and t.step == 7 and t.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
    opt.step()
    if EVENT == "disturb" and t.step == 4 and t.size == 2:
        t.reshard((9, 3), "to see")
flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(json.dumps({"rank": t.rank, "digests": digests, "drawn": drawn, "parameters": flat.tolist()}), flush=True)
