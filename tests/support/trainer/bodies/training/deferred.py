"""Check on two ranks that strategy Sharded trains models of ``t.create`` like those in memory, with less memory.

Arguments: 2, and a folder for checkpoints.
"""

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dlcontract import CheckpointRef, ModelRef
from dltrain.checkpoint.state import replicate
from dltrain.comm.process_group import ProcessGroup
from dltrain.models.deferred import deferred
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    distance,
    flat,
    four_classes,
    print_on_rank_0,
    sgd,
    start_process_group,
    whole,
)
from support.trainer.bodies.parallel.fsdp import OPTIMIZERS, SAMPLES, STEPS, Net, backward, trained, trained_alone
from support.trainer.plans import make_plan

DEFERRED = ModelRef(command=("python", "train.py"), deferred=True)


def check_deferred(group: ProcessGroup, folder: Path) -> None:
    """Models of ``t.create`` with tied weights, buffers, BatchNorm, and an adapter on a frozen base."""
    data, shares = four_classes(SAMPLES, torch.float64), [3 + 4 * rank for rank in range(group.size)]

    def normalized() -> Net:
        net = Net()
        net.norm = nn.BatchNorm1d(31, dtype=torch.float64)  # type: ignore[assignment]
        net.layers[1].requires_grad_(False)
        return net

    optimizer, model = OPTIMIZERS["AdamW"], DEFERRED.model_copy(update={"sync_batch_norm": True})
    alone = trained_alone(backward, data, sum(shares), optimizer, normalized())
    checkpoint = CheckpointRef(directory=str(folder / "deferred"), interval_s=1e6)
    for steps in (STEPS // 2, STEPS):  # The second run resumes.
        trainer = trained(
            group, backward, data, shares, optimizer, lambda trainer: trainer.create(normalized), steps=steps,
            model=model, checkpoint=checkpoint,
        )  # fmt: skip
        off = distance(whole(trainer.model), flat(alone))
        assert not any(tensor.is_meta for tensor in trainer.model.state_dict().values())
        assert trainer.model.again.weight is trainer.model.tied.weight
        for (name, found), expected in zip(trainer.model.named_buffers(), alone.buffers(), strict=True):
            assert steps < STEPS or name == "seen" or distance(found, expected) < 1e-9, name
        trainer.close()
    print_on_rank_0(group, f"deferred: off by {off:.1e}")
    assert off < 1e-9, off
    with pytest.raises(MisuseError, match=r"found a model with parameters in memory with parallelism\.deferredInit"):
        trained(group, backward, data, shares, optimizer, Net(), model=model)


class Attached(nn.Module):
    """A model with all kinds of tensors: buffers of two modules, attributes, a norm that computes a weight of others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        mask = torch.tril(torch.ones(8, 8))
        for block in self.blocks:
            block.register_buffer("mask", mask, persistent=False)
        self.blocks.append(nn.utils.weight_norm(nn.Linear(8, 8)))
        self.turns, self.drawn = torch.polar(torch.ones(8), torch.arange(8.0)), torch.rand(8)
        self.empty, self.count = nn.Parameter(torch.empty(0, 3)), 0
        self.register_buffer("steps", torch.arange(3))
        self.register_parameter("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.blocks[1](self.blocks[0](x) @ self.blocks[0].mask) @ self.blocks[1].mask  # type: ignore[operator]
        h = h if self.shift is None else h + self.shift
        return self.blocks[2](h).mul(self.drawn).mul(self.turns).abs()  # type: ignore[no-any-return]


def check_tensors(group: ProcessGroup) -> None:
    """Fixed bugs: buffers of several modules and attributes stayed without memory, and names of torch.compile failed."""
    plan = {"parallelism": "Sharded", "collective": "Torch", "min_ranks": group.size, "bucket_nbytes": 4096}
    trainer = Trainer(
        make_plan(group.size, model=DEFERRED, **plan), group, RankReporter(None), torch.device("cpu"), "cpu"
    )
    torch.manual_seed(group.rank)
    net = trainer.create(Attached)
    net.blocks[1] = torch.compile(net.blocks[1], backend="eager")
    net.shift = shift = nn.Parameter(torch.full((8,), 1.0 + group.rank))  # in memory, so its own values count
    opt = sgd(net)
    with pytest.raises(MisuseError, match=r"found a list with spec\.parallelism\.strategy Sharded; expected a model"):
        trainer.wrap([net], opt)
    wrapped, _ = trainer.wrap(torch.compile(net, backend="eager"), opt)
    torch.manual_seed(0)
    expected, x = Attached(), torch.randn(4, 8)
    expected.shift = nn.Parameter(torch.ones(8))
    assert not shift.numel(), "the optimizer and the script keep no whole parameters"
    with torch.compiler.set_stance("force_eager"):
        assert distance(wrapped(x).detach(), expected(x).detach()) < 1e-6
    assert net.blocks[0].mask is net.blocks[1].mask
    trainer.close()


def check_late_changes(group: ProcessGroup) -> None:
    trainer = Trainer(
        make_plan(group.size, parallelism="Sharded", collective="Torch", min_ranks=group.size, model=DEFERRED),
        group, RankReporter(None), torch.device("cpu"), "cpu",
    )  # fmt: skip
    net = trainer.create(lambda: nn.Linear(2, 2))
    net.load_state_dict(nn.Linear(2, 2).state_dict())
    with pytest.raises(MisuseError, match="found weight changed after"):
        trainer.wrap(net, sgd(net))
    net = nn.Sequential(trainer.create(lambda: nn.Linear(2, 2)))
    with pytest.raises(MisuseError, match=r"found another module around the model of t\.create"):
        trainer.wrap(net, sgd(net))
    differs = deferred(lambda: nn.Linear(2, 2 + group.rank))
    with pytest.raises(RuntimeError, match=r"found weight \(3, 2\)") if group.rank else nullcontext():
        replicate(differs, group)
    trainer.close()


def check_deferred_memory(group: ProcessGroup) -> None:
    """No rank ever has the whole model: 24 layers of 4 MiB."""
    layers, plan = 24, {"parallelism": "Sharded", "collective": "Torch", "min_ranks": group.size, "model": DEFERRED}
    trainer = Trainer(make_plan(group.size, **plan), group, RankReporter(None), torch.device("cpu"), "cpu")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = peak_nbytes()
    net = trainer.create(lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers))))
    net, _ = trainer.wrap(net, sgd(net))
    grown = peak_nbytes() - before
    print_on_rank_0(group, f"a rank needed {grown / 2**20:.0f} MiB for a model of {4 * layers} MiB")
    assert grown < 4 * 2**20 * (layers / group.size + 6), grown
    trainer.close()


def peak_nbytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    warnings.simplefilter("ignore")  # of torch: values for the meta device, and weight_norm
    group, folder = start_process_group(), Path(sys.argv[2])
    check_tensors(group)
    check_late_changes(group)
    check_deferred(group, folder)
    check_deferred_memory(group)
    group.close()


main()
