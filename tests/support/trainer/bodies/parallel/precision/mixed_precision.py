"""Check on every rank that training in the plan's precision learns the same as autocast in one process."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy

from dlcontract import Precision
from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.device.precision import TYPES
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    distance,
    equal_on_all,
    flat,
    four_classes,
    gradient_of,
    print_on_rank_0,
    start_process_group,
    strategy_fields,
    whole,
)
from support.trainer.plans import make_plan

STEPS, SAMPLES = 6, 124
SCALE = 2.0**8
"""Loss scale at which no gradient overflows, so that no update is skipped."""
UNIT = {"BF16": 2.0**-8, "FP16": 2.0**-11}
"""Largest relative error of rounding to the precision."""


class Layer(nn.Linear):
    used: set[torch.dtype]
    """Types of the parameters with which the layer has computed."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.used = set()

    def forward(self, x: Tensor) -> Tensor:
        self.used.add(self.weight.dtype)
        return super().forward(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.layers = nn.ModuleList(Layer(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x)).relu()
        for layer in self.layers:
            y = y + layer(y)
        out: Tensor = self.last(y)
        return out


def net_and_optimizer() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def in_one_process(precision: Precision, data: Sequence[Tensor], batch: int) -> tuple[Tensor, Tensor, list[float]]:
    """Return the first gradient, the parameters and the losses of plain PyTorch."""
    net, opt = net_and_optimizer()
    scaler = GradScaler("cpu", enabled=precision == "FP16", init_scale=SCALE)
    sampler, losses, first = Sampler(SAMPLES, batch, 0), list[float](), torch.empty(0)
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        x, y = (part[chosen] for part in data)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=TYPES.get(precision, torch.bfloat16), enabled=precision != "FP32"):
            loss = cross_entropy(net(x), y)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        first = gradient_of(net) if step == 0 else first
        scaler.step(opt)
        scaler.update()
    return first, flat(net), losses


def made(group: ProcessGroup, shares: list[int], precision: Precision, micro_batches: int, strategy: str) -> Trainer:
    plan = make_plan(
        global_batch=sum(shares), steps=STEPS, shares=shares, bucket_nbytes=4096, micro_batches=micro_batches,
        precision=precision, **strategy_fields(strategy, len(shares)),
    )  # fmt: skip
    return Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")


def on_all_ranks(
    group: ProcessGroup, precision: Precision, data: tuple[Tensor, ...], shares: list[int], micro: int, strategy: str
) -> tuple[Tensor, Tensor, list[float]]:
    """Return the first gradient (empty unless the strategy is Data), the parameters and the losses of all ranks."""
    trainer = made(group, shares, precision, micro, strategy)
    taken, opt = net_and_optimizer()
    net, opt = trainer.wrap(taken, opt)
    losses, first = list[float](), torch.empty(0)
    trainer.progress.add_loss = losses.append  # type: ignore[method-assign]
    scaler = trainer.grad_scaler(init_scale=SCALE)
    for x, y in trainer.steps(trainer.loader(data), accumulate=True):
        opt.zero_grad()
        with trainer.autocast():
            out = net(x)
            loss = cross_entropy(out, y)
        assert (out.dtype, loss.dtype) == (TYPES.get(precision, torch.float32), torch.float32)
        trainer.log(loss=loss)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if trainer.step == 1 and not len(first) and strategy == "Data":
            first = gradient_of(net)
    assert all(p.dtype == torch.float32 for p in net.parameters())
    state = trainer._loss_scale.state()
    assert (state is not None) == (precision == "FP16"), "checkpoints contain the scaler"
    gathered = TYPES.get(precision, torch.float32) if strategy == "Sharded" else torch.float32
    assert all(layer.used == {gathered} for layer in taken.layers), f"{strategy}: {[x.used for x in taken.layers]}"
    parameters = whole(net) if strategy == "Sharded" else flat(net)
    if strategy != "Sharded":
        equal_on_all(group, net)
    trainer.close()
    return first, parameters, losses


def misuse(group: ProcessGroup, shares: list[int]) -> None:
    """Check that a loop that would train in another precision than the plan ends with an error."""
    data = four_classes(SAMPLES)
    for precision, casts, scales, words in (
        ("BF16", False, False, r"found no t\.autocast\(\) with a plan in BF16"),
        ("FP16", False, True, r"found no t\.autocast\(\) with a plan in FP16"),
        ("FP16", True, False, "found an update without a GradScaler"),
    ):
        trainer = made(group, shares, precision, 1, "Data")  # type: ignore[arg-type]
        net, opt = trainer.wrap(*net_and_optimizer())
        scaler = trainer.grad_scaler() if scales else GradScaler("cpu", enabled=False)
        with pytest.raises(MisuseError, match=words):
            for x, y in trainer.steps(trainer.loader(data)):
                with trainer.autocast() if casts else torch.autocast("cpu", enabled=False):
                    loss = cross_entropy(net(x), y)
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
        trainer.close()


def main() -> None:
    group = start_process_group()
    data = four_classes(SAMPLES)
    shares = {1: [24], 2: [7, 17], 3: [4, 7, 13]}[group.size]
    exact, _, _ = in_one_process("FP32", data, sum(shares))
    for precision in ("FP32", "BF16", "FP16"):
        gradient, parameters, losses = in_one_process(precision, data, sum(shares))
        bound = 8 * UNIT.get(precision, 1e-7)
        assert distance(gradient, exact) < bound, "autocast itself is further from float32"
        if precision != "FP32":
            assert distance(gradient, exact) > bound / 1000, "nothing was rounded"
        for strategy in ("Data", "Optimizer", "Sharded") if group.size > 1 else ("Data",):
            for micro in (1, 3):
                first, trained, found = on_all_ranks(group, precision, data, shares, micro, strategy)
                case = f"{precision}, {strategy}, {micro} micro-batches"
                if strategy == "Data":
                    assert distance(first, gradient) < bound, f"{case}: {distance(first, gradient)}"
                assert distance(trained, parameters) < bound, f"{case}: {distance(trained, parameters)}"
                assert found == pytest.approx(losses, rel=bound), case
        print_on_rank_0(group, f"{precision}: the same as in one process")
    misuse(group, shares)
    print_on_rank_0(group, "misuse is found")
    group.close()


main()
