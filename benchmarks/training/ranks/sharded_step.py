"""Time strategy Sharded, ``fully_shard`` and DDP on every rank of ``sharded_step.py``. Rank 0 prints the times."""

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as distributed
from benchmarks.training.ranks.train_step import Step, batches, model, ours, plain, samples_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dltrain import init
from dltrain.models import InputShape
from dltrain.models.sharding_units import UNIT_NBYTES, units_of

OURS, FSDP, DDP = "dltrain, Sharded", "fully_shard", "DDP"
MODELS: dict[str, tuple[InputShape, int, int]] = {
    "gpt-mini": (InputShape((128,), 256, tokens=True), 4, 5),
    "resnet18": (InputShape((3, 32, 32), 10), 8, 2),
}
"""Shape of a sample, local batch size, steps of a turn."""


def main() -> None:
    """Measure one model. The argument is JSON with ``model`` and ``rounds``."""
    settings = json.loads(sys.argv[1])
    shape, samples, steps = MODELS[settings["model"]]
    torch.set_num_threads(1)
    batch = samples * int(os.environ["OMPI_COMM_WORLD_SIZE"])
    trainer = init(batch=batch, epochs=1, strategy="Sharded")
    comm = trainer.process_group.comm
    data = samples_of(shape, (1 + settings["rounds"]) * steps * batch)
    networks = {name: model(settings["model"], shape) for name in (OURS, FSDP, DDP)}
    sharded, rest = ours(trainer, networks[OURS], data)  # It makes the process group that the others use, too.
    candidates: dict[str, Step] = {
        OURS: sharded,
        FSDP: plain(plainly_sharded(networks[FSDP]), batches(data, samples)),
        DDP: plain(DistributedDataParallel(networks[DDP]), batches(data, samples)),
    }
    found: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(-1, settings["rounds"]):  # the first one warms up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            comm.Barrier()
            began = time.perf_counter()
            for _ in range(steps):
                candidates[name]()
            spent_s = max(comm.allgather((time.perf_counter() - began) / steps))
            if turn >= 0:
                found[name].append(spent_s)
    if trainer.rank == 0:
        stored = {name: stored_nbytes(network) for name, network in networks.items()}
        print(json.dumps({"seconds": found, "stored_nbytes": stored}), flush=True)
    assert next(rest, None) is None, "expected the end of the epoch"


def plainly_sharded(network: nn.Module) -> nn.Module:
    """Return the network with the same units as ours, as PyTorch's documentation shards it."""
    for unit in units_of(network, UNIT_NBYTES):
        fully_shard(unit)
    fully_shard(network)  # It changes the network itself.
    return network


def stored_nbytes(network: nn.Module) -> int:
    """Return the bytes of parameters that this rank stores between steps."""
    tensors: list[Any] = [getattr(p, "to_local", lambda p=p: p)() for p in network.parameters()]
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    main()
    distributed.destroy_process_group()
