"""A script for torchrun that shards a model over the ranks (FSDP), and saves it with torch.distributed.checkpoint.

Each rank writes its shard in $DLJOB_CHECKPOINT_DIR. Arguments: the steps, and the step after which all ranks save and
then wait until a file ``go`` exists.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dltrain

steps, hold, go = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
folder = Path(os.environ["DLJOB_CHECKPOINT_DIR"])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state() -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def checksum() -> float:
    whole = [parameter.full_tensor() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert len(whole) == 2, "FSDP has sharded weight and bias"
    return sum(float(tensor.double().sum()) for tensor in whole)


saved = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
begin = saved[-1] if saved else 0
if begin:
    states = state()
    dcp.load(states, checkpoint_id=folder / str(begin))
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
print(f"rank {rank} of {size} starts at step {begin} with {checksum():.9f}", flush=True)
for step in range(begin + 1, steps + 1):
    loss = model(torch.full((2, 64), 0.1 * step)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == hold:
        dcp.save(state(), checkpoint_id=folder / str(step))
        print(f"rank {rank} saved step {step} with {checksum():.9f}", flush=True)
    dltrain.report(step=step, steps=steps, loss=loss.item())
    while step == hold and not go.exists():
        time.sleep(0.02)
dist.destroy_process_group()
