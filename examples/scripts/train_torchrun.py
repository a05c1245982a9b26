"""An unmodified torchrun script: it does not import dltrain, and reads its rank from the environment.

torchrun --nproc-per-node 2 examples/scripts/train_torchrun.py
in a DLJob with spec.trainer.framework: Torchrun and spec.trainer.command: [python, train_torchrun.py]
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 20

use_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
dist.init_process_group("nccl" if use_gpu else "gloo")
torch.manual_seed(0)
x = torch.randn(2048, 20)
y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler)
network = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
model = DistributedDataParallel(network.to(device))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        opt.step()
accuracy = (model(x.to(device)).argmax(1).cpu() == y).double().mean().item()
if dist.get_rank() == 0:
    print(f"world size {dist.get_world_size()}, accuracy {accuracy:.4f}", flush=True)
dist.destroy_process_group()
