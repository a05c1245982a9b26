"""Check on every rank that torch's GradScaler skips the same updates as in one process and changes nothing else.

The second argument is the collective (default: Ring). With DDP, check only what does not depend on the strategy.
"""

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
from support.trainer.bodies.harness import (
    distance,
    equal_on_all,
    flat,
    four_classes,
    print_on_rank_0,
    start_process_group,
)
from support.trainer.plans import make_plan

STEPS, SAMPLES, PARTS = 24, 240, 2


class Overflow(torch.autograd.Function):
    """Overflow as float16 does, but per sample, so that it does not depend on the split.

    The gradient of a sample is infinite while the loss scale is above the sample's limit.
    """

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, limit: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(limit)
        ctx.scale = scale
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (limit,) = ctx.saved_tensors
        return gradient.where((limit >= ctx.scale)[:, None], torch.inf * gradient.sign()), None, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        limits = torch.where(x[:, 0] > 1.2, 2.0**9, 2.0**12)  # on some steps and some ranks only
        h: torch.Tensor = Overflow.apply(self.first(x).tanh(), limits, scale)  # type: ignore[no-untyped-call]
        return self.last(h)


@dataclass(frozen=True)
class Case:
    strategy: str = "Data"
    clip: str = ""
    """Who clips after ``unscale_``."""
    accumulate: bool = False
    micro_batches: int = 1
    fused: bool = False
    tokens: bool = False
    all_used: bool = False
    """True if the loss depends on all parameters. Otherwise, backward does not wait for all gradients."""


CASES = {
    "plain": Case(),
    "torch clips": Case(clip="torch", all_used=True),
    "the trainer clips": Case(clip="trainer"),
    "gradient accumulation": Case(accumulate=True, clip="trainer"),
    "micro-batches": Case(micro_batches=3, clip="trainer"),
    "micro-batches, fused": Case(micro_batches=3, fused=True, all_used=True),
    "micro-batches, sharded": Case("Optimizer", micro_batches=2, all_used=True),
    "fused": Case(fused=True, all_used=True),
    "tokens": Case(tokens=True, clip="trainer"),
    "sharded": Case("Optimizer", all_used=True),
    "sharded, the trainer clips": Case("Optimizer", clip="trainer", all_used=True),
    "sharded, fused": Case("Optimizer", fused=True, all_used=True),
}


def optimizer(net: Net, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)


def make_scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**14, growth_interval=4)


def body(
    case: Case, net: Net, opt: torch.optim.Optimizer, scaler: GradScaler, batch: Any, t: Trainer | None
) -> torch.Tensor:
    """Train a step as scripts do. ``t`` is None in one process."""
    x, y = batch
    opt.zero_grad()
    if case.tokens:
        y = y.where(x[:, 1] > 0, -100)
    if case.tokens and t is not None:
        t.weigh(int((y != -100).sum()))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(net(x, scaler.get_scale()), y)
        return loss + 0 * sum(p.sum() for p in net.spare.parameters()) if case.all_used else loss

    if case.accumulate and t is not None:
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


def train_in_one_process(case: Case, data: tuple[torch.Tensor, ...], batch: int) -> tuple[Net, list[float]]:
    torch.manual_seed(0)
    net = Net()
    opt, sampler, scaler, scales = optimizer(net, case.fused), Sampler(SAMPLES, batch, 0), make_scaler(), []
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        body(case, net, opt, scaler, [part[chosen] for part in data], None)
        scales.append(scaler.get_scale())
    return net, scales


class RecordingReporter(RankReporter):
    """Records all messages."""

    def __init__(self) -> None:
        super().__init__(None)
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def trainer_of(group: ProcessGroup, shares: list[int], **plan: Any) -> tuple[Trainer, RecordingReporter]:
    made = make_plan(global_batch=sum(shares), shares=shares, bucket_nbytes=4096, **{"steps": STEPS, **plan})
    reporter = RecordingReporter()
    trainer = Trainer(made, group, reporter, torch.device("cpu"), "cpu")
    trainer.progress.due = lambda last: True  # type: ignore[method-assign]
    return trainer, reporter


def train_on_all_ranks(
    group: ProcessGroup, case: Case, data: tuple[torch.Tensor, ...], shares: list[int], **plan: Any
) -> tuple[Net, list[float], RecordingReporter]:
    plan |= {"parallelism": case.strategy, "micro_batches": case.micro_batches}
    trainer, reporter = trainer_of(group, shares, **plan)
    torch.manual_seed(0)
    net, opt = trainer.wrap(net := Net(), optimizer(net, case.fused))
    scaler, scales = make_scaler(), []
    for batch in trainer.steps(trainer.loader(data), accumulate=True):
        body(case, net, opt, scaler, batch, trainer)
        if trainer.step > len(scales):
            scales.append(scaler.get_scale())
    assert trainer.step == STEPS
    trainer.close()
    return net, scales, reporter


def check_against_one_process(
    group: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int], collective: str
) -> None:
    for name, case in CASES.items():
        if collective == "DDP" and case.strategy != "Data":
            continue
        expected, scales = train_in_one_process(case, data, sum(shares))
        skipped = sum(b < a for a, b in zip([2.0**14, *scales], scales, strict=False))
        net, found, reporter = train_on_all_ranks(group, case, data, shares, collective=collective)
        off = distance(flat(net), flat(expected))
        print_on_rank_0(group, f"{name}: off by {off:.1e}, {skipped} of {STEPS} updates skipped")
        assert found == scales and 3 < skipped < STEPS / 2, (name, found, scales)
        assert off < 2e-5, (name, off)
        equal_on_all(group, net)
        progress = [message for message in reporter.messages if message.type == "step"]
        assert progress[-1].skipped_updates == skipped and progress[-1].loss_scale == scales[-1]
        norms = [message.gradient_norm for message in progress if message.gradient_norm is not None]
        assert max(norms) < 2, f"{name}: {norms}: expected the norm of the unscaled gradient"


def compressed(group: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """Check that error feedback is unscaled and does not store an infinite gradient."""
    expected, scales = train_in_one_process(CASES["plain"], data, sum(shares))
    for kind in ("BF16", "FP16"):
        net, found, _ = train_on_all_ranks(group, CASES["plain"], data, shares, compression=kind)
        off = distance(flat(net), flat(expected))
        print_on_rank_0(group, f"{kind} on the wire: off by {off:.1e}")
        assert found == scales and off < 0.05, (kind, off, found)
        equal_on_all(group, net)


def with_server(group: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """Check that a parameter server, which has no scaler, does not report infinite gradients as divergence."""
    shares = [*shares[:-1], 0]
    expected, scales = train_in_one_process(CASES["plain"], data, sum(shares))
    net, found, _ = train_on_all_ranks(group, CASES["plain"], data, shares, collective="ParameterServer")
    if shares[group.rank]:
        assert found == scales and distance(flat(net), flat(expected)) < 2e-5, found


def noise(group: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """Check that noise is measured on unscaled gradients and not in skipped updates."""
    measured = []
    for enabled in (False, True):
        adascale = OptimizerRef(scaling="AdaScale", base_batch=sum(shares) // 2)
        trainer, _ = trainer_of(group, shares, optimizer=adascale, steps=12)
        torch.manual_seed(0)
        net, opt = trainer.wrap(net := Net(), optimizer(net, fused=False))
        scaler = GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
        for batch in trainer.steps(trainer.loader(data)):
            body(CASES["plain"], net, opt, scaler, batch, trainer)
            if trainer.step == 4:
                state = torch.tensor([*trainer._scaling.state(), *trainer.noise.state()[1][-1]])
            if enabled and trainer.step in (4, 5):
                scaler._scale.fill_({4: 2.0**13, 5: 2.0**8}[trainer.step])  # one overflow
        measured.append((state, trainer.noise.steps))
        trainer.close()
    (plain, steps), (scaled, scaled_steps) = measured
    assert scaled_steps == steps - 1 > 6, (steps, scaled_steps)
    torch.testing.assert_close(scaled, plain, rtol=1e-3, atol=0)
    assert plain.abs().min() > 0


def half_precision(group: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """Check that float16 training is close to one process, with equal parameters on all ranks."""

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
            if t is not None and t.parallel.sharded:
                t.clip_gradients(1.0)
            else:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            first, last = first or scaler.get_scale(), scaler.get_scale()
        assert last < first < 2.0**24, "float16 must have overflowed"
        return last

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    net, sampler = network(), Sampler(SAMPLES, sum(shares), 0)
    chosen = (torch.from_numpy(sampler.part(step, [1], 0).indices) for step in range(60))
    run(None, net, torch.optim.SGD(net.parameters(), 0.3), ([part[c] for part in data] for c in chosen))
    for strategy in ("Data", "Optimizer"):
        trainer, _ = trainer_of(group, shares, parallelism=strategy, steps=60)
        trained, opt = trainer.wrap(m := network(), torch.optim.SGD(m.parameters(), 0.3))
        run(trainer, trained, opt, trainer.steps(trainer.loader(data)))
        off = distance(flat(trained), flat(net))
        print_on_rank_0(group, f"float16, {strategy}: off by {off:.1e}")
        assert off < 0.15, off
        equal_on_all(group, trained)
        trainer.close()


def errors(group: ProcessGroup, data: tuple[torch.Tensor, ...], shares: list[int]) -> None:
    """Check that mistakes are still errors with a scaler."""

    def run(loop: Callable[[Trainer, Net, Any, GradScaler, Any], None], strategy: str = "Data") -> Trainer:
        trainer, _ = trainer_of(group, shares, parallelism=strategy)
        net, opt = trainer.wrap(net := Net(), optimizer(net, fused=False))
        scaler = GradScaler("cpu", init_scale=2.0**14)
        for batch in trainer.steps(trainer.loader(data)):
            loop(trainer, net, opt, scaler, batch)
        return trainer

    def omits_step(t: Trainer, net: Net, opt: Any, scaler: GradScaler, batch: Any) -> None:
        scaler.scale(cross_entropy(net(batch[0], scaler.get_scale()), batch[1])).backward()
        scaler.unscale_(opt)

    def has_nan_input(t: Trainer, net: Net, opt: Any, scaler: GradScaler, batch: Any) -> None:
        body(CASES["plain"], net, opt, scaler, (batch[0] * (torch.nan if t.step == 6 else 1), batch[1]), t)

    def has_nan_gradients(t: Trainer, net: Net, opt: Any, scaler: GradScaler, batch: Any) -> None:
        scaler.scale(cross_entropy(net(batch[0] * torch.nan, 1.0), batch[1])).backward()
        scaler.step(opt)
        scaler.update(scaler.get_scale() / 2**8 if scaler.get_scale() > 2.0**-26 else None)

    def clips_local_gradients(t: Trainer, net: Net, opt: Any, scaler: GradScaler, batch: Any) -> None:
        x, y = batch
        scaler.scale(cross_entropy(net(x, 1.0), y)).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()

    if group.size > 1:
        with pytest.raises(
            ValueError, match=r"each rank holds only a part of the gradients .* Clip with t\.clip_gradients"
        ):
            run(clips_local_gradients, "Optimizer")
    with pytest.raises(ValueError, match=r"found no opt\.step\(\) \(or scaler\.step\(opt\)\)"):
        run(omits_step)
    with pytest.raises(DivergedError, match="loss is nan at step 6"):
        run(has_nan_input)
    with pytest.raises(DivergedError, match=r"gradients are not finite at step 5, even at a loss scale of 1\.5e-08"):
        run(has_nan_gradients)


def main() -> None:
    group = start_process_group()
    data = four_classes(SAMPLES)
    shares = [9 + 14 * rank for rank in range(group.size)]
    collective = sys.argv[2] if len(sys.argv) > 2 else "Ring"
    check_against_one_process(group, data, shares, collective)
    half_precision(group, data, shares)
    if group.size > 1 and collective == "Ring":
        compressed(group, data, shares)
        with_server(group, data, shares)
        noise(group, data, shares)
    errors(group, data, shares)
    group.close()
    sys.stdout.flush()


main()
