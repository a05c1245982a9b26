"""Check on every rank that steps in micro-batches learn the same as whole batches with plain PyTorch in one process.

The second argument is the collective (default: Ring).
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import MisuseError
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

STEPS, SAMPLES, IGNORED = 12, 124, -100
"""The last batch of an epoch has fewer samples, and then a step has fewer micro-batches."""
Optimizer = torch.optim.Optimizer


class Net(nn.Module):
    """A network whose layer ``rare`` affects the loss of few samples, so not of every micro-batch."""

    def __init__(self, *, always: bool) -> None:
        """Create the network. ``always``: True if every loss depends on all parameters."""
        super().__init__()
        self.always = always
        self.first, self.rare, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.always or bool((x[:, 0] > 0.8).any()):
            h = h + self.rare(h) * (x[:, :1] > 0.8)
        return self.last(h)


@dataclass(frozen=True)
class Case:
    """A user's loop. ``clip``: who clips the gradients. ``keeps_memory``: call ``zero_grad(set_to_none=False)``."""

    strategies: tuple[str, ...] = ("Data", "Optimizer")
    optimizer: Callable[[Any], Optimizer] = lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)
    clip: str = ""
    tokens: bool = False
    passes: int = 1
    keeps_memory: bool = False
    scheduled: bool = False


CASES = {
    "plain": Case(),
    "momentum and a schedule": Case(optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), scheduled=True),
    "the trainer clips": Case(clip="trainer"),
    "torch clips": Case(("Data",), clip="torch"),
    "tokens": Case(tokens=True, clip="trainer"),
    "two backward passes": Case(passes=2),
    "zeroed gradients": Case(keeps_memory=True),
}


def loss_of(net: Any, x: Tensor, y: Tensor, case: Case, trainer: Trainer | None) -> Tensor:
    if case.tokens:
        y = y.where(x[:, 1] > 0.5, IGNORED)  # some micro-batches have no token
        if trainer is not None:
            trainer.weigh(int((y != IGNORED).sum()))
    return cross_entropy(net(x), y, ignore_index=IGNORED)


def body(net: Any, opt: Optimizer, x: Tensor, y: Tensor, case: Case, trainer: Trainer | None) -> None:
    opt.zero_grad(set_to_none=trainer is None or not case.keeps_memory)
    loss = loss_of(net, x, y, case, trainer)
    if trainer is not None:
        trainer.log(loss=loss)
        if case.passes == 2:
            with trainer.no_sync():
                (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
        else:
            loss.backward()
        if case.clip == "trainer":
            trainer.clip_gradients(0.1)
    else:
        loss.backward()
    if case.clip == "torch" or (case.clip and trainer is None):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    opt.step()


def train_in_one_process(
    case: Case, data: tuple[Tensor, ...], batch: int, *, always: bool
) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    net = Net(always=always).double()
    opt, sampler, losses = case.optimizer(net.parameters()), Sampler(SAMPLES, batch, 0), list[float]()
    schedule = StepLR(opt, 3, 0.5) if case.scheduled else None
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        x, y = (part[chosen] for part in data)
        losses.append(loss_of(net, x, y, case, None).item())
        body(net, opt, x, y, case, None)
        if schedule is not None:
            schedule.step()
    return flat(net), losses


def train_on_all_ranks(
    group: ProcessGroup,
    case: Case,
    data: tuple[Tensor, ...],
    shares: list[int],
    micro_batches: int,
    noise: dict[int, list[float]],
    **plan: Any,
) -> tuple[nn.Module, list[float], int]:
    """Return the model, the logged losses, and the number of micro-batches that this rank got.

    Store the sums from which the gradient noise scale follows in ``noise``.
    """
    torch.manual_seed(0)
    made = make_plan(
        global_batch=sum(shares), steps=STEPS, shares=shares, bucket_nbytes=4096, micro_batches=micro_batches, **plan
    )
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    losses = list[float]()
    trainer.progress.add_loss = losses.append  # type: ignore[method-assign]
    net, opt = trainer.wrap(
        model := Net(always=plan["parallelism"] == "Optimizer").double(), case.optimizer(model.parameters())
    )
    if case.scheduled:
        trainer.schedule(StepLR(opt, 3, 0.5))
    count, ends = 0, 0
    for x, y in trainer.steps(trainer.loader(data), accumulate=True):
        count, before = count + 1, trainer.step
        body(net, opt, x, y, case, trainer)
        ends += trainer.end_of_epoch
        assert trainer.end_of_step == (trainer.step > before), "a step ends once, not in every micro-batch"
    assert ends == STEPS // -(-SAMPLES // sum(shares)), "an epoch ends once, not in every micro-batch"
    noise[micro_batches] = [value for section in trainer.noise.state()[1] for value in section]
    trainer.close()
    return net, losses, count


def with_batch_norm(group: ProcessGroup) -> None:
    made = make_plan(group.size, global_batch=6 * group.size, steps=1, micro_batches=3)
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    net, opt = trainer.wrap(
        model := nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)), torch.optim.SGD(model.parameters(), 0.1)
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in trainer.steps(trainer.loader(four_classes(24)), accumulate=True):
            cross_entropy(net(x), y).backward()
            opt.step()
    found = [str(w.message) for w in said if "with 3 micro-batches" in str(w.message)]
    assert len(found) == (group.rank == 0), found
    trainer.close()


def misuse(group: ProcessGroup) -> None:
    """Check that a loop that would train wrongly ends with an error that names the remedy."""
    made = make_plan(group.size, global_batch=12, steps=2, micro_batches=3)
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    net, _ = trainer.wrap(model := nn.Linear(8, 4), torch.optim.SGD(model.parameters(), 0.1))
    loader = trainer.loader(four_classes(24))
    with pytest.raises(MisuseError, match=r"found accumulate=False with a plan of 3 micro-batches"):
        next(trainer.steps(loader))
    with pytest.raises(MisuseError, match=r"found no opt\.step\(\)"):
        for x, y in trainer.steps(loader, accumulate=True):
            cross_entropy(net(x), y).backward()
    trainer.close()


def main() -> None:
    group = start_process_group()
    collective = sys.argv[2] if len(sys.argv) > 2 else "Ring"
    data = four_classes(SAMPLES, torch.float64)
    shares = {1: [24], 2: [7, 17], 3: [4, 7, 13]}[group.size]
    for name, case in CASES.items():
        for strategy in case.strategies if group.size > 1 and collective == "Ring" else ("Data",):
            # A sharded optimizer also updates parameters that the backward pass did not reach.
            always = strategy == "Optimizer"
            expected, expected_losses = train_in_one_process(case, data, sum(shares), always=always)
            noise = dict[int, list[float]]()
            for micro_batches in (1, 2, 5):
                found, losses, count = train_on_all_ranks(
                    group, case, data, shares, micro_batches, noise, parallelism=strategy, collective=collective
                )
                assert count == STEPS if micro_batches == 1 else count > STEPS
                off = distance(flat(found), expected)
                assert off < 1e-12, f"{name}, {strategy}, {micro_batches} micro-batches: {off}"
                assert losses == pytest.approx(expected_losses, rel=1e-9), f"{name}: logged {losses}"
                equal_on_all(group, found)
                assert noise[micro_batches] == pytest.approx(noise[1], rel=1e-9), f"{name}: {noise}"
        print_on_rank_0(group, f"{name}: the same as in one process")
    with_batch_norm(group)
    misuse(group)
    print_on_rank_0(group, "misuse is found")
    group.close()


main()
