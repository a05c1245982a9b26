"""Check on every rank that code between backward() and opt.step() has the same effect as in one process.

The second argument is the collective (default: Ring).
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    distance,
    equal_on_all,
    flat,
    four_classes,
    print_on_rank_0,
    start_process_group,
)
from support.trainer.plans import make_plan

STEPS, SAMPLES, IGNORED = 12, 120, -100
Body = Callable[["Net", torch.optim.Optimizer, list[torch.Tensor], int, Trainer | None], None]


class Net(nn.Module):
    """A network whose layer ``rare`` affects the loss of few samples, and in one case only in every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, *, rare: bool) -> torch.Tensor:
        h = self.first(x).tanh()
        if rare and bool((x[:, 0] > 0.5).any()):  # on some ranks only
            h = h + self.rare(h) * (x[:, :1] > 0.5)
        return self.last(h)


def plain(net: Net, opt: torch.optim.Optimizer, batch: list[torch.Tensor], step: int, trainer: Trainer | None) -> None:
    x, y = batch
    cross_entropy(net(x, rare=True), y).backward()
    if trainer is None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    else:
        trainer.clip_gradients(0.1)


def torch_clips(
    net: Net, opt: torch.optim.Optimizer, batch: list[torch.Tensor], step: int, trainer: Trainer | None
) -> None:
    x, y = batch
    loss = cross_entropy(net(x, rare=False), y)
    (loss + 0 * sum(p.sum() for p in net.rare.parameters())).backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert norm > 0.1, "clipping has an effect"


def unused(net: Net, opt: torch.optim.Optimizer, batch: list[torch.Tensor], step: int, trainer: Trainer | None) -> None:
    x, y = batch
    cross_entropy(net(x, rare=step % 3 == 2), y).backward()


def accumulation(
    net: Net, opt: torch.optim.Optimizer, batch: list[torch.Tensor], step: int, trainer: Trainer | None
) -> None:
    x, y = batch
    if trainer is None:
        cross_entropy(net(x, rare=True), y).backward()
        return
    *first_parts, last = zip(x.split(2), y.split(2), strict=True)
    with trainer.no_sync():
        for part_x, part_y in first_parts:
            (cross_entropy(net(part_x, rare=True), part_y) * (len(part_y) / len(y))).backward()
    (cross_entropy(net(last[0], rare=True), last[1]) * (len(last[1]) / len(y))).backward()


def tokens(net: Net, opt: torch.optim.Optimizer, batch: list[torch.Tensor], step: int, trainer: Trainer | None) -> None:
    x, y = batch
    y = y.where(x[:, 1] > 0, IGNORED)
    if trainer is not None:
        trainer.weigh(int((y != IGNORED).sum()))
    loss = cross_entropy(net(x, rare=False), y, ignore_index=IGNORED)
    (loss + 0 * sum(p.sum() for p in net.rare.parameters())).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def freezing(
    net: Net, opt: torch.optim.Optimizer, batch: list[torch.Tensor], step: int, trainer: Trainer | None
) -> None:
    net.first.requires_grad_(step < 4 or step > 8)
    x, y = batch
    cross_entropy(net(x, rare=False), y).backward()


CASES: dict[Body, tuple[str, ...]] = {
    plain: ("Data", "Optimizer"),
    torch_clips: ("Data",),
    unused: ("Data",),
    accumulation: ("Data", "Optimizer"),
    tokens: ("Data",),
    freezing: ("Data",),
}


def adamw(net: Net) -> torch.optim.AdamW:
    """Return an AdamW, whose weight decay changes parameters with a zero gradient but not those without a gradient."""
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 3e-3}], lr=1e-2)


def train_in_one_process(body: Body, data: tuple[torch.Tensor, ...], batch: int) -> Net:
    torch.manual_seed(0)
    net = Net().double()
    opt, sampler = adamw(net), Sampler(SAMPLES, batch, 0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        opt.zero_grad()
        body(net, opt, [part[chosen] for part in data], step, None)
        opt.step()
        schedule.step()
    return net


def train_on_all_ranks(
    group: ProcessGroup, body: Body, data: tuple[torch.Tensor, ...], shares: list[int], **plan: Any
) -> Net:
    torch.manual_seed(0)
    made = make_plan(global_batch=sum(shares), steps=STEPS, shares=shares, bucket_nbytes=4096, **plan)
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    net = Net().double()
    net, opt = trainer.wrap(net, adamw(net))
    trainer.schedule(torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS))
    for batch in trainer.steps(trainer.loader(data)):
        opt.zero_grad()
        body(net, opt, batch, trainer.step, trainer)
        opt.step()
    trainer.close()
    return net


def make_trainer(group: ProcessGroup, **plan: Any) -> Trainer:
    return Trainer(make_plan(group.size, **plan), group, RankReporter(None), torch.device("cpu"), "cpu")


def check_rejections(group: ProcessGroup) -> None:
    trainer = make_trainer(group)
    net, scale = Net(), nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"t\.wrap: optimizer: found builtins\.NoneType; expected a torch Optimizer"):
        trainer.wrap(net, None)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"found parameters of shapes \[\(2, 3\)\] that are not the model's"):
        trainer.wrap(net, torch.optim.SGD([*net.parameters(), scale], 0.1))
    opt = torch.optim.LBFGS(net.parameters())
    trainer.wrap(net, opt)
    with pytest.raises(ValueError, match=r"t\.wrap: found a second call"):
        trainer.wrap(net, opt)
    with pytest.raises(ValueError, match=r"LBFGS.step: found a closure"):
        opt.step(lambda: 0.0)
    with pytest.raises(ValueError, match="found ReduceLROnPlateau"):
        trainer.schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(opt))
    with pytest.raises(ValueError, match=r"t\.log: loss: found shape \(3,\); expected one number"):
        trainer.log(loss=torch.ones(3))
    if group.size > 1:
        with pytest.raises(ValueError, match=r"t\.steps: found 50, 51.* samples in the dataset on ranks 0, 1"):
            next(trainer.steps(trainer.loader((torch.ones(50 + group.rank, 8),))))
    trainer.close()


def check_finish(group: ProcessGroup, data: tuple[torch.Tensor, ...]) -> None:
    """Check that ``finish`` ends training after the current step or after the step just completed."""
    for late in (False, True):
        trainer = make_trainer(group, global_batch=30, steps=STEPS)
        net, opt = trainer.wrap(net := Net().double(), adamw(net))
        for x, y in trainer.steps(trainer.loader(data)):
            if trainer.step == 4 and not late:
                trainer.finish()
            cross_entropy(net(x, rare=True), y).backward()
            opt.step()
            if trainer.step == 5 and late:
                trainer.finish()
        assert trainer.complete and trainer.step == trainer.outcome().steps == 5, trainer.step
        trainer.close()


def check_second_loop(group: ProcessGroup, data: tuple[torch.Tensor, ...]) -> None:
    trainer = make_trainer(group, global_batch=30, steps=2)
    net, opt = trainer.wrap(net := Net().double(), adamw(net))
    loader = trainer.loader(data)
    for x, y in trainer.steps(loader):
        cross_entropy(net(x, rare=True), y).backward()
        opt.step()
    with pytest.warns(UserWarning, match="found another call after all 2 steps"):
        assert not list(trainer.steps(loader))
    trainer.close()


def main() -> None:
    group = start_process_group()
    collective = sys.argv[2] if len(sys.argv) > 2 else "Ring"
    data = four_classes(SAMPLES, torch.float64)
    shares = [3 + 5 * rank for rank in range(group.size)]
    for body, strategies in CASES.items():
        expected = flat(train_in_one_process(body, data, sum(shares)))
        for strategy in strategies if collective == "Ring" else ("Data",):
            net = train_on_all_ranks(group, body, data, shares, parallelism=strategy, collective=collective)
            off = distance(flat(net), expected)
            print_on_rank_0(group, f"{body.__name__} {strategy}: off by {off:.1e}")
            assert off < 1e-9, (body.__name__, strategy, off)
            equal_on_all(group, net)
    check_rejections(group)
    check_finish(group, data)
    check_second_loop(group, data)
    group.close()


main()
