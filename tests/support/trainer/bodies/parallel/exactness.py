"""Check on every rank that gradients and parameters equal those of one process, for several shares and algorithms."""

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dltrain.batch.sampling import Sampler
from dltrain.comm.core.collective import Collective
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.selection import choose
from dltrain.models import InputShape, build
from dltrain.parallel.data_parallel import DataParallel
from dltrain.parallel.layered_server import LayeredServer

IMAGES = InputShape((1, 8, 8), 10)
SAMPLES, BATCH = 48, 24


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(SAMPLES, *IMAGES.shape, generator=generator, dtype=dtype), torch.arange(SAMPLES) % 10


def model(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return build(name, IMAGES).to(dtype)


def one_process(name: str, dtype: torch.dtype, steps: int) -> tuple[nn.Module, torch.Tensor]:
    """Train with plain PyTorch. Return the model after ``steps`` and its first gradient in the order of parameters."""
    net, (x, y) = model(name, dtype), data(dtype)
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    sampler = Sampler(SAMPLES, BATCH, 0)
    first = torch.empty(0)
    for step in range(steps):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        opt.zero_grad()
        cross_entropy(net(x[chosen]), y[chosen]).backward()
        if step == 0:
            first = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).clone()
        opt.step()
    return net, first


def train_on_all_ranks(
    group: ProcessGroup, name: str, dtype: torch.dtype, steps: int, shares: list[int], strategy: str
) -> tuple[nn.Module, torch.Tensor]:
    """Train the same model on all ranks. A rank with share 0 is a parameter server."""
    net, (x, y) = model(name, dtype), data(dtype)
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    servers = [rank for rank, share in enumerate(shares) if not share]

    def collective(buffers: list[torch.Tensor]) -> Collective:
        return choose(strategy, group.comm, buffers, segment_nbytes=1024, servers=servers)

    parallel: DataParallel
    if strategy == "LayeredServer":
        parallel = LayeredServer(net.parameters(), opt, group, 1024, 1)
    else:
        parallel = DataParallel(net.parameters(), collective, 16 * 1024, 1)
    assert len(parallel.buffer.buckets) > 3, "several buckets are reduced at the same time"
    sampler = Sampler(SAMPLES, BATCH, 0)
    first = torch.empty(0)
    for step in range(steps):
        part = sampler.part(step, shares, group.rank)
        parallel.begin(part.weight, [part.weight])
        if len(part.indices):
            chosen = torch.from_numpy(part.indices)
            cross_entropy(net(x[chosen]), y[chosen]).backward()
        (whole,) = parallel.finish()
        assert abs(whole - 1) < 1e-6, "the tail is reduced with the gradients"
        if step == 0:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
            first = torch.cat([part.flatten() for part in parts]).clone()
            if strategy == "LayeredServer":
                group.broadcast_into(first.numpy().view(np.uint8))  # only the server, rank 0, has the sum
        if parallel.sharded:
            assert group.rank == 0 or all(p.grad is None for p in net.parameters()), "workers update nothing"
        opt.step()
        parallel.spread()
    parallel.close()
    return net, first


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def check(group: ProcessGroup, report: Callable[[str], object]) -> None:
    for dtype, bound, names in ((torch.float32, 1e-6, ("digits-cnn", "mlp")), (torch.float64, 1e-12, ("mlp",))):
        for name in names:
            reference, gradient = one_process(name, dtype, 20)
            for strategy, shares in (
                ("Ring", [8, 8, 8]),
                ("Ring", [3, 7, 14]),
                ("MPI", [22, 1, 1]),
                ("ParameterServer", [9, 15, 0]),
                ("LayeredServer", [0, 9, 15]),
            ):
                net, first = train_on_all_ranks(group, name, dtype, 20, shares, strategy)
                off, drift = distance(first, gradient), distance(flat(net), flat(reference))
                report(f"{name} {dtype} {strategy} {shares}: gradient off by {off:.1e}, 20 steps by {drift:.1e}")
                assert off <= bound and drift <= 10 * bound
                bits = flat(net).numpy().tobytes()
                assert group.broadcast(bits) == bits, "parameters differ between ranks"


def main() -> None:
    torch.set_num_threads(1)
    group = ProcessGroup.start()
    group.expect(int(sys.argv[1]))
    check(group, lambda text: group.rank or sys.stdout.write(f"{text}\n"))
    group.close()


main()
