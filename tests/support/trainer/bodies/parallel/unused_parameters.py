"""Check on every rank that parameters without a gradient hold up no reduction, and that results are those of one process.

Print for each case how many buckets were reduced during backward passes, of how many. Arguments after the number of ranks
are the cases to check (default: all), and ``DDP`` to use this collective.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from dlcontract import CollectiveName
from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.parallel.data_parallel import DataParallel
from dltrain.parallel.pytorch.ddp import TorchDataParallel
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

STEPS, SAMPLES, BRANCHES = 12, 120, 5
Body = Callable[["Net", torch.Tensor, torch.Tensor, int, Trainer | None], None]


class Net(nn.Module):
    """A network with branches for few samples: which of them a rank computes differs between ranks and steps.

    The last branch is never used, and comes first in the backward order of parameters, as does ``head``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8 if i == 0 else 32, 32) for i in range(4))
        self.last = nn.Linear(32, 4)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(BRANCHES))
        self.head = nn.Linear(8, 4)
        self.unused = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, *, reentrant: bool = False) -> torch.Tensor:
        h = x
        for layer in self.first:
            h = checkpoint(layer, h, use_reentrant=True) if reentrant and h.requires_grad else layer(h)
            h = h.tanh()
        for i, branch in enumerate(self.branches):
            mask = (x[:, :1] * 10).floor().remainder(2 * BRANCHES) == i
            if bool(mask.any()):
                h = h + branch(h) * mask
        out: torch.Tensor = self.last(h)
        return out


def clip(net: Net) -> None:
    assert torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1) > 0.1, "clipping has an effect"


def branches(net: Net, x: torch.Tensor, y: torch.Tensor, step: int, trainer: Trainer | None) -> None:
    cross_entropy(net(x), y).backward()
    clip(net)


def accumulated(net: Net, x: torch.Tensor, y: torch.Tensor, step: int, trainer: Trainer | None) -> None:
    if trainer is None:
        cross_entropy(net(x), y).backward()
    else:
        half = len(y) // 2
        with trainer.no_sync():
            (cross_entropy(net(x[:half]), y[:half]) * (half / len(y))).backward()
        (cross_entropy(net(x[half:]), y[half:]) * (1 - half / len(y))).backward()
    clip(net)


def two_passes(net: Net, x: torch.Tensor, y: torch.Tensor, step: int, trainer: Trainer | None) -> None:
    cross_entropy(net(x), y).backward()
    cross_entropy(net.head(x), y).backward()
    clip(net)


def rarely_two_passes(net: Net, x: torch.Tensor, y: torch.Tensor, step: int, trainer: Trainer | None) -> None:
    """Train the head in some steps, and on ranks of few samples in no step before the end of the backward passes."""
    cross_entropy(net(x), y).backward()
    chosen = x[:, 1] > 1.5
    if step % 3 == 1 and bool(chosen.any()):
        (cross_entropy(net.head(x), y, reduction="none") * chosen).mean().backward()
    if trainer is None:
        clip(net)
    else:
        assert trainer.clip_gradients(0.1) > 0.1, "clipping has an effect"


def weighed(net: Net, x: torch.Tensor, y: torch.Tensor, step: int, trainer: Trainer | None) -> None:
    """Average over some of the samples, so that gradients are divided after their reduction."""
    chosen = x[:, 1] > -0.5
    if trainer is not None:
        trainer.weigh(int(chosen.sum()))
    count = max(1, int(chosen.sum()))
    (cross_entropy(net(x), y, reduction="none") * chosen).sum().div(count).backward()
    if step > 3:
        (cross_entropy(net.head(x), y, reduction="none") * chosen).sum().div(count).backward()
    clip(net)


def reentrant(net: Net, x: torch.Tensor, y: torch.Tensor, step: int, trainer: Trainer | None) -> None:
    cross_entropy(net(x, reentrant=True), y).backward()
    clip(net)


BODIES: tuple[Body, ...] = (branches, accumulated, two_passes, rarely_two_passes, weighed, reentrant)


def adamw(net: Net) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)


def train_in_one_process(body: Body, data: tuple[torch.Tensor, ...], batch: int) -> Net:
    torch.manual_seed(0)
    net = Net().double()
    opt, sampler = adamw(net), Sampler(SAMPLES, batch, 0)
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        opt.zero_grad()
        body(net, data[0][chosen], data[1][chosen], step, None)
        opt.step()
    return net


class Counter:
    """Counts reductions that start, and those of them that start during a backward pass."""

    def __init__(self, trainer: Trainer) -> None:
        self.total = self.overlapping = 0
        self._ended = False
        parallel = trainer._team.parallel
        assert isinstance(parallel, DataParallel | TorchDataParallel)
        collective = parallel.reducer.collective if isinstance(parallel, TorchDataParallel) else parallel.collective
        name = "begun" if isinstance(parallel, TorchDataParallel) else "start"
        start, backward_ended = getattr(collective, name), parallel._backward_ended

        def ended() -> None:  # autograd still runs when it calls this
            self._ended = True
            backward_ended()
            self._ended = False

        parallel._backward_ended = ended  # type: ignore[method-assign]

        def counted(*arguments: Any) -> object:
            self.total += 1
            self.overlapping += torch._C._current_graph_task_id() != -1 and not self._ended
            return start(*arguments)

        setattr(collective, name, counted)


def train_on_all_ranks(
    group: ProcessGroup, body: Body, data: tuple[torch.Tensor, ...], shares: list[int], collective: CollectiveName
) -> tuple[Net, Counter]:
    torch.manual_seed(0)
    made = make_plan(global_batch=sum(shares), steps=STEPS, shares=shares, bucket_nbytes=4096, collective=collective)
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    net = Net().double()
    net, opt = trainer.wrap(net, adamw(net))
    counter = Counter(trainer)
    for x, y in trainer.steps(trainer.loader(data)):
        opt.zero_grad()
        body(net, x, y, trainer.step, trainer)
        opt.step()
        assert net.unused.weight.grad is None, "no rank has a gradient"
    trainer.close()
    return net, counter


def main() -> None:
    group = start_process_group()
    data = four_classes(SAMPLES, torch.float64)
    shares = [3 + 5 * rank for rank in range(group.size)]
    collective: CollectiveName = "DDP" if "DDP" in sys.argv else "Ring"
    chosen = [name for name in sys.argv[2:] if name != "DDP"]
    for body in BODIES:
        if chosen and body.__name__ not in chosen:
            continue
        expected = flat(train_in_one_process(body, data, sum(shares)))
        net, counter = train_on_all_ranks(group, body, data, shares, collective)
        off = distance(flat(net), expected)
        counts = f"{counter.overlapping} of {counter.total} reductions during backward"
        print_on_rank_0(group, f"{body.__name__}: off by {off:.1e}, {counts}")
        assert off < 1e-9, (body.__name__, off)
        equal_on_all(group, net)
    group.close()


main()
