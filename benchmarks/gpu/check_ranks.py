"""Run the checks of ``gpu_check.py`` on every rank. Rank 0 prints a JSON line per check: name, finding, passed."""

import copy
import json
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlcontract import DDP_BUCKET_NBYTES, CheckpointRef, ModelRef
from dljob.cluster.catalogue import gpu
from dljob.perf.resources import memory
from dljob.perf.workload.workload import builtin
from dltrain.batch.sampling import Sampler
from dltrain.data.synthetic import SyntheticImages
from dltrain.device.energy import meter
from dltrain.device.rank_device import MEMORY_FRACTION, finish
from dltrain.elastic.parameter_agreement import fingerprint
from dltrain.models import build
from dltrain.protocol.errors import failure
from dltrain.protocol.reporter import RankReporter
from dltrain.train import session
from dltrain.train.trainer import Trainer

EXACT = 1e-5
"""Maximum relative difference from the gradient of one process. Kernels sum other batch sizes in another order."""
ROUNDED = 1e-2
"""Maximum relative difference of parameters that were trained in bfloat16, whose rounding errors are up to 2^-9."""
MAX_UNATTRIBUTED = 0.15
"""Maximum fraction of the elapsed time that the measured parts may miss."""
READS = 2
"""Maximum number of reads from the GPU per step: the all-reduced numbers, and the gradient norm if it is reported."""


def main() -> int:
    return session.run(check)


def check(first: Trainer) -> None:
    """Run all checks. ``first`` provides the process group and the device; it does not train."""
    checks: list[Callable[[Trainer], tuple[str, str, bool]]] = [
        devices, exactness, ddp, sharded, batches, resume, out_of_memory, reading, step_time, ddp_step_time, energy,
    ]  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for run_check in checks:
        name, text, passed = run_check(first)
        everywhere = first.process_group.sum([float(passed)])[0] == first.size
        if first.rank == 0:
            print(json.dumps([name, text, everywhere]), flush=True)


def another(first: Trainer, steps: int, **changes: Any) -> Trainer:
    """Return another trainer on the same ranks that reports nothing."""
    plan, quiet = first.plan.model_copy(update={"steps": steps} | changes), RankReporter(None)
    quiet.rank = -1
    return Trainer(plan, first.process_group, quiet, first.device, first.device_name)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(16 * 256, 64),
        nn.Linear(64, 10),
    )


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, 16, 16, generator=generator), torch.randint(10, (count,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def equal(first: Trainer, number: int) -> bool:
    rows = first.process_group.gather([number >> 32, number & 0xFFFFFFFF])
    return all(row == rows[0] for row in rows)


def devices(first: Trainer) -> tuple[str, str, bool]:
    on_gpu = first.device.type == "cuda"
    trainer, model = another(first, 1), small()
    trainer.wrap(model, sgd(model))
    backend = distributed.get_backend() if distributed.is_initialized() else None
    trainer.close()
    known = gpu(first.device_name) is not None
    current = not on_gpu or torch.cuda.current_device() == first.device.index
    shared = on_gpu and torch.cuda.device_count() < first.size
    note = "in the catalogue" if known else "not in the catalogue" if on_gpu else "no GPU"
    passed = current and (backend in ("nccl", None) or shared or not on_gpu)
    summed = f"all-reduce by {backend}" if backend else "one rank, no all-reduce"
    return "devices", f"{first.device_name} ({note}), {summed}", passed


BY_DDP: dict[str, Any] = {"collective": "DDP", "bucket_nbytes": DDP_BUCKET_NBYTES}


def exactness(first: Trainer, name: str = "exactness", **changes: Any) -> tuple[str, str, bool]:
    steps, data = 5, samples(5 * first.plan.global_batch)
    model, off = small().eval(), 0.0  # without dropout, which differs from rank to rank
    alone = copy.deepcopy(model).to(first.device)
    trainer = another(first, steps, **changes)
    model, opt = trainer.wrap(model, sgd(model))
    for x, y in trainer.steps(trainer.loader(data)):
        loss = cross_entropy(model(x), y)
        trainer.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        if not trainer.step:
            chosen = torch.from_numpy(Sampler(len(data[0]), first.plan.global_batch, 0).part(0, [1], 0).indices)
            cross_entropy(alone(data[0][chosen].to(first.device)), data[1][chosen].to(first.device)).backward()  # type: ignore[no-untyped-call]
            mine, whole = (torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()
                           for net in (model, alone))  # fmt: skip
            off = float((mine - whole).norm() / whole.norm())
        opt.step()
    same = equal(first, fingerprint(model.parameters()))
    trainer.close()
    shares = f"{first.plan.ranks[0].share} … {first.plan.ranks[-1].share}"
    text = f"gradient of local batches {shares} off by {off:.1e}"
    return name, f"{text}, parameters {'equal' if same else 'differ'} after {steps} steps", off <= EXACT and same


def ddp(first: Trainer) -> tuple[str, str, bool]:
    name, text, exact = exactness(first, "ddp", **BY_DDP)
    _, reads, few = reading(first, **BY_DDP)
    return name, f"{text}; {reads}", exact and few


def sharded(first: Trainer) -> tuple[str, str, bool]:
    """Train with strategy Sharded in float32, which must equal one process, and in bfloat16 with recomputed layers."""
    if first.device.type == "cuda" and torch.cuda.device_count() < first.size:
        return "sharded", "skipped, because it needs a GPU for each rank", True
    steps, data = 5, samples(5 * first.plan.global_batch)
    fields = {"parallelism": "Sharded", "collective": "Torch", "min_ranks": first.size}

    def trained(**changes: Any) -> tuple[Tensor, set[str]]:
        types, model = set[str](), small().eval()
        assert isinstance(model, nn.Sequential), "made above"
        trainer = another(first, steps, model=ModelRef(command=("python", "t.py")), **fields, **changes)
        layer = model[4]
        layer.register_forward_pre_hook(lambda module, _: types.add(str(module.weight.dtype)))
        trainer.checkpoint_activations([layer])
        model, opt = trainer.wrap(model, sgd(model))
        for x, y in trainer.steps(trainer.loader(data)):
            opt.zero_grad()
            with trainer.autocast():
                loss = cross_entropy(model(x), y)
            trainer.log(loss=loss)
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
        parts: list[Any] = [getattr(p, "full_tensor", lambda p=p: p)().flatten() for p in model.parameters()]
        trainer.close()
        return torch.cat(parts).detach().double(), types

    alone, sampler = small().eval().to(first.device), Sampler(len(data[0]), first.plan.global_batch, 0)
    opt = sgd(alone)
    for step in range(steps):
        chosen = torch.from_numpy(sampler.part(step, [1], 0).indices)
        opt.zero_grad()
        cross_entropy(alone(data[0][chosen].to(first.device)), data[1][chosen].to(first.device)).backward()  # type: ignore[no-untyped-call]
        opt.step()
    whole = torch.cat([p.flatten() for p in alone.parameters()]).detach().double()
    (exact, _), (half, types) = trained(), trained(precision="BF16", activation_checkpointing=True)
    off, rounded = (float((found - whole).norm() / whole.norm()) for found in (exact, half))
    several = first.size > 1
    passed = off <= EXACT and rounded <= ROUNDED and (types == {"torch.bfloat16"} or not several)
    text = f"parameters off by {off:.1e} after {steps} steps, in bfloat16 by {rounded:.1e}"
    return "sharded", f"{text}; layers compute with {', '.join(sorted(types))}", passed


def batches(first: Trainer) -> tuple[str, str, bool]:
    """Compare each batch with its source after copying it while the GPU is busy."""
    steps, data = 50, samples(4 * first.plan.global_batch)
    trainer, model = another(first, steps), nn.Linear(1, 1)
    model, opt = trainer.wrap(model, sgd(model))
    large = torch.rand(512, 512, device=first.device)
    sampler = Sampler(len(data[0]), first.plan.global_batch, 0)
    wrong = 0
    for number, (x, y) in enumerate(trainer.steps(trainer.loader(data))):
        for _ in range(8 if first.device.type == "cuda" else 1):
            large = large @ large / 512
        part = torch.from_numpy(sampler.part(number, trainer.shares, trainer.rank).indices)
        wrong += not (torch.equal(x.cpu(), data[0][part]) and torch.equal(y.cpu(), data[1][part]))
        model(large[:1, :1]).sum().backward()
        opt.step()
    trainer.close()
    return "batches", f"{wrong} of {steps} arrived damaged", not wrong


def resume(first: Trainer) -> tuple[str, str, bool]:
    """Compare a resumed run with an uninterrupted one, with dropout and torch's deterministic kernels."""
    torch.use_deterministic_algorithms(True)
    data = samples(4 * first.plan.global_batch)
    folder = Path(first.plan.checkpoint.directory)

    def trained(uid: str, steps: int) -> tuple[int, int]:
        saving = CheckpointRef(directory=str(folder))
        trainer, model = another(first, steps, checkpoint=saving, uid=uid), small()
        model, opt = trainer.wrap(model, torch.optim.AdamW(model.parameters()))
        began = trainer.step
        for x, y in trainer.steps(trainer.loader(data)):
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
        trainer.close()
        return began, fingerprint(model.parameters())

    try:
        _, straight = trained("straight", 8)
        trained("halfway", 4)
        began, resumed = trained("halfway", 8)
    finally:
        torch.use_deterministic_algorithms(False)
    same = straight == resumed
    return "resume", f"from step {began} of 8: {'bit-identical' if same else 'differs'}", same and began == 4


def out_of_memory(first: Trainer) -> tuple[str, str, bool]:
    try:
        torch.empty(2**50, device=first.device)
    except RuntimeError as error:
        report = failure(error, first.rank, socket.gethostname())
    else:
        return "memory", "allocating a petabyte succeeded", False
    alive = float(torch.ones(8, device=first.device).sum()) == 8
    if first.device.type != "cuda":
        return "memory", f"reported as {report.reason}", alive and report.reason == "OutOfMemory"
    share = first.plan.ranks[first.rank].share
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(first.device)
    step = plain(large(first).to(first.device), first, share)
    step()
    step()
    finish(first.device)
    peak = torch.cuda.max_memory_allocated(first.device)
    predicted = memory.rank_nbytes(builtin("resnet18", "synthetic-images"), share, True) - memory.GPU_CONTEXT_NBYTES
    text = f"reported as {report.reason}; ResNet-18 peak {peak / 2**20:.0f} MiB, predicted {predicted / 2**20:.0f} MiB"
    return "memory", text, alive and report.reason == "OutOfMemory" and MEMORY_FRACTION * peak <= predicted


def reading(first: Trainer, **changes: Any) -> tuple[str, str, bool]:
    """Count the synchronizing calls that torch reports. Steps that report progress read more, a few times a second."""
    if first.device.type != "cuda":
        return "reading", "reads skipped without a GPU", True
    trainer, model = another(first, 12, **changes), small()
    model, opt = trainer.wrap(model, sgd(model))
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for step, (x, y) in enumerate(trainer.steps(trainer.loader(samples(4 * first.plan.global_batch)))):
            torch.cuda.set_sync_debug_mode("warn" if 6 <= step < 9 else "default")  # three steps, from batch to batch
            loss = cross_entropy(model(x), y)
            trainer.log(loss=loss)
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
    trainer.close()
    waits = [warning for warning in recorded if "synchroniz" in str(warning.message)]
    places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in waits)
    reads = len(waits) / 3
    text = f"a step waits {reads:.1f} times for its GPU, not counting the end of its computation"
    if reads > READS:
        text += f" ({', '.join(f'{place} {count / 3:.1f}' for place, count in places.most_common())})"
    return "reading", text, reads <= READS


Step = Callable[[], None]
WARM = 3
"""Warm-up steps, which are not timed."""


def large(first: Trainer) -> nn.Module:
    """Return the built-in ResNet-18, or a LeNet on CPUs, where ResNet-18 would take too long."""
    torch.manual_seed(0)
    return build("resnet18" if first.device.type == "cuda" else "lenet", SyntheticImages.shape)


def plain(model: nn.Module, first: Trainer, share: int) -> Step:
    x = torch.rand(share, *SyntheticImages.shape.shape, device=first.device)
    y, opt = torch.zeros(share, dtype=torch.long, device=first.device), sgd(model)

    def step() -> None:
        opt.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        opt.step()

    return step


def step_time(first: Trainer, name: str = "step", **changes: Any) -> tuple[str, str, bool]:
    """Time the built-in ResNet-18 with dljob, with plain DDP and without communication, at equal local batch sizes."""
    steps, share = int(sys.argv[1]), 32 if first.device.type == "cuda" else 2
    even = tuple(rank.model_copy(update={"share": share}) for rank in first.plan.ranks)
    batch = share * first.size
    shape = SyntheticImages.shape
    generator = torch.Generator().manual_seed(2)
    data = torch.rand(2 * batch, *shape.shape, generator=generator), torch.zeros(2 * batch, dtype=torch.long)
    trainer = another(first, steps + WARM, ranks=even, global_batch=batch, **changes)
    model = large(first)
    model, opt = trainer.wrap(model, sgd(model))
    rest: Iterator[Any] = trainer.steps(trainer.loader(data))
    parts = [0.0, 0.0]
    """Seconds of computing including data loading, and of waiting."""

    def ours() -> None:
        x, y = next(rest)  # also updates the measured times of the previous step
        times = trainer.progress.times
        parts[0] += times.compute_s + times.data_s
        parts[1] += times.exposed_s
        loss = cross_entropy(model(x), y)
        trainer.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()

    ddp = None
    if first.size > 1:
        ids = [first.device.index] if first.device.type == "cuda" else None
        ddp = plain(DistributedDataParallel(copy.deepcopy(model).to(first.device), device_ids=ids), first, share)
    alone = plain(large(first).to(first.device), first, share)

    def timed(step: Step, count: int) -> float:
        finish(first.device)
        first.process_group.sum([0.0])
        began = time.perf_counter()
        for _ in range(count):
            step()
        finish(first.device)
        return (time.perf_counter() - began) / count

    for step in (ours, ddp, alone):
        if step is not None:
            timed(step, WARM)
    parts[:] = [0.0, 0.0]
    ours_s = timed(ours, steps)
    measured_s, exposed_s = sum(parts) / steps, parts[1] / steps
    ddp_s, alone_s = timed(ddp, steps) if ddp is not None else ours_s, timed(alone, steps)
    assert next(rest, None) is None, "expected no more steps"
    del ddp
    text = (
        f"{1e3 * ours_s:.2f} ms, {1e3 * measured_s:.2f} measured of it ({1e3 * exposed_s:.2f} waiting); "
        f"plain DDP {1e3 * ddp_s:.2f}, without communication {1e3 * alone_s:.2f}"
    )
    trainer.close()
    return name, text, abs(measured_s - ours_s) <= MAX_UNATTRIBUTED * ours_s


def ddp_step_time(first: Trainer) -> tuple[str, str, bool]:
    return step_time(first, "ddp_step", **BY_DDP)


def energy(first: Trainer) -> tuple[str, str, bool]:
    counter = meter(first.device, first.process_group.local_rank)
    if counter is None:
        shared = first.device.type == "cuda" and first.process_group.local_rank >= torch.cuda.device_count()
        return "energy", "found no readable energy counter", shared or first.device.type != "cuda"
    step = plain(large(first).to(first.device), first, 8)
    for _ in range(200 if first.device.type == "cuda" else 1):
        step()
    finish(first.device)
    used = counter.used()
    joules = used.joules if used is not None else 0.0
    return "energy", f"{joules:.1f} J by {used.source if used else '?'}", joules > 0 or first.device.type != "cuda"


if __name__ == "__main__":
    session.leave(main())
