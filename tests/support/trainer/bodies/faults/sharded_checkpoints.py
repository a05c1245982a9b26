"""Check sharded checkpoints on every rank: faults while they are written, other numbers of ranks, and memory.

Arguments: ranks, a folder for checkpoints, and names of checks.
"""

import errno
import itertools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from dlcontract import CheckpointRef, ModelRef
from dlcontract.checkpoint.parts import part_name
from dltrain.checkpoint import tensor_file
from dltrain.checkpoint.sharded import checkpoints as sharded
from dltrain.checkpoint.sharded.checkpoints import ShardedCheckpoints
from dltrain.checkpoint.store import MANIFEST, MODEL, OPTIMIZER, Checkpoints
from dltrain.checkpoint.tensor_file import Written
from dltrain.checkpoint.writer import CheckpointManager
from dltrain.comm.process_group import ProcessGroup
from dltrain.parallel.pytorch import fsdp
from dltrain.parallel.pytorch.fsdp import FullyShardedParallel
from dltrain.protocol.errors import CheckpointError
from dltrain.protocol.reporter import RankReporter
from dltrain.train import trainer as training
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import four_classes, print_on_rank_0, start_process_group
from support.trainer.plans import make_plan

STEPS, SHARES = 12, {1: [12], 2: [5, 7], 3: [2, 4, 6]}
WIDE, LAYERS = 1536, 8
Write = Callable[[Path, Mapping[str, Tensor]], Written]


def network() -> nn.Module:
    """Return a network with tensors that have fewer rows than ranks, and a buffer."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 33), nn.Linear(33, 2), nn.Linear(2, 1), nn.Linear(1, 4)
    )
    net.register_buffer("seen", torch.zeros(3))
    return net.double()


def started(
    group: ProcessGroup, folder: Path, net: nn.Module, steps: int, interval_s: float = 1e6, uri: str | None = None
) -> Trainer:
    checkpoint = CheckpointRef(directory=str(folder), interval_s=interval_s, uri=uri)
    plan = make_plan(
        global_batch=12, shares=SHARES[group.size], steps=steps, model=ModelRef(command=("train",)), checkpoint=checkpoint,
        parallelism="Sharded", collective="Torch", bucket_nbytes=4096, min_ranks=group.size,
    )  # fmt: skip
    trainer = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
    trainer.wrap(net, torch.optim.AdamW(net.parameters(), 0.01, amsgrad=True))
    return trainer


def trained(
    group: ProcessGroup,
    folder: Path,
    steps: int,
    interval_s: float = 1e6,
    stepped: Callable[[], object] = int,
    uri: str | None = None,
) -> Tensor:
    """Train, and return all parameters. ``stepped`` is called after each step. ``uri``: None for a volume."""
    trainer = started(group, folder, network(), steps, interval_s, uri)
    for x, y in trainer.steps(trainer.loader(four_classes(77, torch.float64))):
        trainer.optimizer.zero_grad()
        cross_entropy(trainer.model(x), y).backward()
        trainer.optimizer.step()
        stepped()
    parameters: list[Any] = list(trainer.model.parameters())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    trainer.close()
    return torch.cat([p.detach().flatten() for p in whole])


def replace_write(new: Callable[[Write, Path, Mapping[str, Tensor]], Written]) -> None:
    """Let ``new`` write the tensors of a file. It gets the original function and its arguments."""
    original = tensor_file.write
    tensor_file.write = lambda path, tensors: new(original, path, tensors)


def check_train(group: ProcessGroup, folder: Path) -> None:
    trained(group, folder, STEPS // 2)


def check_resume(group: ProcessGroup, folder: Path) -> None:
    """The resumed training equals one that was not interrupted. On as many ranks, it is bitwise equal."""
    written = len(list((folder / "digits-0001").glob("step-0*/model-part-*")))
    resumed = trained(group, folder, STEPS)
    expected = trained(group, folder / "other", STEPS)
    off = float((resumed - expected).abs().max())
    print_on_rank_0(group, f"resumed {written} parts on {group.size} ranks: off by {off:.1e}")
    assert off < 1e-12 if written != group.size else off == 0.0


def check_killed(group: ProcessGroup, folder: Path) -> None:
    """Rank 1 is killed after it has written a part of its second checkpoint."""
    calls = []

    def write(original: Write, path: Path, tensors: Mapping[str, Tensor]) -> Written:
        calls.append(path)
        if group.rank == 1 and len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path, tensors)

    replace_write(write)
    trained(group, folder, 10**6, interval_s=1e-6)


def check_full(group: ProcessGroup, folder: Path) -> None:
    """The volume is full when rank 1 writes to its second checkpoint. All ranks get the error."""
    calls = []

    def write(original: Write, path: Path, tensors: Mapping[str, Tensor]) -> Written:
        calls.append(path)
        if group.rank == 1 and len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, tensors)

    replace_write(write)
    with pytest.raises(CheckpointError, match="rank 1: No space left on device"):
        trained(group, folder, 10**6, interval_s=1e-6)
    group.sum([0.0])
    names = sorted(path.name for path in (folder / "digits-0001").glob("*step-*"))
    assert len(names) == 1 and names[0].startswith("step-"), names
    torch.distributed.destroy_process_group()
    print_on_rank_0(group, "a full volume is an error on all ranks")


def check_background(group: ProcessGroup, folder: Path) -> None:
    """Ranks train while the parts of a checkpoint are written."""
    began, stepped = threading.Event(), threading.Event()

    def write(original: Write, path: Path, tensors: Mapping[str, Tensor]) -> Written:
        began.set()
        assert stepped.wait(60), "no step while the checkpoint is written"
        return original(path, tensors)

    original = tensor_file.write
    replace_write(write)
    trained(group, folder, STEPS, interval_s=1e-6, stepped=lambda: stepped.set() if began.is_set() else None)
    tensor_file.write = original
    print_on_rank_0(group, "training continues while parts are written")


def check_separate(group: ProcessGroup, folder: Path) -> None:
    """Each rank has a volume of its own, so that only rank 0 writes checkpoints, of the whole state."""
    trained(group, folder / str(group.rank), STEPS)
    group.sum([0.0])
    found = sorted(path.name for path in folder.glob(f"{group.rank}/digits-0001/step-*/*"))
    whole = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert found == (whole if group.rank == 0 else []), found
    print_on_rank_0(group, "rank 0 writes the whole state")


def check_gathered(group: ProcessGroup, folder: Path) -> None:
    """Rank 0 gathers a state after the one before is written, so that it never has two of them in memory."""
    writing, waited = threading.Event(), threading.Event()

    def write(original: Write, path: Path, tensors: Mapping[str, Tensor]) -> Written:
        writing.set()
        assert waited.wait(60), "nothing waits for the checkpoint"
        written = original(path, tensors)
        writing.clear()
        return written

    class Watched(FullyShardedParallel):
        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            assert not writing.is_set(), "found a state that is gathered while the one before is written"
            return super().optimizer_state(optimizer)

    class Manager(CheckpointManager):
        def wait(self) -> None:
            if writing.is_set():
                waited.set()
            super().wait()

    steps = itertools.count(1)

    def stepped() -> object:
        """Let rank 0 wait in each step but the first, whose checkpoint follows it, until a checkpoint is written."""
        return group.rank > 0 or next(steps) == 1 or waited.is_set() or writing.wait(60)

    original, strategy, manager = tensor_file.write, fsdp.FullyShardedParallel, training.CheckpointManager
    replace_write(write)
    fsdp.FullyShardedParallel, training.CheckpointManager = Watched, Manager  # type: ignore[misc]
    trained(group, folder / str(group.rank), STEPS, interval_s=1e-6, stepped=stepped)
    tensor_file.write = original
    fsdp.FullyShardedParallel, training.CheckpointManager = strategy, manager  # type: ignore[misc]
    assert waited.is_set() or group.rank > 0
    print_on_rank_0(group, "rank 0 gathers one state at a time")


def memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def check_verified(group: ProcessGroup, folder: Path) -> None:
    """Each rank verifies its files. A changed byte in any file leads all ranks to the checkpoint before."""
    trained(group, folder, STEPS, interval_s=1e-6)
    job = folder / "digits-0001"
    group.sum([0.0])
    before, newest = sorted(job.glob("step-*"))[-2:]
    identity = json.loads((newest / MANIFEST).read_text())["identity"]
    hashed: list[str] = []
    original = tensor_file.sha256

    def sha256(path: Path) -> str:
        hashed.append(path.name)
        return original(path)

    tensor_file.sha256 = sha256

    def found() -> tuple[int, Checkpoints | None]:
        """Return (the step of the checkpoint that rank 0 finds, its checkpoints)."""
        hashed.clear()
        own = Checkpoints(job, identity, keep=3) if group.rank == 0 else None
        stored = ShardedCheckpoints(job, own, None).load_verified(group, wanted=True)
        assert (stored is None) == (group.rank > 0)
        return int(group.broadcast(str(stored.step).encode() if stored is not None else b"")), own

    assert found()[0] == int(newest.name[5:])
    rows = [json.loads(row) for row in group.collect(json.dumps(hashed).encode())]
    parts = [{part_name(file, rank) for file in (MODEL, OPTIMIZER)} for rank in range(group.size)]
    assert all(parts[rank] <= set(rows[rank]) for rank in range(group.size)), rows
    names = sorted(name for row in rows for name in row)
    assert names == sorted({path.name for path in newest.iterdir()} - {MANIFEST}), "each file once"
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            group.sum([0.0])
            if group.rank == 0:
                path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            group.sum([0.0])
            step, own = found()
            assert step == int(before.name[5:]), (path, place)
            assert own is None or own._corrupt == {int(newest.name[5:])}, (path, place)
        group.sum([0.0])
        if group.rank == 0:
            path.write_bytes(content)
    group.sum([0.0])
    assert found()[0] == int(newest.name[5:]), "the files are as before"
    check_other_content(group, found, newest, before)
    tensor_file.sha256 = original
    print_on_rank_0(group, "each rank verifies its files")


def check_other_content(group: ProcessGroup, found: Callable[[], Any], newest: Path, before: Path) -> None:
    """A file that only rank 1 cannot verify proves no damage. Ranks repeat what a transient error has interrupted."""
    original, calls = tensor_file.sha256, []
    sharded.PAUSES_S = (0.0,)
    for error in (errno.EIO, errno.ENOENT, None):

        def sha256(path: Path, error: int | None = error) -> str:
            if group.rank == 1 and path.parent == newest:
                if error is None:
                    return "other content"
                raise OSError(error, os.strerror(error), str(path))
            return original(path)

        tensor_file.sha256 = sha256
        step, own = found()
        assert step == int(before.name[5:])
        assert own is None or (own._corrupt, own._unreadable) == (set(), {int(newest.name[5:])})

    def interrupted(path: Path) -> str:
        calls.append(path)
        if group.rank == 1 and len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return original(path)

    tensor_file.sha256 = interrupted
    assert found()[0] == int(newest.name[5:]) and calls
    tensor_file.sha256 = original


def check_damaged(group: ProcessGroup, folder: Path) -> None:
    """All ranks resume from the checkpoint before one with a damaged part of rank 1."""
    trained(group, folder, STEPS // 2)
    trained(group, folder, STEPS)
    group.sum([0.0])
    before, newest = sorted((folder / "digits-0001").glob("step-*"))
    if group.rank == 0:
        path = newest / part_name(OPTIMIZER, 1)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    group.sum([0.0])
    resumed = trained(group, folder, STEPS)
    assert torch.equal(resumed, trained(group, folder / "other", STEPS))
    print_on_rank_0(group, f"resumed from step {int(before.name[5:])} after damage")


def check_memory(group: ProcessGroup, folder: Path) -> None:
    """A checkpoint needs memory for a copy of the rank's part, and for one tensor of the model."""
    net = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)))
    trainer, began, files = started(group, folder, net, 2), 0, 0
    save = trainer._saving.save

    def measured(*arguments: Any, **options: Any) -> None:
        nonlocal began, files
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        began, files = memory("VmRSS"), memory("RssFile")
        save(*arguments, **options)

    trainer._saving.save = measured  # type: ignore[method-assign]
    for (x,) in trainer.steps(trainer.loader((torch.ones(24, WIDE),))):
        trainer.optimizer.zero_grad()
        trainer.model(x).square().mean().backward()
        trainer.optimizer.step()
    # The code that a checkpoint runs for the first time is in memory, too, but is not memory for the state.
    needed = memory("VmHWM") - began - (memory("RssFile") - files)
    state = 4 * 4 * LAYERS * WIDE**2  # AdamW with amsgrad: parameters and 3 moments
    part, tensor = state / group.size, 4 * WIDE**2
    sys.stdout.write(f"rank {group.rank} of {group.size}: {needed / state:.2f} of the state\n")
    sys.stdout.flush()
    assert needed < part + 3 * tensor, (needed, part, tensor)
    trainer.close()


def main() -> None:
    group, folder = start_process_group(), Path(sys.argv[2])
    for name in sys.argv[3:]:
        globals()[f"check_{name}"](group, folder / name if len(sys.argv) > 4 else folder)
    group.close()


if __name__ == "__main__":
    main()
