"""Check each function of the layer with Horovod's API on all ranks, or in one process."""

import warnings

import horovod.torch as hvd
import torch

assert not hvd.is_initialized()
try:
    hvd.rank()
except ValueError as error:
    assert "hvd.init()" in str(error)
hvd.init()
hvd.init()
rank, size = hvd.rank(), hvd.size()
assert hvd.is_initialized() and hvd.local_size() == size and hvd.local_rank() == rank and hvd.is_homogeneous()
total, mean = size * (size + 1) // 2, (size + 1) / 2

for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    mine = torch.full((2, 3), float(rank + 1), dtype=kind)
    found = hvd.allreduce(mine, name="a")
    assert found.dtype == kind and found.shape == (2, 3) and (found == mean).all(), found
    assert (mine == rank + 1).all()
    assert (hvd.allreduce(mine, op=hvd.Sum) == total).all() and (hvd.allreduce(mine, average=False) == total).all()
    assert (hvd.allreduce(mine, op=hvd.Max) == size).all() and (hvd.allreduce(mine, op=hvd.Min) == 1).all()
    assert (hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5) == total).all()
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine and (mine == total).all()
assert hvd.allreduce(torch.tensor(rank + 1), op=hvd.Sum).item() == total
assert hvd.allreduce(torch.tensor(rank + 1)).item() == total // size
assert hvd.allreduce(torch.ones(0)).shape == (0,)
transposed = torch.arange(6.0).reshape(2, 3).t()
assert (hvd.allreduce_(transposed) == torch.arange(6.0).reshape(2, 3).t()).all()
leaf = torch.ones(2, requires_grad=True)
assert not hvd.allreduce(leaf * 2, op=hvd.Max).requires_grad
(hvd.allreduce(leaf * 2) * (rank + 1)).sum().backward()
assert leaf.grad.tolist() == [2 * mean] * 2
leaf.grad = None
(hvd.allreduce(leaf, op=hvd.Sum, prescale_factor=3.0) * (rank + 1)).sum().backward()
assert leaf.grad.tolist() == [3.0 * total] * 2
leaf.grad = None
(hvd.broadcast(leaf, size - 1) * (rank + 1)).sum().backward()
assert leaf.grad.tolist() == ([mean] * 2 if rank == size - 1 else [0.0] * 2)
with torch.no_grad():
    assert not hvd.allgather(leaf).requires_grad

# A contrastive loss compares own rows with those of all ranks. Ranks have unequal numbers of rows.
torch.manual_seed(0)
every = [torch.randn(each + 1, 3, dtype=torch.float64) for each in range(size)]
own = every[rank].clone().requires_grad_()
(own @ hvd.allgather(own).t()).exp().sum().backward()
whole = [rows.clone().requires_grad_() for rows in every]
mine = (whole[rank].detach() @ torch.cat(whole).t()).exp().sum()
others = sum((rows.detach() @ torch.cat(whole).t()).exp().sum() for each, rows in enumerate(whole) if each != rank)
through_gathered = torch.autograd.grad((mine + others) / size, whole[rank])[0]
direct = torch.autograd.grad((whole[rank] @ torch.cat(every).t()).exp().sum(), whole[rank])[0]
assert torch.allclose(own.grad, through_gathered + direct), "the average over ranks for the gathered rows"
scalar = torch.tensor(1.0, requires_grad=True)
hvd.allgather(scalar).sum().backward()
assert scalar.grad.item() == 1.0

rows = hvd.allgather(torch.full((rank + 1, 2), rank))
assert rows.tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]
assert hvd.allgather(torch.tensor(float(rank))).tolist() == [float(r) for r in range(size)]
assert hvd.allgather_object({"rank": rank})[-1] == {"rank": size - 1}
last = size - 1
for kind in (torch.int64, torch.bool, torch.bfloat16):
    value = torch.full((3,), rank == last, dtype=kind)
    assert hvd.broadcast(value, last, name="b").all() and hvd.broadcast_(value, root_rank=last) is value and value.all()
assert hvd.broadcast_object({"from": rank}, root_rank=last) == {"from": last}
hvd.barrier()

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
with torch.no_grad():
    model[0].weight.fill_(rank)
for given in (model.state_dict(), model.named_parameters(), model.parameters()):
    hvd.broadcast_parameters(given, root_rank=last)
    assert (model[0].weight == last).all()

optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
if rank == last:
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
hvd.broadcast_optimizer_state(optimizer, root_rank=last)
assert optimizer.param_groups[0]["lr"] == 0.1 * size and len(optimizer.state) == len(list(model.parameters()))

# Fixed bug: after this broadcast, a scheduler of the given optimizer changed the rate on the root rank only.
given = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
optimizer = hvd.DistributedOptimizer(given)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer.step()
scheduler.step()
assert optimizer.param_groups[0]["lr"] == given.param_groups[0]["lr"] == 0.05
optimizer.load_state_dict(optimizer.state_dict())
assert optimizer.param_groups[0] is given.param_groups[0] and optimizer.state is given.state
assert len(optimizer.state) == len(list(model.parameters()))
updates = []
optimizer.register_step_post_hook(lambda *_: updates.append(1))
optimizer.step()
assert updates == [1], "fixed bug: hooks ran twice, so that steps of the script were counted twice"

one, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one, other], lr=1.0), op=hvd.Sum)
one.grad = torch.full((2,), float(rank + 1))
optimizer.step()
assert one.tolist() == [-total] * 2 and other.tolist() == [0.0, 0.0] and (size == 1 or other.grad is not None)
target = torch.full((2,), float(rank))
optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([one], max_iter=20))


def closure():
    optimizer.zero_grad()
    loss = ((one - target) ** 2).sum()
    loss.backward()
    return hvd.allreduce(loss)


optimizer.step(closure)
assert torch.allclose(one, torch.full((2,), (size - 1) / 2), atol=1e-4), "the gradients of all ranks meet in the middle"

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one], lr=1.0), compression=hvd.Compression.fp16)
    one.grad = torch.ones(2)
    optimizer.synchronize()
    optimizer.step()
assert (
    len(seen) == 2
    and "compression has no effect" in str(seen[0].message)
    and "skip_synchronize" in str(seen[1].message)
)
sparse = torch.nn.Embedding(4, 2, sparse=True)
for dense in (True, False):
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(sparse.parameters(), lr=1.0), sparse_as_dense=dense)
    optimizer.zero_grad()
    sparse(torch.tensor([rank])).sum().backward()
    try:
        optimizer.step()
        assert dense or size == 1
    except ValueError as error:
        assert not dense and "sparse_as_dense=True" in str(error)

for wrong in (
    lambda: hvd.DistributedOptimizer(torch.optim.SGD([one], lr=1.0), op=hvd.Adasum),
    lambda: hvd.DistributedOptimizer(torch.optim.SGD([one], lr=1.0), [("a", one), ("a", one)]),
    lambda: hvd.allreduce(one, op=hvd.Sum, average=True),
    lambda: hvd.allreduce(one, process_set=object()),
):
    try:
        wrong()
        raise SystemExit("found no error")
    except ValueError as error:
        assert "found" in str(error)
hvd.shutdown()
assert not hvd.is_initialized()
print(f"rank {rank} of {size}: all functions work", flush=True)
