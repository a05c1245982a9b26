"""Check on every rank the kept objects and the GradScaler of a script after a restart and after the kill of a rank.

Usage: ``user_objects.py RANKS FOLDER resume``, or ``… kill``, which kills rank 1 in the middle of a step.
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
from support.trainer.bodies.harness import distance, flat, four_classes, print_on_rank_0, start_process_group
from support.trainer.plans import make_plan, saving

STEPS, SAMPLES, MAX_SCALE = 24, 240, 2.0**10
KILLED_AT = 13


@dataclass
class State:
    """The final state of a run."""

    net: nn.Module
    opt: torch.optim.Optimizer
    ema: AveragedModel
    scaler: GradScaler = field(default_factory=lambda: GradScaler("cpu", init_scale=2.0**12, growth_interval=3))
    history: list[Any] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        self.opt.zero_grad()
        h = self.net[:2](x)
        h.register_hook(lambda g: g * (torch.inf if self.scaler.get_scale() > MAX_SCALE else 1.0))
        self.scaler.scale(cross_entropy(self.net[2:](h), y)).backward()
        self.history.append((number, self.scaler.get_scale()))
        self.best.setdefault("steps", []).append(number)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.ema.update_parameters(self.net)
        self.best["scale"] = min(self.scaler.get_scale(), self.best.get("scale", torch.inf))

    def result(self) -> list[Any]:
        return [self.scaler.state_dict(), self.history, self.best, int(self.ema.n_averaged)]


def make_state(wrap: Any = None) -> State:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if wrap is not None:
        net, opt = wrap(net, opt)
    return State(net, opt, AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)))


def train_in_one_process(data: tuple[torch.Tensor, ...], batch: int) -> State:
    state, sampler = make_state(), Sampler(SAMPLES, batch, 0)
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        state.step(*[part[chosen] for part in data], step)
    return state


def train_on_all_ranks(
    group: ProcessGroup,
    folder: Path,
    data: tuple[torch.Tensor, ...],
    shares: list[int],
    killed: int = -1,
    how: str = "Data",
) -> State:
    plan = make_plan(
        shares=shares, global_batch=sum(shares), steps=STEPS, collective="Ring",
        checkpoint=saving(folder, interval_s=1e-9, keep=100), min_ranks=1,
        parallelism=how,
    )  # fmt: skip
    trainer = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
    state = make_state(trainer.wrap)
    trainer.keep(ema=state.ema, history=state.history)
    trainer.keep(best=state.best)
    assert bool(state.history) == bool(trainer.step)
    for x, y in trainer.steps(trainer.loader(data)):
        if trainer.step == killed and trainer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.step(x, y, trainer.step)
    assert trainer._loss_scale.skipped == sum(scale > MAX_SCALE for _, scale in state.history) > 3
    trainer.close()
    return state


def same(group: ProcessGroup, name: str, found: State, expected: State, bound: float) -> None:
    assert found.result() == expected.result(), (name, found.result(), expected.result())
    off = max(distance(flat(a), flat(b)) for a, b in ((found.net, expected.net), (found.ema, expected.ema)))
    print_on_rank_0(group, f"{name}: off by {off:.1e}")
    assert off <= bound, (name, off)


def main() -> None:
    group, folder = start_process_group(), Path(sys.argv[2])
    data = four_classes(SAMPLES)
    shares = [9 + 14 * rank for rank in range(group.size)]
    expected = train_in_one_process(data, sum(shares))
    if sys.argv[3] == "kill":
        same(group, "killed", train_on_all_ranks(group, folder, data, shares, KILLED_AT), expected, 1e-5)
        sys.stdout.flush()
        session.leave(0)
    for how in ("Optimizer", "Data"):
        place = folder / how
        whole = train_on_all_ranks(group, place, data, shares, how=how)
        same(group, f"{how} whole", whole, expected, 1e-5)
        if group.rank == 0:
            for path in (place / "digits-0001").glob("step-*"):
                if int(path.name.removeprefix("step-")) > STEPS // 2:
                    shutil.rmtree(path)
            assert list((place / "digits-0001").glob("step-*")), "a checkpoint to resume from remains"
        group.sum([0.0])
        same(group, f"{how} resumed", train_on_all_ranks(group, place, data, shares, how=how), whole, 0.0)
    os.environ[MEMORY_ENV] = str(folder / "memory")
    train_on_all_ranks(group, place, data, shares)
    if group.rank == 0:
        shutil.rmtree(place / "digits-0001")
    group.sum([0.0])
    found = train_on_all_ranks(group, place, data, shares)  # resumed at its end, so that nothing was scaled any more
    assert found.result()[1:] == whole.result()[1:] and torch.equal(flat(found.ema), flat(whole.ema))
    group.close()


main()
