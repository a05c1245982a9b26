"""Check on every rank that a sharded optimizer trains and saves like replicated ones and resumes from theirs.

Arguments: ranks, and a folder for checkpoints.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from dlcontract import CheckpointRef
from dltrain.checkpoint.store import MODEL, OPTIMIZER
from dltrain.comm.algorithms.reduce_scatter import owned
from dltrain.comm.process_group import ProcessGroup
from dltrain.parallel.sharded_optimizer import OptimizerParallel
from dltrain.protocol.errors import BadInputError
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    BOUND,
    MakeOptimizer,
    distance,
    equal_on_all,
    flat,
    print_on_rank_0,
    start_process_group,
    train_in_one_process,
    train_on_all_ranks,
)

STEPS = 20
CASES: dict[str, MakeOptimizer] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3),
    "AdamW": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 2e-3},
        ],
        lr=1e-3,
        amsgrad=True,
    ),
}


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 10)).to(dtype)


def step(net: nn.Module, batch: Any, trainer: Trainer | None) -> torch.Tensor:
    x, y = batch
    return cross_entropy(net(x), y)


def saved(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    path = folder / "digits-0001" / f"step-{steps:010d}"
    return load_file(path / MODEL) | load_file(path / OPTIMIZER)


def check(group: ProcessGroup, name: str, dtype: torch.dtype, collective: str, folder: Path) -> float:
    generator = torch.Generator().manual_seed(7)
    data = (torch.rand(50, 1, 8, 8, generator=generator, dtype=dtype), torch.arange(50) % 10)
    shares = [5 + 7 * rank for rank in range(group.size)]
    common: dict[str, Any] = {"shares": shares, "collective": collective}
    optimizer = CASES[name]

    def run(kind: str, steps: int, place: Path) -> tuple[nn.Module, Trainer]:
        net = model(dtype)
        checkpoint = CheckpointRef(directory=str(place), interval_s=1e6)
        _, trainer = train_on_all_ranks(
            group, net, data, step, steps, optimizer, parallelism=kind, checkpoint=checkpoint, **common
        )
        equal_on_all(group, net)
        return net, trainer

    one = model(dtype)
    train_in_one_process(one, data, step, sum(shares), STEPS, optimizer)
    replicated, _ = run("Data", STEPS, folder / "replicated")
    sharded, trainer = run("Optimizer", STEPS, folder / "sharded")
    stored = sum(
        v.numel() for s in trainer.optimizer.state.values() for k, v in s.items() if k.startswith(("exp", "mom"))
    )
    kinds = {"SGD": 0, "momentum": 1, "Adam": 2, "AdamW": 3}[name]
    count = flat(one).numel()
    assert stored <= kinds * (count / group.size + len(list(one.parameters()))), (
        f"this rank stores {stored} of {kinds * count} elements"
    )
    # The sums differ only by rounding, but Adam divides small ones by each other.
    bound = BOUND[dtype] * (1e3 if name.startswith("Adam") else 10)
    drift, off = distance(flat(sharded), flat(replicated)), distance(flat(sharded), flat(one))
    assert drift <= bound and off <= bound, f"{name} {dtype} {collective}: off by {drift:.1e}, {off:.1e}"
    if group.rank == 0:
        sharded_tensors, replicated_tensors = saved(folder / "sharded", STEPS), saved(folder / "replicated", STEPS)
        assert {k: v.shape for k, v in sharded_tensors.items()} == {k: v.shape for k, v in replicated_tensors.items()}
        for key, tensor in sharded_tensors.items():
            assert distance(tensor, replicated_tensors[key]) <= 100 * bound, f"{name}: the saved {key} differs"
    halves = folder / "halves"
    run("Optimizer", STEPS // 2, halves)
    resumed, _ = run("Optimizer", STEPS, halves)
    assert torch.equal(flat(resumed), flat(sharded)), f"{name} {dtype} {collective}: the resumed run differs"
    mixed = folder / "mixed"
    run("Data", STEPS // 2, mixed)
    changed, _ = run("Optimizer", STEPS, mixed)
    assert distance(flat(changed), flat(one)) <= bound, "resumes from a replicated optimizer"
    back = folder / "back"
    run("Optimizer", STEPS // 2, back)
    changed, _ = run("Data", STEPS, back)
    assert distance(flat(changed), flat(one)) <= bound, "a replicated optimizer resumes"
    return off


def main() -> None:
    group, folder = start_process_group(), Path(sys.argv[2])
    for name in CASES:
        for dtype in BOUND if name in ("momentum", "Adam") else (torch.float64,):
            for collective in ("Ring", "Torch") if name == "momentum" else ("Ring",):
                off = check(group, name, dtype, collective, folder / f"{name}-{dtype}-{collective}")
                print_on_rank_0(group, f"{name} {dtype} {collective}: {STEPS} steps off by {off:.0e}")
    parts = [owned(rank, group.size, 5) for rank in range(group.size)]
    assert sorted(i for a, b in parts for i in range(a, b)) == list(range(5)), "every element has one owner"
    try:
        train_on_all_ranks(
            group, model(torch.float32), (torch.rand(9, 1, 8, 8), torch.arange(9)), step, 1,
            lambda net: torch.optim.Adagrad(net.parameters()), shares=[3] * group.size, parallelism="Optimizer",
        )  # fmt: skip
    except BadInputError as error:
        assert "found strategy Optimizer with the optimizer Adagrad; expected an element-wise optimizer (SGD" in str(
            error
        )
    else:
        raise AssertionError(f"Adagrad was accepted, expected a rejection by {OptimizerParallel.__name__}")
    group.close()


main()
