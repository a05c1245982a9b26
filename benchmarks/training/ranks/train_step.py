"""Time dljob, DDP and training without communication on every rank of ``train_step.py``. Rank 0 prints the times."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlcontract import DDP_BUCKET_NBYTES
from dltrain import init
from dltrain.builtin.evaluation import mean_loss
from dltrain.models import InputShape, build
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer

OURS, HOOKED, DDP, ALONE = "dltrain", "dltrain with collective DDP", "DDP", "alone"
MODELS: dict[str, tuple[InputShape, int, int]] = {
    "resnet18": (InputShape((3, 32, 32), 10), 8, 2),
    "gpt-mini": (InputShape((128,), 256, tokens=True), 4, 5),
}
"""Shape of a sample, local batch size, steps of a turn."""
Step = Callable[[], float]
"""A training step, which returns the seconds that it waited for communication."""


def main() -> None:
    """Measure one model. The argument is JSON with ``model``, ``rounds`` and ``host`` (rank 0's address)."""
    settings = json.loads(sys.argv[1])
    shape, samples, steps = MODELS[settings["model"]]
    torch.set_num_threads(1)
    batch = samples * int(os.environ["OMPI_COMM_WORLD_SIZE"])
    trainer = init(batch=batch, epochs=1)
    comm = trainer.process_group.comm
    data = samples_of(shape, (1 + settings["rounds"]) * steps * batch)  # an epoch
    step, rest = ours(trainer, model(settings["model"], shape), data)
    plain_ddp = ddp(trainer, model(settings["model"], shape), data, samples, settings["host"])
    hooked, hooked_rest = ours(with_ddp(trainer), model(settings["model"], shape), data)
    candidates: dict[str, Step] = {
        OURS: step,
        HOOKED: hooked,
        DDP: plain_ddp,
        ALONE: plain(model(settings["model"], shape), batches(data, samples)),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(-1, settings["rounds"]):  # the first one warms up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            comm.Barrier()
            began = time.perf_counter()
            waited_s = sum(candidates[name]() for _ in range(steps))
            spent_s = time.perf_counter() - began
            everyone = comm.allgather((spent_s / steps, waited_s / steps))
            if turn >= 0:  # the slowest rank's step; the shortest wait contains no waiting for other ranks
                found[name].append((max(spent for spent, _ in everyone), min(waited for _, waited in everyone)))
    if trainer.rank == 0:
        print(
            json.dumps({"seconds": found, "parameters": trainer.parallel.gradient_nbytes // 4}),
            flush=True,
        )
    assert next(rest, None) is next(hooked_rest, None) is None, "expected the end of the epoch"
    distributed.destroy_process_group()


def model(name: str, shape: InputShape) -> nn.Module:
    torch.manual_seed(0)
    return build(name, shape)


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all variants use."""
    return torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)


def samples_of(shape: InputShape, count: int) -> tuple[Tensor, Tensor]:
    """Return random samples and labels. The benchmark does not depend on their content."""
    generator = torch.Generator().manual_seed(1)
    if shape.tokens:
        tokens = torch.randint(shape.classes, (2, count, *shape.shape), generator=generator)
        return tokens[0], tokens[1]
    x = torch.rand(count, *shape.shape, generator=generator)
    return x, torch.randint(shape.classes, (count,), generator=generator)


def batches(data: tuple[Tensor, Tensor], samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield slices of ``data`` forever, which costs next to nothing."""
    while True:
        yield from zip(torch.split(data[0], samples), torch.split(data[1], samples), strict=True)


def ours(trainer: Trainer, net: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[Step, Iterator[Any]]:
    """Return a training step as in a user's script, and the iterator over the remaining batches."""
    wrapped, opt = trainer.wrap(net, optimizer(net))
    steps: Iterator[Any] = trainer.steps(trainer.loader(data))

    def step() -> float:
        x, y = next(steps)
        loss = mean_loss(wrapped(x), y)
        trainer.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()
        return trainer.parallel.exposed_s

    return step, steps


def with_ddp(trainer: Trainer) -> Trainer:
    """Return another trainer on the same ranks, which uses the collective DDP and reports nothing."""
    changes = {"collective": "DDP", "measure_collective": False, "bucket_nbytes": DDP_BUCKET_NBYTES}
    quiet = RankReporter(None)
    quiet.rank = -1
    plan = trainer.plan.model_copy(update=changes)
    return Trainer(plan, trainer.process_group, quiet, trainer.device, trainer.device_name)


def ddp(trainer: Trainer, net: nn.Module, data: tuple[Tensor, Tensor], samples: int, host: str) -> Step:
    store_at = partial(distributed.TCPStore, host)  # type: ignore[attr-defined]
    store = store_at(0, is_master=True, wait_for_workers=False) if trainer.rank == 0 else None
    port = trainer.process_group.comm.bcast(store.port if store is not None else None)
    store = store or store_at(port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=trainer.rank, world_size=trainer.size)
    return plain(DistributedDataParallel(net), batches(data, samples))


def plain(net: nn.Module, source: Iterator[tuple[Tensor, Tensor]]) -> Step:
    opt = optimizer(net)

    def step() -> float:
        x, y = next(source)
        opt.zero_grad()
        mean_loss(net(x), y).backward()  # type: ignore[no-untyped-call]
        opt.step()
        return 0.0

    return step


if __name__ == "__main__":
    main()
