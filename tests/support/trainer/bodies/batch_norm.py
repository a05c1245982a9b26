"""On every rank: batch norm over the whole batch is that of one process, whatever the shares."""

import copy
import warnings
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from dlcontract import ModelRef
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    BOUND,
    alone,
    distance,
    equal_on_all,
    flat,
    ranks,
    say,
    together,
    with_hypothesis,
)


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.BatchNorm2d(6, affine=False, momentum=None),
        nn.Flatten(),
        nn.Linear(96, 12, bias=False),
        nn.BatchNorm1d(12, track_running_stats=False),
        nn.Tanh(),
        nn.Linear(12, 10),
    ).to(dtype)


def step(net: nn.Module, batch: Any, trainer: Trainer | None) -> torch.Tensor:
    x, y = batch
    return cross_entropy(net(x), y)


def main() -> None:
    world = ranks()
    worst = dict.fromkeys(BOUND, 0.0)

    asked: dict[torch.dtype, dict[str, Any]] = {
        torch.float32: {"wrap": {"sync_batch_norm": True}},  # by the script
        torch.float64: {"model_": ModelRef(command=("script",), sync_batch_norm=True)},  # by the manifest
    }

    def example(shares: list[int]) -> None:
        batch = sum(shares)
        for dtype, bound in BOUND.items():
            one, many = model(dtype), model(dtype)
            generator = torch.Generator().manual_seed(batch)
            samples = batch + max(16, batch // 2)  # the second batch is short: some rank may have no sample of it
            x = torch.rand(samples, 1, 8, 8, generator=generator, dtype=dtype)
            data = (x, torch.arange(samples) % 10)
            exact = alone(one, data, step, batch, 2)
            found, _ = together(world, many, data, step, 2, shares=shares, **asked[dtype])
            off, drift = distance(found, exact), distance(flat(many), flat(one))
            assert off <= bound and drift <= bound, f"{dtype} {shares}: off by {off:.1e}, after two steps {drift:.1e}"
            worst[dtype] = max(worst[dtype], off)
            equal_on_all(world, many)
            for (name, a), b in zip(many.named_buffers(), one.buffers(), strict=True):
                assert distance(a, b) <= bound, f"{dtype} {shares}: {name} is {a}, expected {b}"
            with torch.no_grad():
                copied = copy.deepcopy(many).eval()
                assert distance(copied(x), one.eval()(x)) <= 10 * bound, "evaluation uses the running statistics"

    some = settings(max_examples=5, deadline=None, database=None, derandomize=True)
    # Of two values, the normalized ones are -1 and 1 whatever they were, and their gradient is mere rounding.
    shares = st.lists(st.integers(1, 24), min_size=world.size, max_size=world.size).filter(lambda s: sum(s) >= 16)
    with warnings.catch_warnings(record=True) as caught:
        together(
            world, model(torch.float32), (torch.rand(9, 1, 8, 8), torch.arange(9)), step, 1, shares=[9] * world.size
        )
    warned = [str(w.message) for w in caught if "BatchNorm layers (1, …) use the samples of one rank" in str(w.message)]
    assert len(warned) == (world.rank == 0 < world.size - 1), "rank 0 of several says what is not exact"
    count = with_hypothesis(world, example, lambda lead: some(given(shares)(lead)))
    say(world, f"{count} examples, off by at most {', '.join(f'{off:.0e} in {dtype}' for dtype, off in worst.items())}")
    world.close()


main()
