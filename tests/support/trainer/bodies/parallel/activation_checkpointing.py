"""Check on every rank that training with activation checkpointing learns the same as without, bit for bit."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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
    strategy_fields,
    whole,
)
from support.trainer.plans import make_plan

STEPS, SAMPLES = 5, 124


class Block(nn.Module):
    """A residual block with dropout, whose random numbers must be those of the first forward pass."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = norm, nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.up(self.norm(x)).relu()))


class Net(nn.Module):
    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.Sequential(*(Block(nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def made(
    group: ProcessGroup, shares: list[int], recomputes: bool, *, strategy: str = "Data", **fields: object
) -> Trainer:
    plan = make_plan(
        global_batch=sum(shares), steps=STEPS, shares=shares, bucket_nbytes=4096, activation_checkpointing=recomputes,
        **strategy_fields(strategy, len(shares)), **fields,
    )  # fmt: skip
    return Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")


def kept_nbytes(net: Net, x: Tensor) -> int:
    """Return the bytes that autograd keeps after a forward pass, without parameters."""
    kept, weights = {}, {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}

    def record(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in weights:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        net(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def trained(
    group: ProcessGroup, shares: list[int], recomputes: bool, *, batch_norm: bool = False, sync: bool = False,
    strategy: str = "Data", **fields: object,
) -> tuple[Net, Tensor, list[float]]:  # fmt: skip
    """Return the trained net, its parameters and the losses of this rank."""
    torch.manual_seed(0)
    trainer, net = made(group, shares, recomputes, strategy=strategy, **fields), Net(batch_norm)
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    trainer.checkpoint_activations(net.blocks)
    twin = copy.deepcopy(net)
    net, opt = trainer.wrap(net, opt, sync_batch_norm=sync)
    scaler, losses = trainer.grad_scaler(init_scale=2.0**8), list[float]()
    for x, y in trainer.steps(trainer.loader(four_classes(SAMPLES)), accumulate=True):
        opt.zero_grad()
        with trainer.autocast():
            loss = cross_entropy(net(x), y)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    assert twin.blocks[0].forward.__self__ is twin.blocks[0], "a copy computes with its own parameters"
    if strategy == "Sharded":
        parameters = whole(net)
    else:
        assert not recomputes or batch_norm or kept_nbytes(net, x) < 0.7 * kept_nbytes(Net(False), x)
        equal_on_all(group, net)
        parameters = flat(net)
    trainer.close()
    return net, parameters, losses


def misuse(group: ProcessGroup, shares: list[int]) -> None:
    """Check that a loop without the blocks that the plan counts on ends with an error that names the remedy."""
    data = four_classes(SAMPLES)

    def run(blocks: object, words: str) -> None:
        trainer, net = made(group, shares, True), Net(False)
        net, opt = trainer.wrap(net, torch.optim.SGD(net.parameters(), 0.1))
        with pytest.raises(MisuseError, match=words):
            if blocks is not None:
                trainer.checkpoint_activations(blocks)
            for x, y in trainer.steps(trainer.loader(data)):
                cross_entropy(net(x), y).backward()
                opt.step()
        trainer.close()

    other = Net(False)
    run(
        None,
        r"found no call of t\.checkpoint_activations with a plan .* expected t\.checkpoint_activations\(model\.blocks\)",
    )
    run(other.blocks, "found modules that the first step did not call")
    run(other.last, "found a single Linear")
    run([], "found an empty list")
    run([other.last, None], "found NoneType in the list")
    run([other.blocks, other.blocks[0]], "with another of the blocks inside")
    run(3, "found int; expected a list")


def main() -> None:
    group = start_process_group()
    shares = {1: [24], 2: [7, 17], 3: [4, 7, 13]}[group.size]
    cases = {
        "float32": {},
        "micro-batches": {"micro_batches": 3},
        "bfloat16": {"precision": "BF16"},
        "float16 with micro-batches": {"precision": "FP16", "micro_batches": 2},
        "batch norm": {"batch_norm": True},
        "synchronized batch norm": {"batch_norm": True, "sync": True},
    }
    if group.size > 1:
        cases["sharded optimizer"] = {"strategy": "Optimizer", "micro_batches": 2}
        cases["sharded parameters"] = {"strategy": "Sharded", "micro_batches": 2}
        cases["sharded parameters in bfloat16"] = {"strategy": "Sharded", "precision": "BF16"}
        cases["sharded parameters in bfloat16, batch norm"] = {
            "strategy": "Sharded",
            "precision": "BF16",
            "batch_norm": True,
        }
    for name, fields in cases.items():
        plain, again = (trained(group, shares, recomputes, **fields) for recomputes in (False, True))
        assert plain[2] == again[2], f"{name}: {plain[2]} {again[2]}"
        assert distance(plain[1], again[1]) == 0, name
        for one, other in zip(plain[0].buffers(), again[0].buffers(), strict=True):
            assert torch.equal(one, other), f"{name}: statistics"
        print_on_rank_0(group, f"{name}: the same with and without activation checkpointing")
    misuse(group, shares)
    print_on_rank_0(group, "misuse is found")
    group.close()


main()
