"""Small training programs with collectives, in a group of one rank over gloo."""

import torch
import torch.distributed as dist
from benchmarks.perfmodel.host_calls.loop import CLASSES, Optimizer, Step, loop
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def in_one_group(model: nn.Module) -> nn.Module:
    """Return the model for data-parallel training over gloo, in a group of one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return DistributedDataParallel(model)


def data_parallel(depth: int, optimizer: Optimizer) -> Step:
    layers = [each for _ in range(depth) for each in (nn.Linear(16, 16), nn.Tanh())]
    model = in_one_group(nn.Sequential(*layers, nn.Linear(16, CLASSES)))
    return loop(model, optimizer(model.parameters()), 16)


def sharded(depth: int, optimizer: Optimizer, *, by_layer: bool) -> Step:
    """Return a step of FSDP in a group of one rank. ``by_layer``: each layer is sharded by itself."""
    in_one_group(nn.Linear(1, 1))
    layers = [each for _ in range(depth) for each in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, CLASSES))
    mesh = init_device_mesh("cpu", (1,))
    for layer in [each for each in model if by_layer and isinstance(each, nn.Linear)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, optimizer(model.parameters()), 16)


def reduced_metrics() -> Step:
    model = in_one_group(nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, CLASSES)))

    def then(loss: Tensor) -> list[float]:
        values = [loss.detach().clone() for _ in range(4)]
        for each in values:
            dist.all_reduce(each)
        dist.broadcast(values[0], 0)
        return [each.item() for each in values]

    return loop(model, torch.optim.AdamW(model.parameters()), 16, then=then)
