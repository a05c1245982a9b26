"""Train with Horovod's API, each rank on its part of the batch. Rank 0 writes the parameters to the file ARGV[1].

Momentum, a broadcast start, accumulation over two backward passes, a buffer and a frozen layer take part.
"""

import sys

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

hvd.init()
torch.manual_seed(1 if hvd.rank() == 0 else 99)
model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8), torch.nn.Linear(8, 3))
model[2].weight.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if hvd.rank() == 0 else 7.0, momentum=0.9, weight_decay=1e-3)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2)
assert isinstance(optimizer, torch.optim.SGD)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)

generator = torch.Generator().manual_seed(5)
x, y = torch.randn(48, 12, generator=generator), torch.randint(3, (48,), generator=generator)
own_x, own_y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
for step in range(30):
    optimizer.zero_grad()
    half = len(own_x) // 2
    for a, b in ((own_x[:half], own_y[:half]), (own_x[half:], own_y[half:])):
        (cross_entropy(model(a), b) / 2).backward()
    if step % 2:
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()
    scheduler.step()

flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
assert len({bytes(row.numpy().tobytes()) for row in hvd.allgather(flat.unsqueeze(0))}) == 1, "ranks differ"
if hvd.rank() == 0:
    torch.save(flat, sys.argv[1])
    print(f"size {hvd.size()}, lr {optimizer.param_groups[0]['lr']}", flush=True)
hvd.shutdown()
