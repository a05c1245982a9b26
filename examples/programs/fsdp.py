"""Parameters sharded over ranks by fully_shard (FSDP), with checkpoints of torch.distributed.checkpoint.

torchrun --nproc-per-node 2 fsdp.py
"""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dltrain
import dltrain.data

STEPS, BATCH = int(os.environ.get("STEPS", "200")), 32
gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cuda" if gpu else "cpu", (size,))
digits = dltrain.data.load("digits")
images, labels = digits.train(np.arange(digits.train_samples))
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
folder = Path(os.environ.get("DLJOB_CHECKPOINT_DIR") or tempfile.mkdtemp())
steps_saved = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))  # dcp writes .metadata last.
first = steps_saved[-1] if steps_saved else 0
if first:
    model_state, opt_state = get_state_dict(model, opt)
    dcp.load({"model": model_state, "optimizer": opt_state}, checkpoint_id=folder / str(first))
    set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=opt_state)
if rank == 0:
    print(f"resumed from step {first}", flush=True)
for step in range(first + 1, STEPS + 1):
    draw = torch.Generator().manual_seed(step * size + rank)
    chosen = torch.randint(len(labels), (BATCH,), generator=draw)
    loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
    opt.zero_grad()
    loss.backward()
    opt.step()
    dltrain.report(step=step, steps=STEPS, loss=loss.item(), samples=BATCH * size)
    if step % 20 == 0:
        model_state, opt_state = get_state_dict(model, opt)
        dcp.save({"model": model_state, "optimizer": opt_state}, checkpoint_id=folder / str(step))
        if rank == 0 and step > 40:
            shutil.rmtree(folder / str(step - 40), ignore_errors=True)
with torch.no_grad():
    x, y = digits.test(np.arange(digits.test_samples))
    accuracy = (model(x).argmax(1) == y).float().mean().item()
dltrain.report(step=STEPS, steps=STEPS, accuracy=accuracy)
dist.destroy_process_group()
