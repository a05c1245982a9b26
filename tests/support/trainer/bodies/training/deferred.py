"""Check on two ranks that strategy Sharded trains models of ``t.create`` like those in memory, with less memory.

Arguments: 2, and a folder for checkpoints.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dlcontract import CheckpointRef, ModelRef
from dltrain.comm.process_group import ProcessGroup
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
    group, folder = start_process_group(), Path(sys.argv[2])
    check_deferred(group, folder)
    check_deferred_memory(group)
    group.close()


main()
