"""On every rank: what a script keeps, and its GradScaler, after a restart and after a rank was killed.

``kept_state.py RANKS FOLDER resume`` or ``… kill``: then rank 1 dies in the middle of a step.
"""

import os
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.rank_messages import MEMORY_ENV
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import distance, flat, four_classes, ranks, say
from support.trainer.plans import make_plan, saving

STEPS, SAMPLES, BEARS = 24, 240, 2.0**10
KILLED_AT = 13


@dataclass
class Own:
    """All that a run ends with."""

    net: nn.Module
    opt: torch.optim.Optimizer
    ema: AveragedModel
    scaler: GradScaler = field(default_factory=lambda: GradScaler("cpu", init_scale=2.0**12, growth_interval=3))
    history: list[Any] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        self.opt.zero_grad()
        h = self.net[:2](x)
        h.register_hook(lambda g: g * (torch.inf if self.scaler.get_scale() > BEARS else 1.0))
        self.scaler.scale(cross_entropy(self.net[2:](h), y)).backward()
        self.history.append((number, self.scaler.get_scale()))
        self.scaler.step(self.opt)
        self.scaler.update()
        self.ema.update_parameters(self.net)
        self.best["scale"] = min(self.scaler.get_scale(), self.best.get("scale", torch.inf))

    def result(self) -> list[Any]:
        return [self.scaler.state_dict(), self.history, self.best, int(self.ema.n_averaged)]


def made(wrap: Any = None) -> Own:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if wrap is not None:
        net, opt = wrap(net, opt)
    return Own(net, opt, AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)))


def alone(data: tuple[torch.Tensor, ...], batch: int) -> Own:
    own, sampler = made(), Sampler(SAMPLES, batch, 0)
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        own.step(*[part[chosen] for part in data], step)
    return own


def together(
    world: ProcessGroup,
    folder: Path,
    data: tuple[torch.Tensor, ...],
    shares: list[int],
    killed: int = -1,
    how: str = "Data",
) -> Own:
    plan = make_plan(
        shares=shares, global_batch=sum(shares), steps=STEPS, collective="Ring",
        checkpoint=saving(folder, interval_s=1e-9, keep=100), min_ranks=1,
        parallelism=how,
    )  # fmt: skip
    trainer = Trainer(plan, world, RankReporter(None), torch.device("cpu"), "cpu")
    own = made(trainer.wrap)
    trainer.keep(ema=own.ema, history=own.history)
    trainer.keep(best=own.best)
    assert bool(own.history) == bool(trainer.step)
    for x, y in trainer.steps(trainer.loader(data)):
        if trainer.step == killed and trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        own.step(x, y, trainer.step)
    assert trainer._loss_scale.skipped == sum(scale > BEARS for _, scale in own.history) > 3
    trainer.close()
    return own


def same(world: ProcessGroup, name: str, found: Own, expected: Own, most: float) -> None:
    assert found.result() == expected.result(), (name, found.result(), expected.result())
    off = max(distance(flat(a), flat(b)) for a, b in ((found.net, expected.net), (found.ema, expected.ema)))
    say(world, f"{name}: off by {off:.1e}")
    assert off <= most, (name, off)


def main() -> None:
    world, folder = ranks(), Path(sys.argv[2])
    data = four_classes(SAMPLES)
    shares = [9 + 14 * rank for rank in range(world.size)]
    expected = alone(data, sum(shares))
    if sys.argv[3] == "kill":
        same(world, "killed", together(world, folder, data, shares, KILLED_AT), expected, 1e-5)
        sys.stdout.flush()
        session.leave(0)
    for how in ("Optimizer", "Data"):
        place = folder / how
        whole = together(world, place, data, shares, how=how)
        same(world, f"{how} whole", whole, expected, 1e-5)
        if world.rank == 0:
            for path in (place / "digits-0001").glob("step-*"):
                if int(path.name.removeprefix("step-")) > STEPS // 2:
                    shutil.rmtree(path)
            assert list((place / "digits-0001").glob("step-*")), "something to go on from"
        world.sum([0.0])
        same(world, f"{how} resumed", together(world, place, data, shares, how=how), whole, 0.0)
    os.environ[MEMORY_ENV] = str(folder / "memory")
    together(world, place, data, shares)
    if world.rank == 0:
        shutil.rmtree(place / "digits-0001")
    world.sum([0.0])
    found = together(world, place, data, shares)  # at its end: nothing was scaled any more
    assert found.result()[1:] == whole.result()[1:] and torch.equal(flat(found.ema), flat(whole.ema))
    world.close()


main()
