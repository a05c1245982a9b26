"""Check on every rank that strategy Sharded trains, saves and resumes like one process, and rejects what it cannot do.

Arguments: ranks, a folder for checkpoints, and names of checks.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from dlcontract import CheckpointRef, ModelRef
from dltrain.batch.sampling import Sampler
from dltrain.checkpoint.store import MANIFEST, MODEL, Checkpoints
from dltrain.comm.process_group import ProcessGroup
from dltrain.parallel.pytorch.fsdp import FullyShardedParallel
from dltrain.protocol.errors import MisuseError
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import (
    BOUND,
    MakeOptimizer,
    distance,
    flat,
    four_classes,
    print_on_rank_0,
    sgd,
    start_process_group,
    whole,
)
from support.trainer.plans import make_plan

STEPS, SAMPLES, IGNORED = 12, 77, -100
Body = Callable[["Net", Tensor, Tensor, Trainer | None], None]


class Net(nn.Module):
    """A network with layers in a list, tied weights, odd sizes, a buffer, and a layer that only some samples use."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 31), nn.LayerNorm(31)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(31, 31), nn.Tanh(), nn.Linear(31, 31)) for _ in range(3))
        self.rare, self.narrow = nn.Linear(31, 31), nn.Linear(31, 8)
        self.tied, self.again = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.again.weight = self.tied.weight
        self.last, self.scale = nn.Linear(8, 4), nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))
        self.to(dtype)

    def forward(self, x: Tensor, *, rare: bool = False) -> Tensor:
        if self.training:
            self.seen += 1
        h = self.norm(self.first(x))
        for layer in self.layers:
            h = h + layer(h)
        if rare and bool((x[:, 0] > 0.8).any()):  # on some ranks only
            h = h + self.rare(h) * (x[:, :1] > 0.8)
        out: Tensor = self.last(self.again(self.tied(self.narrow(h)).tanh())) * self.scale
        return out


def backward(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    loss = cross_entropy(net(x), y)
    if trainer is not None:
        trainer.log(loss=loss)
    loss.backward()


def clipped(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    cross_entropy(net(x, rare=True), y).backward()
    if trainer is None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    else:
        trainer.clip_gradients(0.1)


def clipped_by_torch(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    cross_entropy(net(x), y).backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert (norm.full_tensor() if isinstance(norm, DTensor) else norm) > 0.1, "clipping has an effect"


def tokens(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    y = y.where(x[:, 1] > 0, IGNORED)
    if trainer is not None:
        trainer.weigh(int((y != IGNORED).sum()))
    cross_entropy(net(x), y, ignore_index=IGNORED).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def own_micro_batches(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    """Two micro-batches on each rank, because each forward pass needs all ranks."""
    if trainer is None:
        cross_entropy(net(x), y).backward()
        return
    half = len(y) // 2
    with trainer.no_sync():
        (cross_entropy(net(x[:half]), y[:half]) * (half / len(y))).backward()
    (cross_entropy(net(x[half:]), y[half:]) * (1 - half / len(y))).backward()


def unused(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    """Use a layer in every third step only. Weight decay must not change it in the others."""
    cross_entropy(net(x, rare=net.seen % 3 == 2), y).backward()


def freezes(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    """Freeze layers, one of which was frozen in ``t.wrap``, and make them trainable again."""
    step = int(net.seen)
    net.first.requires_grad_(step < 4 or step > 8)
    net.layers[1].requires_grad_(step > 6)
    cross_entropy(net(x), y).backward()


def evaluates(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
    """Use the model without gradients before, between and after the passes."""

    def look() -> None:
        net.eval()
        with torch.no_grad():
            net(x)
        net.train()

    look()
    loss = cross_entropy(net(x), y)
    look()
    loss.backward()
    look()


BODIES: tuple[Body, ...] = (
    backward, clipped, clipped_by_torch, tokens, own_micro_batches, unused, freezes, evaluates,
)  # fmt: skip
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": sgd,
    "AdamW": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 2e-3},
        ],
        lr=1e-3,
        amsgrad=True,
    ),
}


def trained_alone(body: Body, data: tuple[Tensor, ...], batch: int, optimizer: MakeOptimizer, net: Net) -> Net:
    opt, sampler = optimizer(net), Sampler(SAMPLES, batch, 0)
    for step in range(STEPS):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        opt.zero_grad()
        body(net, data[0][chosen], data[1][chosen], None)
        opt.step()
    return net


def trained(
    group: ProcessGroup,
    body: Body,
    data: tuple[Tensor, ...],
    shares: list[int],
    optimizer: MakeOptimizer,
    made_net: Net | Callable[[Trainer], Net],
    *,
    steps: int = STEPS,
    **fields: Any,
) -> Trainer:
    plan: dict[str, Any] = {"parallelism": "Sharded", "collective": "Torch", "bucket_nbytes": 4096} | fields
    plan = {"model": ModelRef(command=("python", "train.py"))} | plan
    made = make_plan(global_batch=sum(shares), shares=shares, steps=steps, min_ranks=len(shares), **plan)
    trainer = Trainer(made, group, RankReporter(None), torch.device("cpu"), "cpu")
    net = made_net if isinstance(made_net, nn.Module) else made_net(trainer)
    net, opt = trainer.wrap(net, optimizer(net))
    for x, y in trainer.steps(trainer.loader(data), accumulate=True):
        opt.zero_grad()
        body(net, x, y, trainer)
        opt.step()
    return trainer


def check_loops(group: ProcessGroup, folder: Path) -> None:
    data, shares = four_classes(SAMPLES, torch.float64), [3 + 4 * rank for rank in range(group.size)]

    def frozen(body: Body) -> Net:
        net = Net()
        net.layers[1].requires_grad_(body is not freezes)
        return net

    for body in BODIES:
        for name, optimizer in OPTIMIZERS.items() if body is backward else [("AdamW", OPTIMIZERS["AdamW"])]:
            expected = flat(trained_alone(body, data, sum(shares), optimizer, frozen(body)))
            trainer = trained(group, body, data, shares, optimizer, frozen(body))
            off = distance(whole(trainer.model), expected)
            print_on_rank_0(group, f"{body.__name__} {name}: off by {off:.1e}")
            assert off < 1e-9, (body.__name__, off)
            trainer.close()


def check_batch_norm(group: ProcessGroup, folder: Path) -> None:
    """Statistics cover the global batch, as the script or torch's own function asks."""
    data, shares = four_classes(SAMPLES, torch.float64), [3 + 4 * rank for rank in range(group.size)]

    def normalized() -> Net:
        net = Net()
        net.norm = nn.BatchNorm1d(31, dtype=torch.float64)  # type: ignore[assignment]
        return net

    alone = trained_alone(backward, data, sum(shares), sgd, normalized())
    for how in ("t.wrap", "torch"):
        net, model = normalized(), ModelRef(command=("python", "train.py"), sync_batch_norm=how == "t.wrap")
        if how == "torch":
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        trainer = trained(group, backward, data, shares, sgd, net, model=model)
        off = distance(whole(trainer.model), flat(alone))
        print_on_rank_0(group, f"batch norm by {how}: off by {off:.1e}")
        assert off < 1e-9, off
        for (name, found), expected in zip(trainer.model.named_buffers(), alone.buffers(), strict=True):
            assert name == "seen" or distance(found, expected) < 1e-9, name
        trainer.close()


def check_micro_batches(group: ProcessGroup, folder: Path) -> None:
    """Steps in three micro-batches, of which some have no sample of their own in the small last batch of an epoch."""
    data, shares = four_classes(SAMPLES, torch.float64), [4 + 3 * rank for rank in range(group.size)]
    for body in (backward, clipped, tokens):
        expected = flat(trained_alone(body, data, sum(shares), sgd, Net()))
        trainer = trained(group, body, data, shares, sgd, Net(), micro_batches=3)
        off = distance(whole(trainer.model), expected)
        print_on_rank_0(group, f"{body.__name__} in micro-batches: off by {off:.1e}")
        assert off < 1e-9, (body.__name__, off)
        trainer.close()


def check_checkpoints(group: ProcessGroup, folder: Path) -> None:
    """Checkpoints have the tensors of whole models. A resume is bitwise equal, and possible from and to strategy Data."""
    for dtype, name in zip(BOUND, OPTIMIZERS, strict=True):
        check_checkpoints_of(group, folder, name, dtype)


def check_checkpoints_of(group: ProcessGroup, folder: Path, name: str, dtype: torch.dtype) -> None:
    shares = [3 + 4 * rank for rank in range(group.size)]
    data, optimizer, bound = four_classes(SAMPLES, dtype), OPTIMIZERS[name], BOUND[dtype] * 1e3

    def run(place: str, steps: int, strategy: str = "Sharded") -> Tensor:
        checkpoint = CheckpointRef(directory=str(folder / name / place), interval_s=1e6)
        fields = {"parallelism": strategy, "collective": "Torch" if strategy == "Sharded" else "Ring"}
        trainer = trained(
            group, backward, data, shares, optimizer, Net(dtype), steps=steps, checkpoint=checkpoint, **fields
        )
        if isinstance(trainer.parallel, FullyShardedParallel):
            states: list[Any] = [v for s in trainer.optimizer.state.values() for v in s.values() if v.dim()]
            owned = sum(p.to_local().numel() for p in trainer.parallel.parameters)
            used = sum(p.to_local().numel() for p in trainer.optimizer.state)  # type: ignore[attr-defined]
            held = sum(value.to_local().numel() for value in states)
            assert owned < 1.25 * flat(Net()).numel() / group.size, "this rank stores its part"
            assert held == used * (1 if name == "momentum" else 3), "and its part of the optimizer state"
        found = whole(trainer.model) if strategy == "Sharded" else flat(trainer.model)
        trainer.close()
        return found

    sharded, replicated = run("sharded", STEPS), run("replicated", STEPS, "Data")
    assert distance(sharded, replicated) < bound, distance(sharded, replicated)
    if group.rank == 0:
        ours, theirs = saved(folder / name / "sharded"), saved(folder / name / "replicated")
        assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {k: (v.shape, v.dtype) for k, v in theirs.items()}
        assert all(distance(ours[key], theirs[key]) < 1e3 * bound for key in ours if theirs[key].any())
    run("halves", STEPS // 2)
    assert torch.equal(run("halves", STEPS), sharded), "the resumed run differs"
    run("from", STEPS // 2, "Data")
    assert distance(run("from", STEPS), replicated) < bound, "resumes from strategy Data"
    run("to", STEPS // 2)
    assert distance(run("to", STEPS, "Data"), replicated) < bound, "strategy Data resumes"
    print_on_rank_0(group, f"{name}: checkpoints are those of strategy Data")


def saved(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a run's last checkpoint, which also has the whole model in one file."""
    job = folder / "digits-0001"
    path = job / f"step-{STEPS:010d}"
    stored = Checkpoints(job, json.loads((path / MANIFEST).read_text())["identity"], keep=3).load()
    assert stored is not None and stored.step == STEPS
    snapshot, model = stored.snapshot(), load_file(path / MODEL)
    assert model.keys() == snapshot.model.keys() and all(torch.equal(model[k], snapshot.model[k]) for k in model)
    return snapshot.model | snapshot.optimizer


def check_other_ranks(group: ProcessGroup, folder: Path) -> None:
    """Train half of the steps if the folder has no checkpoint. Otherwise resume from it, on another number of ranks."""
    data, shares = four_classes(SAMPLES, torch.float64), {2: [5, 7], 3: [2, 4, 6]}[group.size]
    resumes = (folder / "digits-0001").exists()
    checkpoint = CheckpointRef(directory=str(folder), interval_s=1e6)
    steps = STEPS if resumes else STEPS // 2
    optimizer = OPTIMIZERS["AdamW"]
    trainer = trained(group, backward, data, shares, optimizer, Net(), steps=steps, checkpoint=checkpoint)
    if resumes:
        off = distance(whole(trainer.model), flat(trained_alone(backward, data, 12, optimizer, Net())))
        print_on_rank_0(group, f"resumed on {group.size} ranks: off by {off:.1e}")
        assert off < 1e-9, off
    trainer.close()


def check_held_out(group: ProcessGroup, folder: Path) -> None:
    """Every held-out sample is on one rank, and all ranks make equally many forward passes."""
    data, shares = four_classes(SAMPLES, torch.float64), [1 + 4 * rank for rank in range(group.size)]
    trainer = trained(group, backward, data, shares, sgd, Net(), steps=2)
    trainer.model.eval()
    for samples in (group.size, 2 * group.size + 1, SAMPLES):
        passes, seen = 0, []
        with torch.no_grad():
            for x, _ in trainer.held_out(trainer.loader(tuple(part[:samples] for part in data))):
                trainer.model(x)
                passes += 1
                seen += x[:, 0].tolist()
        counts = group.gather([passes, len(seen)])
        assert len({count for count, _ in counts}) == 1 and sum(n for _, n in counts) == samples, counts
        total = trainer.sum([sum(seen)])[0]
        assert abs(total - float(data[0][:samples, 0].sum())) < 1e-9
    with pytest.raises(
        MisuseError, match=rf"t\.held_out: found 1 samples for {group.size} ranks; expected at least one"
    ):
        list(trainer.held_out(trainer.loader(tuple(part[:1] for part in data))))
    trainer.close()
    print_on_rank_0(group, "all ranks evaluate equally often")


class Other(nn.Module):
    """A network with one more parameter."""

    def __init__(self, extra: Tensor) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(8, 4), nn.Parameter(extra)


def check_misuse(group: ProcessGroup, folder: Path) -> None:
    data, shares = four_classes(SAMPLES), [4] * group.size
    cases = {
        r"model: found parameters of shape \(\) \(extra\) with parallelism.strategy Sharded": torch.ones(()),
        r"model: found parameters of torch.float32, torch.float64 in Other with": torch.ones(3, dtype=torch.float64),
    }
    for message, extra in cases.items():
        with pytest.raises(MisuseError, match=message):
            trained(group, backward, data, shares, sgd, Other(extra))  # type: ignore[arg-type]

    def twice(net: Net, x: Tensor, y: Tensor, trainer: Trainer | None) -> None:
        backward(net, x, y, trainer)
        backward(net, x, y, trainer)

    with pytest.raises(MisuseError, match=r"backward: found a second backward pass in one step"):
        trained(group, twice, data, shares, sgd, Net(torch.float32))
    torch.distributed.destroy_process_group()
    print_on_rank_0(group, "misuse is rejected")


CHECKS = {
    "loops": check_loops,
    "batch_norm": check_batch_norm,
    "micro_batches": check_micro_batches,
    "checkpoints": check_checkpoints,
    "other_ranks": check_other_ranks,
    "held_out": check_held_out,
    "misuse": check_misuse,
}


def main() -> None:
    group, folder = start_process_group(), Path(sys.argv[2])
    for name in sys.argv[3:]:
        CHECKS[name](group, folder)
    group.close()


if __name__ == "__main__":
    main()
