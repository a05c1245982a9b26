"""Check on every rank that gradients compressed to 16 bits have the exact mean over steps."""

import sys

import numpy as np
import torch

from dltrain.comm.algorithms.compressed import KINDS, Compressed
from dltrain.comm.process_group import ProcessGroup

COUNT, TAIL, STEPS = 10_001, 3, 64


def gradient(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(COUNT, generator=generator) * torch.logspace(-6, 0, COUNT)


def check(group: ProcessGroup, kind: str) -> None:
    first, last = torch.zeros(5), torch.zeros(COUNT + TAIL)
    collective = Compressed(group.comm.Dup(), [first, last], kind, TAIL)
    exact = sum(gradient(rank).double() for rank in range(group.size))
    mean = torch.zeros(COUNT, dtype=torch.float64)
    single = 0.0
    for step in range(STEPS):
        first.fill_(1)
        last[:COUNT] = gradient(group.rank)
        last[COUNT:] = group.rank + 1 / 3
        works = [collective.start(0), collective.start(1)]
        for work in works:
            work.wait()
        assert bool((first == group.size).all())
        tail = sum(rank + 1 / 3 for rank in range(group.size))
        np.testing.assert_allclose(last[COUNT:].numpy(), tail, rtol=1e-6, err_msg="the tail is summed exactly")
        bits = last.numpy().tobytes()
        assert group.broadcast(bits) == bits, "ranks differ"
        mean += last[:COUNT].double() / STEPS
        if step == 0:
            single = relative_error(mean * STEPS, exact)
    assert 1e-5 < single < 1e-2, f"{kind}: {single}"
    assert relative_error(mean, exact) < 4 * single / STEPS, (
        f"{kind}: {relative_error(mean, exact)} after {STEPS} steps, {single} after one"
    )
    collective.close()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    group = ProcessGroup.start()
    group.expect(int(sys.argv[1]))
    for kind in KINDS:
        check(group, kind)
    group.close()
    if group.rank == 0:
        sys.stdout.write("unbiased\n")


main()
