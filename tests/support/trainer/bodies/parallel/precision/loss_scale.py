"""Check on every rank that float16 with ``t.grad_scaler`` survives an overflow on one rank, and a restart.

Usage: ``loss_scale.py RANKS FOLDER``.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    equal_on_all,
    flat,
    four_classes,
    print_on_rank_0,
    start_process_group,
    strategy_fields,
    whole,
)
from support.trainer.plans import make_plan, saving

STEPS, SAMPLES, RESUMED_FROM = 14, 240, 8
OVERFLOWS = (0, 1, 10)
"""Steps in which gradients of the last rank overflow in float16, and of no other rank.

Only those of the last layer do, so that with a sharded optimizer, one rank has no infinite gradient to update.
"""
FIRST_SCALE = 2.0**12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, *, overflows: bool) -> torch.Tensor:
        hidden = self.first(x).relu()
        out: torch.Tensor = self.last(hidden + 1e3 if overflows else hidden)
        return out


def parameters_of(net: nn.Module, strategy: str) -> torch.Tensor:
    return (whole if strategy == "Sharded" else flat)(net).clone()


def trained(
    group: ProcessGroup, folder: Path, data: tuple[torch.Tensor, ...], shares: list[int], strategy: str
) -> tuple[torch.Tensor, dict[int, tuple[float, bool]], dict[str, Any], int]:
    """Train to the end. Return parameters, (scale, True if skipped) of each step, the scaler's state, and skips."""
    plan = make_plan(
        shares=shares, global_batch=sum(shares), steps=STEPS, precision="FP16",
        checkpoint=saving(folder, interval_s=1e-9, keep=100), **strategy_fields(strategy, group.size),
    )  # fmt: skip
    trainer = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
    net, opt = trainer.wrap(net := Net(), torch.optim.AdamW(net.parameters(), lr=1e-2))
    scaler, history = trainer.grad_scaler(init_scale=FIRST_SCALE, growth_interval=3), {}
    for x, y in trainer.steps(trainer.loader(data)):
        number, before = trainer.step, parameters_of(net, strategy)
        opt.zero_grad()
        overflows = number in OVERFLOWS and trainer.rank == group.size - 1
        with trainer.autocast():
            loss = cross_entropy(net(x, overflows=overflows), y)
        assert loss.isfinite(), "only gradients overflow"
        trainer.log(loss=loss)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        history[number] = (scaler.get_scale(), torch.equal(parameters_of(net, strategy), before))
    if strategy != "Sharded":
        equal_on_all(group, net)  # A rank that took another decision would have other parameters.
    parameters = parameters_of(net, strategy)
    trainer.close()
    return parameters, history, scaler.state_dict(), trainer._loss_scale.skipped


def main() -> None:
    group, folder = start_process_group(), Path(sys.argv[2])
    data, shares = four_classes(SAMPLES), [9 + 14 * rank for rank in range(group.size)]
    for strategy in ("Data", "Optimizer", "Sharded"):
        place = folder / strategy
        parameters, history, state, skipped = trained(group, place, data, shares, strategy)
        assert tuple(step for step, (_, same) in history.items() if same) == OVERFLOWS, history
        assert skipped == len(OVERFLOWS)
        scales = [scale for scale, _ in history.values()]
        assert scales[:2] == [FIRST_SCALE / 2, FIRST_SCALE / 4] and group.sum(scales) == [2 * s for s in scales]
        print_on_rank_0(group, f"{strategy}: all ranks skipped {skipped} of {STEPS} updates")

        if group.rank == 0:
            for path in (place / "digits-0001").glob("step-*"):
                if int(path.name.removeprefix("step-")) > RESUMED_FROM:
                    shutil.rmtree(path)
        group.sum([0.0])
        again, rest, end, total = trained(group, place, data, shares, strategy)
        start = min(rest)  # the newest checkpoint that remains; not every step has one
        assert 0 < start <= RESUMED_FROM and rest == {step: history[step] for step in range(start, STEPS)}, rest
        assert (end, total) == (state, skipped) and torch.equal(again, parameters)
        print_on_rank_0(group, f"{strategy}: resumed bit for bit at a loss scale of {history[start - 1][0]:.0f}")
    group.close()


main()
