"""Check on every rank that typical user loops and models learn the same as with plain PyTorch in one process.

The second argument is the collective (default: Ring).
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

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

STEPS, SAMPLES = 12, 120
Optimizer = torch.optim.Optimizer


class Loop:
    """A training loop. ``trainer`` is None with plain PyTorch."""

    strategies: tuple[str, ...] = ("Data", "Optimizer")
    trainer: Trainer | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 4))

    def optimizer(self, net: Any) -> Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-2)

    def loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(net(x), y)

    def body(self, net: Any, opt: Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        opt.zero_grad()
        self.loss(net, x, y).backward()
        opt.step()


class SparseEmbedding(Loop):
    strategies = ("Data",)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(64, 4))

    def optimizer(self, net: Any) -> Optimizer:
        return torch.optim.SGD(net.parameters(), 0.1)

    def loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(net((4 * x + 10).long().clamp(0, 19)), y)


class Unfreezing(Loop):
    """Unfreeze a layer. Weight decay must ignore it while frozen, and bias correction must count from then on."""

    def body(self, net: Any, opt: Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        net[0].requires_grad_(step >= 6)
        super().body(net, opt, x, y, step)


class AnotherGroup(Loop):
    def optimizer(self, net: Any) -> Optimizer:
        return torch.optim.AdamW(net[2].parameters(), lr=1e-2)

    def body(self, net: Any, opt: Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        if step == 4:
            opt.add_param_group({"params": list(net[0].parameters()), "lr": 3e-3})
        super().body(net, opt, x, y, step)


class Shrinking(torch.optim.Adam):
    """An optimizer whose step calls that of its base class and then changes parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.999)


class Derived(Loop):
    def optimizer(self, net: Any) -> Optimizer:
        torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # from now on, torch also calls hooks in Adam's step
        return Shrinking(net.parameters(), lr=1e-2)


class CustomGradients(Loop):
    """Use ``torch.autograd.grad``. Even steps copy into ``p.grad``, odd steps replace it."""

    strategies = ("Data",)

    def body(self, net: Any, opt: Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        gradients = torch.autograd.grad(self.loss(net, x, y), list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            if step % 2 or parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        opt.step()


class Contrastive(Loop):
    """Compare each sample with the whole batch (CLIP's loss), with a learned temperature."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 96), "b": nn.Linear(8, 96), "t": nn.Linear(1, 1)})

    def loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = normalize(net["a"](x)), normalize(net["b"](x.flip(1)))
        if self.trainer is not None:
            a, b = self.trainer.gather(a), self.trainer.gather(b)
        similarity = a @ b.t() * net["t"](torch.ones(1, dtype=a.dtype)).exp()
        which = torch.arange(len(a))
        return (cross_entropy(similarity, which) + cross_entropy(similarity.t(), which)) / 2


class LocalContrastive(Contrastive):
    """Compare only the local samples with the batch, so that each rank computes a part of the loss."""

    def loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        a = b = normalize(net["a"](x) + net["b"](x))
        first = x[:, 0]
        if self.trainer is not None:
            b, first = self.trainer.gather(b), self.trainer.gather(first)
        which = (first == x[:, :1]).int().argmax(1)
        return cross_entropy(a @ b.t() * net["t"](torch.ones(1, dtype=a.dtype)).exp(), which)


class Centred(nn.Module):
    """A layer that subtracts the running mean of its input."""

    mean: Tensor

    def __init__(self, loop: Loop, *, whole: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self._loop, self._whole = loop, whole

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean, trainer = x.mean(0), self._loop.trainer
            self.mean.lerp_(trainer.mean(mean) if trainer is not None and self._whole else mean, 0.1)
        return x - self.mean


class RunningMean(Loop):
    strategies = ("Data",)
    whole = True

    def model(self) -> nn.Module:
        return nn.Sequential(Centred(self, whole=self.whole), nn.Linear(8, 4))


class LocalRunningMean(RunningMean):
    whole = False


LOOPS = (
    SparseEmbedding, Unfreezing, AnotherGroup, Derived, CustomGradients, Contrastive, LocalContrastive, RunningMean,
)  # fmt: skip


def train_in_one_process(loop: Loop, data: tuple[Tensor, ...], batch: int) -> nn.Module:
    torch.manual_seed(0)
    net = loop.model().double()
    opt, sampler = loop.optimizer(net), Sampler(SAMPLES, batch, 0)
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        x, y = (part[chosen] for part in data)
        loop.body(net, opt, x, y, step)
    return net


def train_on_all_ranks(
    group: ProcessGroup, loop: Loop, data: tuple[Tensor, ...], shares: list[int], **plan: Any
) -> nn.Module:
    torch.manual_seed(0)
    made = make_plan(global_batch=sum(shares), steps=STEPS, shares=shares, bucket_nbytes=4096, **plan)
    trainer = loop.trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    net = loop.model().double()
    net, opt = trainer.wrap(net, loop.optimizer(net))
    for x, y in trainer.steps(trainer.loader(data)):
        loop.body(net, opt, x, y, trainer.step)
    state = trainer.parallel.optimizer_state(opt)
    assert len(state["param_groups"]) == len(opt.param_groups), "a checkpoint contains all parameter groups"
    trainer.close()
    return net


class NewHead(Loop):
    def body(self, net: Any, opt: Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        net[2] = nn.Linear(96, 4).double()
        opt.add_param_group({"params": list(net[2].parameters())})
        super().body(net, opt, x, y, step)


class Complex(Loop):
    def model(self) -> nn.Module:
        return nn.ParameterList([torch.ones(2, dtype=torch.complex64), torch.ones(2)])


class Lazy(Loop):
    def model(self) -> nn.Module:
        return nn.LazyLinear(4)


class Titled(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"title": "a dictionary"}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("must not be called")


class ExtraState(Loop):
    def model(self) -> nn.Module:
        return Titled(8, 4)


class SparseAdam(Loop):
    def optimizer(self, net: Any) -> Optimizer:
        return torch.optim.SparseAdam(net.parameters())


class Graph(Loop):
    def body(self, net: Any, opt: Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises against it
            self.loss(net, x, y).backward(create_graph=True)


class Accumulating(Loop):
    def body(self, net: Any, opt: Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        self.loss(net, x, y).backward()


REJECTED: dict[type[Loop], str] = {
    NewHead: r"optimizer: found parameters of shapes \[\(4, 96\), \(4,\)\] that the model did not have in t\.wrap",
    Complex: r"t\.wrap: model: found complex parameters 0; expected real ones",
    Lazy: r"t\.wrap: model: found uninitialized parameters weight, bias of lazy layers",
    ExtraState: r"t\.wrap: model: found extra state in _extra_state that is not a tensor; expected tensors",
    SparseAdam: r"t\.wrap: optimizer: found SparseAdam; expected an optimizer for dense gradients",
    Graph: r"backward: found create_graph=True; expected .*\. For a gradient penalty call torch\.autograd\.grad",
    Accumulating: r"found no opt\.step\(\) .*in the loop's body; .* micro-batches and use t\.no_sync\(\)",
}


def held_out(group: ProcessGroup, shares: list[int]) -> None:
    """Check that held-out samples are visited once, and the length and misuse of a loader."""
    made = make_plan(global_batch=sum(shares), epochs=3, shares=shares)
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    for samples in (1, 50):
        seen = torch.zeros(samples)
        for (which,) in trainer.held_out(trainer.loader((torch.arange(samples),))):
            assert len(which) <= shares[group.rank]
            seen[which] += 1
        assert trainer.sum(seen.tolist()) == [1.0] * samples
    everything = trainer.gather(torch.full((group.rank, 2), group.rank))
    assert everything.tolist() == [[r, r] for r in range(group.size) for _ in range(r)], "rank 0 has no rows"
    loader = trainer.loader((torch.ones(SAMPLES),))
    assert (len(loader), loader.total_steps) == (-(-SAMPLES // sum(shares)), 3 * len(loader))
    with pytest.raises(ValueError, match=r"found a loop over the loader itself; expected one over t\.steps\(loader\)"):
        list(loader)
    with pytest.raises(ValueError, match=r"t\.sum: found a single float; expected a list"):
        trainer.sum(3.0)  # type: ignore[arg-type]
    trainer.close()


def main() -> None:
    group = start_process_group()
    data = four_classes(SAMPLES, torch.float64)
    shares = [3 + 5 * rank for rank in range(group.size)]
    collective = sys.argv[2] if len(sys.argv) > 2 else "Ring"
    for kind in LOOPS:
        expected = flat(train_in_one_process(kind(), data, sum(shares)))
        for strategy in kind.strategies if collective == "Ring" else ("Data",):
            net = train_on_all_ranks(group, kind(), data, shares, parallelism=strategy, collective=collective)
            off = distance(flat(net), expected)
            print_on_rank_0(group, f"{kind.__name__} {strategy}: off by {off:.1e}")
            assert off < 1e-9, (kind.__name__, strategy, off)
            equal_on_all(group, net)
    for kind, message in REJECTED.items():
        for strategy in kind.strategies if collective == "Ring" else ("Data",):
            with pytest.raises(ValueError, match=message):
                train_on_all_ranks(group, kind(), data, shares, parallelism=strategy, collective=collective)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_on_all_ranks(group, LocalRunningMean(), data, shares, collective=collective)
    assert any("found buffers that differ between ranks (0.mean)" in str(w.message) for w in caught) == (
        group.rank == 0
    ), caught
    held_out(group, shares)
    group.close()


main()
