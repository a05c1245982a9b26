"""Check on every rank that synchronized batch norm equals that of one process for any shares.

The second argument is the collective (default: Ring).
"""

import copy
import sys
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
    distance,
    equal_on_all,
    flat,
    print_on_rank_0,
    start_process_group,
    train_in_one_process,
    train_on_all_ranks,
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
    group = start_process_group()
    collective = sys.argv[2] if len(sys.argv) > 2 else "Ring"
    largest = dict.fromkeys(BOUND, 0.0)

    options: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, {"wrap": {"sync_batch_norm": True}}),  # set by the script
        (torch.float64, {"model_": ModelRef(command=("script",), sync_batch_norm=True)}),  # set by the manifest
        (torch.float64, {}),  # converted by torch
    ]

    def example(shares: list[int]) -> None:
        batch = sum(shares)
        for dtype, chosen in options:
            bound, one, many = BOUND[dtype], model(dtype), model(dtype)
            if not chosen:
                many = nn.SyncBatchNorm.convert_sync_batchnorm(many)
            generator = torch.Generator().manual_seed(batch)
            samples = batch + max(16, batch // 2)  # the second batch is short, so some ranks may get no sample
            x = torch.rand(samples, 1, 8, 8, generator=generator, dtype=dtype)
            data = (x, torch.arange(samples) % 10)
            exact = train_in_one_process(one, data, step, batch, 2)
            found, _ = train_on_all_ranks(group, many, data, step, 2, shares=shares, collective=collective, **chosen)
            off, drift = distance(found, exact), distance(flat(many), flat(one))
            assert off <= bound and drift <= bound, f"{dtype} {shares}: off by {off:.1e}, after two steps {drift:.1e}"
            largest[dtype] = max(largest[dtype], off)
            equal_on_all(group, many)
            for (name, a), b in zip(many.named_buffers(), one.buffers(), strict=True):
                assert distance(a, b) <= bound, f"{dtype} {shares}: {name} is {a}, expected {b}"
            with torch.no_grad():
                copied = copy.deepcopy(many).eval()
                assert distance(copied(x), one.eval()(x)) <= 10 * bound, "evaluation uses the running statistics"

    few_examples = settings(max_examples=5, deadline=None, database=None, derandomize=True)
    # Two values always normalize to -1 and 1, so that their gradient is only a rounding error.
    shares = st.lists(st.integers(1, 24), min_size=group.size, max_size=group.size).filter(lambda s: sum(s) >= 16)
    with warnings.catch_warnings(record=True) as caught:
        train_on_all_ranks(
            group, model(torch.float32), (torch.rand(9, 1, 8, 8), torch.arange(9)), step, 1, shares=[9] * group.size
        )
    warned = [str(w.message) for w in caught if "BatchNorm layers (1, …) use the samples of one rank" in str(w.message)]
    assert len(warned) == (group.rank == 0 < group.size - 1), (
        "with several ranks, rank 0 warns that the result is not exact"
    )
    count = with_hypothesis(group, example, lambda lead: few_examples(given(shares)(lead)))
    print_on_rank_0(
        group,
        f"{count} examples, off by at most {', '.join(f'{off:.0e} in {dtype}' for dtype, off in largest.items())}",
    )
    group.close()


main()
