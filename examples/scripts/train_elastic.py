"""An elastic torchrun script: it goes on from its checkpoint on any number of ranks, and does not import dltrain.

torchrun --nproc-per-node 2 examples/scripts/train_elastic.py
in a DLJob with spec.trainer.framework: Torchrun and spec.trainer.elastic: true
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 128
EPOCHS = int(os.environ.get("EPOCHS", "40"))
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "10"))  # epochs

use_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
dist.init_process_group("nccl" if use_gpu else "gloo")
torch.manual_seed(0)
x = torch.randn(2048, 20)
y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
# With fewer ranks, each rank's part of the batch is larger. Equal parts give all ranks equally many steps.
batch = GLOBAL_BATCH // dist.get_world_size()
loader = DataLoader(data, batch_size=batch, sampler=sampler)
network = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to(device)
opt = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

checkpoint = Path(os.environ.get("DLJOB_CHECKPOINT_DIR", "checkpoints")) / "model.pt"
first = 0
if checkpoint.exists():  # all ranks load what rank 0 saved; nothing in the file depends on their number
    saved = torch.load(checkpoint, map_location=device)
    network.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    first = saved["epoch"]
model = DistributedDataParallel(network)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks start at epoch {first} with {batch} samples each", flush=True)
for epoch in range(first, EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        opt.step()
    if dist.get_rank() == 0 and (epoch + 1) % SAVE_EVERY == 0:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = checkpoint.with_suffix(".part")
        torch.save({"model": network.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch + 1}, part)
        part.rename(checkpoint)  # a reader finds the old file or the new one, never half of one
if dist.get_rank() == 0:
    accuracy = (network(x.to(device)).argmax(1).cpu() == y).double().mean().item()
    print(f"world size {dist.get_world_size()}, accuracy {accuracy:.4f}", flush=True)
dist.destroy_process_group()
