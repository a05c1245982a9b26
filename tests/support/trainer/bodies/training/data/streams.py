"""A training script that reads a stream on each rank: ``streams.py KIND WORKERS EPOCHS KILLED FOLDER``.

KIND is ``counted`` (a dataset without a state), ``stateful`` (its state has the place in its files) or ``same`` (all
ranks read the same samples). Rank 1 kills itself in the step KILLED; -1: never. Each rank appends what it trains on to a
file in FOLDER, one line per step.
"""

import hashlib
import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import dltrain

KIND, WORKERS, KILLED, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
FILES, LINES = 12, 5


class Counted(IterableDataset):
    """Files in random order, of which each rank and worker reads its part; augmentation by torch's generator."""

    epoch = 0

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def files(self):
        files = list(range(FILES))
        random.shuffle(files)
        return files

    def samples(self):
        info, part, parts = get_worker_info(), self.rank, self.size
        if info is not None:
            part, parts = part * info.num_workers + info.id, parts * info.num_workers
        return [100 * file + line for file in self.files()[part::parts] for line in range(LINES)]

    def __iter__(self):
        for number in self.samples():
            yield number, torch.ones(8) if KIND == "same" else torch.rand(8)


class Stateful(Counted):
    index = 0

    def files(self):
        return random.Random(self.epoch).sample(range(FILES), FILES)

    def __iter__(self):
        samples = self.samples()
        while self.index < len(samples):
            self.index += 1
            yield samples[self.index - 1], torch.rand(8)

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


t = dltrain.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model, opt = t.wrap(model, torch.optim.Adam(model.parameters(), 1e-2))
dataset = (Stateful if KIND == "stateful" else Counted)(0 if KIND == "same" else t.rank, t.size)
loader = t.loader(DataLoader(dataset, num_workers=WORKERS) if KIND == "counted" else dataset, workers=WORKERS or None)
with (FOLDER / f"rank-{t.rank}").open("a") as file, warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for numbers, x in t.steps(loader, accumulate=True):
        t.checkpoint_manager.wait()  # so that a checkpoint in the same epoch is complete before the kill
        if t.step == KILLED and t.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        digest = hashlib.sha256(x.numpy().tobytes()).hexdigest()[:8]
        row = [t.step, t.epoch, t.end_of_epoch, numbers.tolist(), digest]
        file.write(json.dumps(row) + "\n")
        file.flush()
        loss = (model(x)[:, 0] - numbers / 1000).square().mean()
        t.log(loss=loss)
        loss.backward()
        opt.step()
        opt.zero_grad()
print(
    json.dumps({"rank": t.rank, "step": t.step, "total": t.total_steps, "warned": [str(w.message) for w in warned]}),
    flush=True,
)
flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
(FOLDER / f"parameters-{t.rank}").write_text(json.dumps(flat.tolist()))
