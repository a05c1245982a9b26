"""On every rank: 16 bits on the wire, and over steps the mean of what arrives is that of what was sent."""

import sys

import numpy as np
import torch

from dltrain.comm.algorithms.compressed import KINDS, Compressed
from dltrain.comm.process_group import ProcessGroup

COUNT, TAIL, STEPS = 10_001, 3, 64


def gradient(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(COUNT, generator=generator) * torch.logspace(-6, 0, COUNT)


def check(world: ProcessGroup, kind: str) -> None:
    first, last = torch.zeros(5), torch.zeros(COUNT + TAIL)
    collective = Compressed(world.comm.Dup(), [first, last], kind, TAIL)
    exact = sum(gradient(rank).double() for rank in range(world.size))
    mean = torch.zeros(COUNT, dtype=torch.float64)
    single = 0.0
    for step in range(STEPS):
        first.fill_(1)
        last[:COUNT] = gradient(world.rank)
        last[COUNT:] = world.rank + 1 / 3
        works = [collective.start(0), collective.start(1)]
        for work in works:
            work.wait()
        assert bool((first == world.size).all())
        tail = sum(rank + 1 / 3 for rank in range(world.size))
        np.testing.assert_allclose(last[COUNT:].numpy(), tail, rtol=1e-6, err_msg="the tail is summed exactly")
        bits = last.numpy().tobytes()
        assert world.broadcast(bits) == bits, "ranks differ"
        mean += last[:COUNT].double() / STEPS
        if step == 0:
            single = off(mean * STEPS, exact)
    assert 1e-5 < single < 1e-2, f"{kind}: {single}"
    assert off(mean, exact) < 4 * single / STEPS, f"{kind}: {off(mean, exact)} after {STEPS} steps, {single} after one"
    collective.close()


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    world = ProcessGroup.start()
    world.expect(int(sys.argv[1]))
    for kind in KINDS:
        check(world, kind)
    world.close()
    if world.rank == 0:
        sys.stdout.write("unbiased\n")


main()
