"""Check on every rank what is particular to the collective DDP: its buckets, what a loop may do, and misuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dltrain.batch.sampling import Sampler
from dltrain.comm.process_group import ProcessGroup
from dltrain.parallel.pytorch.ddp import TorchDataParallel
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    distance,
    equal_on_all,
    flat,
    four_classes,
    print_on_rank_0,
    sgd,
    start_process_group,
)
from support.trainer.plans import make_plan

STEPS, SAMPLES = 6, 78
BUCKET_NBYTES = 8192
Body = Callable[["Net", Tensor, Tensor, Trainer | None], None]


class Net(nn.Module):
    """A network with a frozen layer, BatchNorm statistics, parameters of two dtypes, and a head that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.Linear(8, 32), nn.BatchNorm1d(32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.last = nn.Linear(32, 4)
        self.unused = nn.Linear(32, 32)
        self.double()
        self.scale = nn.Parameter(torch.ones(32))  # float32
        self.frozen.requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        h = self.norm(self.frozen(x))
        for layer in self.layers:
            h = layer(h).tanh()
        return h * self.scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.features(x))
        return out


def backward(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    cross_entropy(net(x), y).backward()


def other_functions(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    """Compute the loss without ``forward`` of the model, and evaluate between forward and backward pass."""
    loss = cross_entropy(net.last(net.features(x)), y)
    net.eval()
    with torch.no_grad():
        net(x)
    net.train()
    loss.backward()


def some_ranks(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    """Leave out the backward pass on rank 0, and on the others count only their samples."""
    if trainer is None:
        backward(net, x, y, None)
    elif trainer.rank:
        cross_entropy(net(x), y).backward()


def trained_alone(body: Body, data: tuple[Tensor, ...], batch: int, skip: int = 0) -> Net:
    """Train with plain PyTorch. ``skip``: number of samples at the start of each batch that do not count."""
    torch.manual_seed(0)
    net = Net()
    opt, sampler = sgd(net), Sampler(SAMPLES, batch, 0)
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)[skip:]
        opt.zero_grad()
        body(net, data[0][chosen], data[1][chosen], None)
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad *= (batch - skip) / batch
        opt.step()
    return net


def trainer_of(group: ProcessGroup, shares: list[int], **fields: Any) -> Trainer:
    plan = {"bucket_nbytes": BUCKET_NBYTES, "steps": STEPS, "collective": "DDP"} | fields
    made = make_plan(global_batch=sum(shares), shares=shares, **plan)
    return Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")


def trained(group: ProcessGroup, body: Body, data: tuple[Tensor, ...], shares: list[int], *, synchronize: bool) -> Net:
    torch.manual_seed(0)
    trainer = trainer_of(group, shares)
    net, opt = trainer.wrap(net := Net(), sgd(net), sync_batch_norm=synchronize)
    assert type(net) is Net and not any(name.startswith("module.") for name in net.state_dict())
    for x, y in trainer.steps(trainer.loader(data)):
        opt.zero_grad()
        body(net, x, y, trainer)
        opt.step()
        assert net.unused.weight.grad is None, "no rank has a gradient"
    trainer.close()
    return net


def check_buckets(group: ProcessGroup, data: tuple[Tensor, ...], shares: list[int]) -> None:
    """Check that all steps, the first one too, reduce the same buckets of limited size, and then the shared numbers."""
    trainer = trainer_of(group, shares)
    net, opt = trainer.wrap(net := Net(), sgd(net))
    parallel = trainer.parallel
    assert isinstance(parallel, TorchDataParallel)
    begun, sizes = parallel.reducer.collective.begun, list[int]()

    def recorded(operation: Any, *arguments: Any) -> Any:
        sizes.append(arguments[0].nbytes)
        return begun(operation, *arguments)

    parallel.reducer.collective.begun = recorded  # type: ignore[method-assign]
    for x, y in trainer.steps(trainer.loader(data)):
        backward(net, x, y, trainer)
        opt.step()
    each = len(sizes) // STEPS
    assert each > 4 and sizes == sizes[:each] * STEPS, sizes
    layer_nbytes = 8 * 32 * 33
    assert max(sizes) <= BUCKET_NBYTES + layer_nbytes and sizes[each - 1] == parallel.reducer.shared.nbytes, sizes
    assert sum(sizes[: each - 1]) == parallel.gradient_nbytes
    trainer.close()


def check_misuse(group: ProcessGroup, data: tuple[Tensor, ...], shares: list[int]) -> None:
    """Check that loops that DDP cannot reduce end with an error, and do not train wrongly."""

    def twice(net: Net, x: Tensor, y: Tensor, trainer: Trainer) -> None:
        backward(net, x, y, trainer)
        backward(net, x, y, trainer)

    def other_parameters_later(net: Net, x: Tensor, y: Tensor, trainer: Trainer) -> None:
        backward(net, x, y, trainer)
        net.unused(net.features(x).detach()).sum().backward()

    def thaws(net: Net, x: Tensor, y: Tensor, trainer: Trainer) -> None:
        net.frozen.requires_grad_(True)
        backward(net, x, y, trainer)

    cases = {
        twice: r"backward: found a second backward pass in one step",
        other_parameters_later: r"backward: found a second backward pass in one step",
        thaws: r"model: found trainable parameters \[\(32, 8\), \(32,\)\] that were frozen in t\.wrap",
    }
    for body, message in cases.items():
        trainer = trainer_of(group, shares)
        net, opt = trainer.wrap(net := Net(), sgd(net))
        with pytest.raises(MisuseError, match=message):
            for x, y in trainer.steps(trainer.loader(data)):
                body(net, x, y, trainer)
                opt.step()
        trainer.close()
    trainer = trainer_of(group, shares)
    with pytest.raises(MisuseError, match="model: found no trainable parameter; expected"):
        trainer.wrap(net := nn.Linear(8, 4).requires_grad_(False), sgd(net))


def main() -> None:
    group = start_process_group()
    data = four_classes(SAMPLES, torch.float64)
    shares = [4 + 5 * rank for rank in range(group.size)]
    batch = sum(shares)
    for body in (backward, other_functions):
        expected = flat(trained_alone(body, data, batch))
        net = trained(group, body, data, shares, synchronize=True)
        off = distance(flat(net), expected)
        print_on_rank_0(group, f"{body.__name__}: off by {off:.1e}")
        assert off < 1e-6, (body.__name__, off)  # float32
        equal_on_all(group, net)
    net = trained(group, some_ranks, data, shares, synchronize=False)
    equal_on_all(group, net)
    if group.size == 2:  # BatchNorm then normalizes the samples of rank 1 alone
        off = distance(flat(net), flat(trained_alone(some_ranks, data, batch, skip=shares[0])))
        assert off < 1e-6, off
    print_on_rank_0(group, "a rank without a backward pass takes part")
    check_buckets(group, data, shares)
    check_misuse(group, data, shares)
    print_on_rank_0(group, "buckets and misuse are as expected")
    group.close()


main()
