"""On every rank: torch's GradScaler leaves out the updates that it leaves out in one process, and does no other harm."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy

from dlcontract import OptimizerRef
from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import DivergedError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import distance, equal_on_all, flat, four_classes, ranks, say
from support.trainer.plans import make_plan

STEPS, SAMPLES, PARTS = 24, 240, 2


class Overflow(torch.autograd.Function):
    """As float16 would, but sample by sample, so that it does not depend on the split: backward through a sample is
    infinite while the loss scale is above what the sample bears."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, most: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(most)
        ctx.scale = scale
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (most,) = ctx.saved_tensors
        return gradient.where((most >= ctx.scale)[:, None], torch.inf * gradient.sign()), None, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        bears = torch.where(x[:, 0] > 1.2, 2.0**9, 2.0**12)  # on some steps and some ranks only
        h: torch.Tensor = Overflow.apply(self.first(x).tanh(), bears, scale)  # type: ignore[no-untyped-call]
        return self.last(h)


@dataclass(frozen=True)
class Case:
    strategy: str = "Data"
    clip: str = ""
    """By whom, after ``unscale_``."""
    parts: bool = False
    fused: bool = False
    tokens: bool = False
    all_used: bool = False
    """Whether all parameters have a part in the loss: else backward does not end with the wait for the sums."""


CASES = {
    "plain": Case(),
    "torch clips": Case(clip="torch", all_used=True),
    "the trainer clips": Case(clip="trainer"),
    "in parts": Case(parts=True, clip="trainer"),
    "fused": Case(fused=True, all_used=True),
    "tokens": Case(tokens=True, clip="trainer"),
    "sharded": Case("Optimizer", all_used=True),
    "sharded, the trainer clips": Case("Optimizer", clip="trainer", all_used=True),
    "sharded, fused": Case("Optimizer", fused=True, all_used=True),
}


def optimizer(net: Net, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)


def made_scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**14, growth_interval=4)


def body(
    case: Case, net: Net, opt: torch.optim.Optimizer, scaler: GradScaler, batch: Any, t: Trainer | None
) -> torch.Tensor:
    """A step as scripts write it. ``t``: None in one process."""
    x, y = batch
    opt.zero_grad()
    if case.tokens:
        y = y.where(x[:, 1] > 0, -100)
    if case.tokens and t is not None:
        t.weigh(int((y != -100).sum()))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(net(x, scaler.get_scale()), y)
        return loss + 0 * sum(p.sum() for p in net.spare.parameters()) if case.all_used else loss

    if case.parts and t is not None:
        half = max(1, len(y) // PARTS)
        with t.no_sync():
            scaler.scale(loss_of(x[:half], y[:half]) * (half / len(y))).backward()
        loss = loss_of(x[half:], y[half:]) * (1 - half / len(y))
    else:
        loss = loss_of(x, y)
    if t is not None:
        t.log(loss=loss)
    scaler.scale(loss).backward()
    if case.clip:
        scaler.unscale_(opt)
    if case.clip == "trainer" and t is not None:
        t.clip_gradients(0.3)
    elif case.clip:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
    scaler.step(opt)
    scaler.update()
    return loss


def alone(case: Case, data: tuple[torch.Tensor, ...], batch: int) -> tuple[Net, list[float]]:
    torch.manual_seed(0)
    net = Net()
    opt, sampler, scaler, scales = optimizer(net, case.fused), Sampler(SAMPLES, batch, 0), made_scaler(), []
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        body(case, net, opt, scaler, [part[chosen] for part in data], None)
        scales.append(scaler.get_scale())
    return net, scales


class Heard(RankReporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.news: list[Any] = []

    def send(self, news: Any) -> None:
        self.news.append(news)


def trainer_of(world: ProcessGroup, shares: list[int], **plan: Any) -> tuple[Trainer, Heard]:
    made = make_plan(global_batch=sum(shares), shares=shares, bucket_nbytes=4096, **{"steps": STEPS, **plan})
    heard = Heard()
    trainer = Trainer(made, world, heard, torch.device("cpu"), "cpu")
    trainer.progress.due = lambda last: True  # type: ignore[method-assign]
    return trainer, heard


def together(
    world: ProcessGroup, case: Case, data: tuple[torch.Tensor, ...], shares: list[int], **plan: Any
) -> tuple[Net, list[float], Heard]:
    trainer, heard = trainer_of(world, shares, parallelism=case.strategy, **plan)
    torch.manual_seed(0)
    net, opt = trainer.wrap(net := Net(), optimizer(net, case.fused))
    scaler, scales = made_scaler(), []
    for batch in trainer.steps(trainer.loader(data)):
        body(case, net, opt, scaler, batch, trainer)
        scales.append(scaler.get_scale())
    assert trainer.step == STEPS
    trainer.close()
    return net, scales, heard


def equals_one_process(world: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    for name, case in CASES.items():
        expected, scales = alone(case, data, sum(shares))
        skipped = sum(b < a for a, b in zip([2.0**14, *scales], scales, strict=False))
        net, found, heard = together(world, case, data, shares)
        off = distance(flat(net), flat(expected))
        say(world, f"{name}: off by {off:.1e}, {skipped} of {STEPS} updates left out")
        assert found == scales and 3 < skipped < STEPS / 2, (name, found, scales)
        assert off < 2e-5, (name, off)
        equal_on_all(world, net)
        told = [news for news in heard.news if news.type == "step"]
        assert told[-1].skipped_updates == skipped and told[-1].loss_scale == scales[-1]
        norms = [news.gradient_norm for news in told if news.gradient_norm is not None]
        assert max(norms) < 2, f"{name}: {norms}: of the loss, not of the scaled one"


def compressed(world: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """What error feedback carries over is in the right unit, and an infinite gradient does not stay in it."""
    expected, scales = alone(CASES["plain"], data, sum(shares))
    for kind in ("BF16", "FP16"):
        net, found, _ = together(world, CASES["plain"], data, shares, compression=kind)
        off = distance(flat(net), flat(expected))
        say(world, f"{kind} on the wire: off by {off:.1e}")
        assert found == scales and off < 0.05, (kind, off, found)
        equal_on_all(world, net)


def served(world: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """A parameter server knows of no scaler, and does not take infinite gradients for a divergence."""
    shares = [*shares[:-1], 0]
    expected, scales = alone(CASES["plain"], data, sum(shares))
    net, found, _ = together(world, CASES["plain"], data, shares, collective="ParameterServer")
    if shares[world.rank]:
        assert found == scales and distance(flat(net), flat(expected)) < 2e-5, found


def noise(world: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """Measured as without a scaler: of the gradient itself, and not in steps that are left out."""
    seen = []
    for enabled in (False, True):
        adascale = OptimizerRef(scaling="AdaScale", base_batch=sum(shares) // 2)
        trainer, _ = trainer_of(world, shares, optimizer=adascale, steps=12)
        torch.manual_seed(0)
        net, opt = trainer.wrap(net := Net(), optimizer(net, fused=False))
        scaler = GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
        for batch in trainer.steps(trainer.loader(data)):
            body(CASES["plain"], net, opt, scaler, batch, trainer)
            if trainer.step == 4:
                state = torch.tensor([*trainer._scaling.state(), *trainer.noise.state()[1][-1]])
            if enabled and trainer.step in (4, 5):
                scaler._scale.fill_({4: 2.0**13, 5: 2.0**8}[trainer.step])  # one overflow
        seen.append((state, trainer.noise.steps))
        trainer.close()
    (plain, steps), (scaled, scaled_steps) = seen
    assert scaled_steps == steps - 1 > 6, (steps, scaled_steps)
    torch.testing.assert_close(scaled, plain, rtol=1e-3, atol=0)
    assert plain.abs().min() > 0


def half_precision(world: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """float16 itself: rounded by the split, it ends near one process, and with equal parameters on all ranks."""

    def run(t: Trainer | None, net: nn.Module, opt: Any, batches: Any) -> float:
        scaler, first, last = GradScaler("cpu", init_scale=2.0**24), 0.0, 0.0
        for x, y in batches:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = cross_entropy(net(x), y)
            if t is not None:
                t.log(loss=loss)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            if t is not None and t.parallel.in_parts:
                t.clip_gradients(1.0)
            else:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            first, last = first or scaler.get_scale(), scaler.get_scale()
        assert last < first < 2.0**24, "float16 has overflown"
        return last

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    net, sampler = network(), Sampler(SAMPLES, sum(shares), 0)
    chosen = (torch.from_numpy(sampler.part(step, [1], 0).indices) for step in range(60))
    run(None, net, torch.optim.SGD(net.parameters(), 0.3), ([part[c] for part in data] for c in chosen))
    for strategy in ("Data", "Optimizer"):
        trainer, _ = trainer_of(world, shares, parallelism=strategy, steps=60)
        mine, opt = trainer.wrap(m := network(), torch.optim.SGD(m.parameters(), 0.3))
        run(trainer, mine, opt, trainer.steps(trainer.loader(data)))
        off = distance(flat(mine), flat(net))
        say(world, f"float16, {strategy}: off by {off:.1e}")
        assert off < 0.15, off
        equal_on_all(world, mine)
        trainer.close()


def endings(world: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """What must still be an error is one."""

    def run(loop: Callable[[Trainer, Net, Any, GradScaler, Any], None], strategy: str = "Data") -> Trainer:
        trainer, _ = trainer_of(world, shares, parallelism=strategy)
        net, opt = trainer.wrap(net := Net(), optimizer(net, fused=False))
        scaler = GradScaler("cpu", init_scale=2.0**14)
        for batch in trainer.steps(trainer.loader(data)):
            loop(trainer, net, opt, scaler, batch)
        return trainer

    def forgets_to_step(t: Trainer, net: Net, opt: Any, scaler: GradScaler, batch: Any) -> None:
        scaler.scale(cross_entropy(net(batch[0], scaler.get_scale()), batch[1])).backward()
        scaler.unscale_(opt)

    def has_no_number(t: Trainer, net: Net, opt: Any, scaler: GradScaler, batch: Any) -> None:
        body(CASES["plain"], net, opt, scaler, (batch[0] * (torch.nan if t.step == 6 else 1), batch[1]), t)

    def does_not_say(t: Trainer, net: Net, opt: Any, scaler: GradScaler, batch: Any) -> None:
        scaler.scale(cross_entropy(net(batch[0] * torch.nan, 1.0), batch[1])).backward()
        scaler.step(opt)
        scaler.update(scaler.get_scale() / 2**8 if scaler.get_scale() > 2.0**-26 else None)

    def clips_its_part(t: Trainer, net: Net, opt: Any, scaler: GradScaler, batch: Any) -> None:
        x, y = batch
        scaler.scale(cross_entropy(net(x, 1.0), y)).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()

    if world.size > 1:
        with pytest.raises(ValueError, match=r"each rank holds a part of them .* Clip with t\.clip_gradients"):
            run(clips_its_part, "Optimizer")
    with pytest.raises(ValueError, match=r"found no opt\.step\(\) \(or scaler\.step\(opt\)\)"):
        run(forgets_to_step)
    with pytest.raises(DivergedError, match="loss is nan at step 6"):
        run(has_no_number)
    with pytest.raises(DivergedError, match=r"gradients are not finite at step 5, even at a loss scale of 1\.5e-08"):
        run(does_not_say)


def main() -> None:
    world = ranks()
    data = four_classes(SAMPLES)
    shares = [9 + 14 * rank for rank in range(world.size)]
    equals_one_process(world, data, shares)
    half_precision(world, data, shares)
    if world.size > 1:
        compressed(world, data, shares)
        served(world, data, shares)
        noise(world, data, shares)
    endings(world, data, shares)
    world.close()
    sys.stdout.flush()


main()
