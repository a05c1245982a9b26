"""A stream of text by torchdata's StatefulDataLoader, with the five lines: a resume goes on with the next piece.

python text_stream.py, or mpirun -n 2 python text_stream.py
"""

import os
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import dltrain

LENGTH, WIDTH = 32, 64
t = dltrain.init(batch=int(os.environ.get("BATCH", "64")), epochs=int(os.environ.get("EPOCHS", "2")))  # 1


class Lines(IterableDataset):
    """Pieces of the text. Each rank and each of its workers has its own part; ``at``: the piece that comes next."""

    def __init__(self, text):
        self.text, self.at = text, 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        part, parts = t.rank * workers + worker, t.size * workers
        while (start := (part + self.at * parts) * LENGTH) + LENGTH < len(self.text):
            self.at += 1
            yield self.text[start : start + LENGTH], self.text[start + 1 : start + LENGTH + 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.memory = nn.Embedding(256, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.guess = nn.Linear(WIDTH, 256)

    def forward(self, x):
        return self.guess(self.memory(self.letters(x))[0])


text = torch.tensor(list("\n".join(topics.values()).encode()))
model = Reader()
model, opt = t.wrap(model, torch.optim.AdamW(model.parameters(), lr=3e-3))  # 2
if t.rank == 0:
    print(f"resumed from step {t.step}", flush=True)
for x, y in t.steps(t.loader(StatefulDataLoader(Lines(text), batch_size=t.plan.global_batch, num_workers=1))):  # 3, 4
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    t.log(loss=loss)  # 5
    loss.backward()
    opt.step()
    opt.zero_grad()
