"""Build the reference networks, and time their training steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlcontract import Precision
from dlcontract.hardware import MAX_TIMED, REFERENCE_NETS, ReferenceNet, TimedStep
from dltrain.device.precision import TYPES
from dltrain.models.gpt import Block

WARM_UP_STEPS, TURN_STEPS = 2, 3
CROWDED = 1.3
"""Limit of (elapsed time / CPU time) of steps on one core. Above it, other processes use the cores too much, and steps
on several cores are not reported.
"""
LONG_STEP_S = 0.02
"""Time of a step that a GPU's host, which needs 2 to 5 ms for the reference networks, does not determine."""
MAX_CORE_COUNTS = 5
"""Maximum number of core counts to measure, so that the document stays short."""


@dataclass
class Case:
    """A step to time: ``run`` makes it. ``times``: (elapsed seconds, CPU seconds of the process) of each run."""

    net: str
    batch: int
    cores: int
    precision: Precision
    run: Callable[[], None]
    times: list[tuple[float, float]] = field(default_factory=list)

    def timed(self, on_gpu: bool) -> TimedStep:
        """Return the time of a step. Disturbances only ever add to it.

        On one core, it is the lower quartile of CPU times, which exclude other processes. On a GPU, it is that of
        elapsed times. With several cores, it is the shortest elapsed time, because each thread can be disturbed.
        """
        times = sorted(wall if on_gpu or self.cores > 1 else cpu for wall, cpu in self.times)
        seconds = times[0 if self.cores > 1 else len(times) // 4]
        return TimedStep(
            net=self.net,
            batch=self.batch,
            cores=self.cores,
            s=float(f"{max(seconds, 1e-7):.4g}"),
            precision=self.precision,
        )


class Embedding(nn.Module):
    """Embeddings of tokens and of their positions: from (samples, positions) to (samples, positions, width)."""

    def __init__(self, vocabulary: int, width: int, positions: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both embeddings."""
        embedded: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return embedded


def module(net: ReferenceNet) -> nn.Sequential:
    """Return the network as a PyTorch module."""
    parts: list[nn.Module] = []
    shape = net.shape
    for name, *sizes in net.layers:
        if name == "conv":
            parts.append(nn.Conv2d(shape[0], sizes[0], 3, padding=1))
            shape = (sizes[0], *shape[1:])
        elif name == "linear":
            parts.append(nn.Linear(shape[-1], sizes[0]))
            shape = (*shape[:-1], sizes[0])
        elif name == "pool":
            parts.append(nn.MaxPool2d(2))
            shape = (shape[0], shape[1] // 2, shape[2] // 2)
        elif name == "flatten":
            parts.append(nn.Flatten())
            shape = (torch.Size(shape).numel(),)
        elif name == "embedding":
            parts.append(Embedding(sizes[0], sizes[1], shape[0]))
            shape = (*shape, sizes[1])
        elif name == "block":
            parts.append(Block(shape[-1], sizes[0]))
        else:
            parts.append({"relu": nn.ReLU(), "gelu": nn.GELU(), "layer_norm": nn.LayerNorm(shape[-1])}[name])
    return nn.Sequential(*parts)


def training_step(net: ReferenceNet, batch: int, device: torch.device, precision: Precision) -> Callable[[], None]:
    """Return a function that makes a training step like the trainer's, and waits until the device has finished it."""
    model = module(net).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    x, y = samples(net, batch, device)

    def run() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device.type, TYPES.get(precision, torch.bfloat16), enabled=precision != "FP32"):
            loss = cross_entropy(model(x).reshape(len(y), -1), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def samples(net: ReferenceNet, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random samples of a network, and a label for each output."""
    name, *sizes = net.layers[0]
    has_tokens = name == "embedding"  # each position has a label, its next token
    if has_tokens:
        x = torch.randint(0, sizes[0], (batch, *net.shape), device=device)
    else:
        x = torch.randn(batch, *net.shape, device=device)
    return x, torch.zeros(x.numel() if has_tokens else batch, dtype=torch.int64, device=device)


def core_counts(cores: float) -> list[int]:
    """Return 1, the powers of two below the number of cores, and this number; at most ``MAX_CORE_COUNTS`` of them."""
    most = max(1, int(cores))
    found = sorted({*(1 << i for i in range(most.bit_length())), most})
    found = [each for each in found if each <= most]
    if len(found) > MAX_CORE_COUNTS:
        last = len(found) - 1
        found = [found[round(i * last / (MAX_CORE_COUNTS - 1))] for i in range(MAX_CORE_COUNTS)]
    return found


def cases(device: torch.device, cores: float) -> Iterator[Case]:
    """Yield the steps to time on a device; on a CPU, also with several of the ``cores``."""
    for name, net in REFERENCE_NETS.items():
        if device.type == "cuda":
            precisions: tuple[Precision, ...] = ("FP32", "BF16") if net.half and _has_half_units(device) else ("FP32",)
            for precision in precisions:
                make = partial(training_step, net, device=device, precision=precision)
                yield from gpu_cases(name, net.gpu_batches, precision, make)
            continue
        steps = {batch: training_step(net, batch, device, "FP32") for batch in net.batches}
        for batch, run in steps.items():
            yield Case(name, batch, 1, "FP32", run)
        if net.scales:
            for count in core_counts(cores)[1:]:
                yield Case(name, net.batches[-1], count, "FP32", steps[net.batches[-1]])


def gpu_cases(
    name: str, batches: Sequence[int], precision: Precision, step_of: Callable[[int], Callable[[], None]]
) -> Iterator[Case]:
    """Yield the steps of a network to time on a GPU: of the ``batches``, from the smallest to the largest needed.

    Small batches show what the host needs for a step, large ones what the GPU can do. A batch larger than one whose
    step takes ``LONG_STEP_S`` shows nothing more, and one that does not fit into memory is left out. ``step_of``:
    returns the function that makes a step with this batch.
    """
    for batch in batches:
        try:
            run = step_of(batch)
            for _ in range(WARM_UP_STEPS):
                began = time.perf_counter()
                run()
            took_s = time.perf_counter() - began
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return
        yield Case(name, batch, 1, precision, run)
        if took_s > LONG_STEP_S:
            return


def _has_half_units(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def timed_steps(
    device: torch.device, cores: float, budget_s: float, sample: Callable[[], None] | None = None
) -> tuple[list[TimedStep], float]:
    """Return the timed steps, and the median of (elapsed time / CPU time) on one core, which is 1 on an idle node.

    Steps on one core come first, and once more in the end. If one of the two shows that other processes use the cores
    (``CROWDED``), steps on several cores are left out: threads that wait for a thread without a core say nothing about
    the hardware. ``budget_s``: seconds for all steps. ``sample``: function to call again and again while steps run on
    one core, for other measurements of this time.
    """
    todo = list(cases(device, cores))[:MAX_TIMED]
    on_gpu = device.type == "cuda"
    single, several = ([case for case in todo if (case.cores == 1) == one] for one in (True, False))
    _run_in_turns(single, budget_s * (0.6 if several else 1.0), sample)
    crowded = 1.0 if on_gpu else _crowded(single)
    if several and crowded <= CROWDED:
        _run_in_turns(several, 0.4 * budget_s)
        again = [Case(case.net, case.batch, 1, case.precision, case.run) for case in single]
        _run_in_turns(again, 0.0)
        crowded = max(crowded, _crowded(again))
    if crowded > CROWDED:
        several = []
    return [case.timed(on_gpu) for case in (*single, *several)], crowded


def _crowded(single: list[Case]) -> float:
    return max(1.0, float(f"{median(wall / max(cpu, 1e-9) for case in single for wall, cpu in case.times):.3g}"))


def _run_in_turns(todo: list[Case], budget_s: float, sample: Callable[[], None] | None = None) -> None:
    """Time the cases until ``budget_s`` seconds have passed, but each at least once.

    The cases take turns, so that a disturbance does not hit all runs of one case. A turn has ``TURN_STEPS`` steps and
    one before them that does not count, because it finds the data of another case in the caches. ``sample`` is called
    between turns of cases.
    """
    end = time.perf_counter() + budget_s
    for case in todo:
        torch.set_num_threads(case.cores)
        for _ in range(WARM_UP_STEPS):
            case.run()
    while todo and (time.perf_counter() < end or not todo[-1].times):
        for case in todo:
            if sample is not None:
                sample()
            torch.set_num_threads(case.cores)
            case.run()
            for _ in range(TURN_STEPS):
                wall, cpu = time.perf_counter(), time.process_time()
                case.run()
                case.times.append((time.perf_counter() - wall, time.process_time() - cpu))
