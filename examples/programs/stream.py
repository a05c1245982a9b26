"""A GPT as small training repositories write it: IterableDataset, gradient accumulation, torch.compile, DDP.

torchrun --nproc-per-node 2 stream.py
"""

import math
import os
import shutil
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import dltrain

STEPS, LENGTH, BATCH, MICRO_BATCHES, WIDTH = int(os.environ.get("STEPS", "200")), 64, 8, 2, 64
gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
text = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.long)


class Stream(IterableDataset):
    """Random pieces of the text, without end. ``position``: pieces that this rank has had already."""

    def __init__(self, position):
        self.position = position

    def __iter__(self):
        while True:
            draw = torch.Generator().manual_seed(self.position * size + rank)
            start = int(torch.randint(len(text) - LENGTH - 1, (), generator=draw))
            self.position += 1
            yield text[start : start + LENGTH], text[start + 1 : start + LENGTH + 1]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 256)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        hidden = self.token(x) + self.place.weight[: x.shape[1]]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


torch.manual_seed(0)
network = GPT().to(device)
opt = torch.optim.AdamW(network.parameters(), lr=3e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min((k + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * k / STEPS)))
saved = Path(os.environ.get("DLJOB_CHECKPOINT_DIR") or tempfile.mkdtemp()) / "checkpoint.pt"
first = 0
if saved.exists():
    state = torch.load(saved, map_location=device, weights_only=True)
    network.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    warm.load_state_dict(state["schedule"])
    first = state["step"]
# The trainer image has no compiler: without one, aot_eager traces the model as torch.compile does.
backend = "inductor" if gpu or shutil.which("g++") else "aot_eager"
if rank == 0:
    print(f"resumed from step {first}, backend {backend}", flush=True)
dltrain.busy("compilation", 300)
model = torch.compile(DistributedDataParallel(network), backend=backend)
batches = iter(DataLoader(Stream(first * MICRO_BATCHES * BATCH), batch_size=BATCH))
for step in range(first + 1, STEPS + 1):
    total = 0.0
    for micro in range(MICRO_BATCHES):
        x, y = (part.to(device) for part in next(batches))
        model.require_backward_grad_sync = micro == MICRO_BATCHES - 1
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / MICRO_BATCHES
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    warm.step()
    opt.zero_grad()
    dltrain.report(step=step, steps=STEPS, loss=total, samples=BATCH * MICRO_BATCHES * size)
    stop = dltrain.stop_requested()
    if rank == 0 and (stop or step % 20 == 0):
        parts = {"model": network, "optimizer": opt, "schedule": warm}
        new = saved.with_suffix(".new")
        torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, new)
        new.replace(saved)  # The rank may be killed while it writes.
    if stop:
        break
dist.destroy_process_group()
