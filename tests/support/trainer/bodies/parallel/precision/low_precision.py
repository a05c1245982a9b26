"""Train models of 16-bit parameters on all ranks, and check that the numbers that ranks share stay exact.

Token totals, losses, and times would otherwise be rounded to 8 or 11 bits, like the gradients.
"""

import torch
from torch import nn

from dltrain.comm.process_group import ProcessGroup
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import equal_on_all, print_on_rank_0, start_process_group, train_on_all_ranks

TOKENS = (100_003, 70_001)
CASES = (("Ring", torch.float16, "Data"), ("Torch", torch.bfloat16, "Data"), ("Ring", torch.float16, "Optimizer"))


def check(group: ProcessGroup, collective: str, dtype: torch.dtype, parallelism: str) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(dtype)
    seen: list[float] = []

    def step(model: nn.Module, batch: tuple[torch.Tensor, ...], trainer: Trainer | None) -> torch.Tensor:
        assert trainer is not None
        if trainer.step:
            seen.append(trainer._step.agreed_step.shared.weight)
        trainer.weigh(TOKENS[group.rank])
        loss = model(batch[0]).square().mean() / 1e5  # times the tokens, gradients stay in the range of float16
        trainer.log(loss=loss)
        return loss

    data = (torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).to(dtype),)
    plan = {"collective": collective, "parallelism": parallelism, "shares": (4, 4)}
    _, trainer = train_on_all_ranks(group, model, data, step, 3, _sgd, **plan)
    assert seen == [float(sum(TOKENS))] * 2, (collective, parallelism, seen)
    equal_on_all(group, trainer.model.float())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def main() -> None:
    group = start_process_group()
    for case in CASES:
        check(group, *case)
    print_on_rank_0(group, f"{len(CASES)} cases are exact")
    group.close()


main()
