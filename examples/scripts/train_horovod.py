"""An unmodified Horovod script for PyTorch: a small convolutional network on generated images of ten classes.

mpirun -n 2 python examples/scripts/train_horovod.py   where Horovod, or dltrain's layer with its API, is installed
in a DLJob with spec.trainer.framework: MPI and spec.trainer.command: [python, train_horovod.py]
"""

import os
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = int(os.environ.get("EPOCHS", "6")), 32

hvd.init()
torch.manual_seed(hvd.rank())  # Ranks start from different parameters, which are then broadcast.
use_gpu = torch.cuda.is_available()
if use_gpu:
    torch.cuda.set_device(hvd.local_rank())
device = torch.device("cuda" if use_gpu else "cpu")


def images(count: int, seed: int) -> TensorDataset:
    """Return noisy images of 8 x 8 pixels. Each class has one picture below the noise."""
    pictures = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(pictures[labels] + 0.7 * torch.randn(count, 1, 8, 8, generator=generator), labels)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.linear = torch.nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(functional.max_pool2d(functional.relu(self.convolution(x)), 2).flatten(1))


train_set, test_set = images(2048, 2), images(512, 3)
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)

model = Network().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)

folder = os.environ.get("DLJOB_CHECKPOINT_DIR")
path = Path(folder) / "horovod.pt" if folder else None
first = 0
if hvd.rank() == 0 and path is not None and path.exists():
    saved = torch.load(path, weights_only=True)
    first = saved["epoch"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
first = hvd.broadcast_object(first, root_rank=0)
if hvd.rank() == 0:
    print(f"resumed from epoch {first}", flush=True)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)

for epoch in range(first, EPOCHS):
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * hvd.size() * (0.1 if epoch >= 4 else 1.0)
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss, name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1} of {EPOCHS}, loss {mean.item():.4f}", flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

model.eval()
with torch.no_grad():
    x, y = test_set[hvd.rank() :: hvd.size()]
    right = (model(x.to(device)).argmax(1).cpu() == y).float().mean()
accuracy = hvd.allreduce(right, name="accuracy")
if hvd.rank() == 0:
    print(f"world size {hvd.size()}, accuracy {accuracy.item():.4f}", flush=True)
